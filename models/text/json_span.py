"""Finds where a JSON value ends in text that arrives in pieces."""

import re

_STRUCTURE = re.compile(r'["{}\[\]]|[^\s:,+\-.\w]')
_STRING = re.compile(r'["\\]')
_AFTER_STRING = re.compile(r"[ \t\r\n]*")


class JsonSpan:
    """Follows one object or array to its last bracket, past brackets inside strings.

    It is no parser: what it finds to be whole may still be refused by one. What it finds to be
    `broken` no parser takes.

    Attributes:
        done: the value is whole.
        broken: what has come cannot begin a value.
    """

    def __init__(self) -> None:
        self.done = self.broken = False
        self._depth = 0
        self._in_string = self._escaped = self._after_string = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start]`; return where the value, or the text, ends."""
        at = start
        while at < len(text) and not (self.done or self.broken):
            at = self._string(text, at) if self._in_string else self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _STRING.search(text, at)
        if match is None:
            return len(text)
        if match.group() == "\\":
            self._escaped = True
        else:
            self._in_string, self._after_string = False, True
        return match.end()

    def _structure(self, text: str, at: int) -> int:
        if self._after_string:
            match = _AFTER_STRING.match(text, at)
            at = match.end() if match else at
            if at == len(text):
                return at
            self._after_string = False
            if text[at] not in ":,}]":
                self.broken = True
                return at
        match = _STRUCTURE.search(text, at)
        if match is None:
            return len(text)
        self._take(match.group())
        return match.start() if self.broken else match.end()

    def _take(self, letter: str) -> None:
        if letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        else:
            self.broken = True
