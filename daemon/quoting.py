"""Text and numbers for people: clients' text is short and printable, numbers have units."""

QUOTED = 200
"""Characters of a client's text that are quoted; the rest is only counted."""

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_STEP = 1024


def printable(text: str) -> str:
    """Escape unprintable characters: control codes, line breaks, half surrogates, bidi marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def shorten(text: str, limit: int = QUOTED) -> str:
    """Cut a text to `limit` characters, add its length, and escape what does not print."""
    if len(text) <= limit:
        return printable(text)
    return f"{printable(text[:limit])}… ({len(text)} characters)"


def quote(value: object) -> str:
    """Write a client's value between quotation marks, shortened."""
    return f"'{shorten(str(value))}'"


def amount(nbytes: float) -> str:
    """Write a number of bytes: `512 B`, `3.4 MiB`."""
    if nbytes < _STEP:
        return f"{nbytes:.0f} B"
    for unit in _UNITS:
        nbytes /= _STEP
        if nbytes < _STEP or unit == _UNITS[-1]:
            break
    return f"{nbytes:.1f} {unit}"


def age(seconds: float) -> str:
    """Write a duration by its largest unit: `12 s`, `3 min`, `5 h`, `2 d`."""
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def share(part: float, whole: float) -> str:
    """Write a part of a whole in percent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
