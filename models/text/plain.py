"""Answers that are nothing but text."""

from .events import OutputEvent, TextDelta


class PlainParser:
    """Passes all text on as content; what text completions are read with."""

    in_reasoning = False
    done = False

    def __init__(self) -> None:
        self._passed = 0

    def push(self, text: str) -> list[OutputEvent]:
        """Take more text; return it."""
        if not text:
            return []
        start, self._passed = self._passed, self._passed + len(text)
        return [TextDelta(text, start)]

    def flush(self) -> list[OutputEvent]:
        """Nothing is ever held back."""
        return []
