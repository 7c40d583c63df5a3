"""JSON as text: its end, its closing brackets, halves of characters in it."""

import re

import msgspec
from msgspec import Raw

_STRUCTURE = re.compile(r'["{}\[\]]|[^\s:,+\-.\w]')
_STRING = re.compile(r'["\\]')
_BLANKS = re.compile(r"[ \t\r\n]*")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]+|"', re.DOTALL)
_SCALAR = re.compile(r'".*"|true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}
_ESCAPE = re.compile(rb"\\u[dD]([89a-fA-F])[0-9a-fA-F]{2}")
_LOW = re.compile(rb"\\u[dD][c-fC-F]")
_LENGTH = 6  # of an escape
_BACKSLASH = ord("\\")


class JsonSpan:
    """Follows one object or array to its last bracket, past brackets inside strings.

    It is no parser: a parser may refuse a value that is `done`, and refuses each that is `broken`.

    Attributes:
        done: the value is whole.
        broken: the text cannot begin a value.
    """

    def __init__(self) -> None:
        self.done = self.broken = False
        self._depth = 0
        self._in_string = self._escaped = self._after_string = False

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start]`; return the index at which the value or the text ends."""
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
            match = _BLANKS.match(text, at)
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


def close_json(text: str) -> str:
    """Close a truncated object after its last whole value, as clients that read streams do.

    A number at the end counts as whole.
    """
    try:
        msgspec.json.decode(text, type=Raw)
    except (msgspec.DecodeError, RecursionError):
        return _closed(text)
    return text


def _closed(text: str) -> str:
    end, closers, is_value = 0, list[str](), False
    for match in _TOKEN.finditer(text):
        found = match.group()
        if found == '"':  # a string without an end
            break
        if found in _CLOSERS:
            closers.append(_CLOSERS[found])
            is_value = found == "["
        elif found in ":,":
            is_value = found == ":" or closers[-1:] == ["]"]
            continue
        elif found in "}]":
            del closers[-1:]
        elif not (is_value and _SCALAR.fullmatch(found)):
            continue
        end = match.end()
    return text[:end] + "".join(reversed(closers)) or "{}"


def whole_characters(text: bytes | bytearray) -> bytearray | None:
    r"""Replace each half of a surrogate pair (a lone `\ud83d`) by U+FFFD; None if there is none.

    Programs that cut UTF-16 write them. The text is JSON in UTF-8.
    """
    mended: bytearray | None = None
    second = -1  # index of a pair's second half
    for found in _ESCAPE.finditer(text):
        start = found.start()
        if start == second or not _is_escape(text, start):
            continue
        if found[1] in b"89abAB" and _LOW.match(text, start + _LENGTH):
            second = start + _LENGTH
            continue
        mended = mended or bytearray(text)
        mended[start : start + _LENGTH] = rb"\ufffd"
    return mended


def _is_escape(text: bytes | bytearray, backslash: int) -> bool:
    """True if a backslash is not itself escaped."""
    first = backslash
    while first > 0 and text[first - 1] == _BACKSLASH:
        first -= 1
    return (backslash - first) % 2 == 0
