"""A client's text as it may stand in answers and log lines: short, and all of it printable."""

QUOTED = 200
"""Characters of a client's text that are quoted; of the rest only the number is told."""


def printable(text: str) -> str:
    """Escape what does not print: control codes, line breaks, half surrogates, bidi marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def shorten(text: str, limit: int = QUOTED) -> str:
    """Cut a text to `limit` characters and say how long it was; escape what does not print."""
    if len(text) <= limit:
        return printable(text)
    return f"{printable(text[:limit])}… ({len(text)} characters)"


def quote(value: object) -> str:
    """Write a client's value between quotation marks, shortened."""
    return f"'{shorten(str(value))}'"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
