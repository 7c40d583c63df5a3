r"""Halves of surrogate pairs in JSON, as `\ud83d` alone: programs that cut UTF-16 write them."""

import re

_ESCAPE = re.compile(rb"\\u[dD]([89a-fA-F])[0-9a-fA-F]{2}")
_LOW = re.compile(rb"\\u[dD][c-fC-F]")
_LENGTH = 6  # of an escape, before and after
_BACKSLASH = ord("\\")


def whole_characters(text: bytes | bytearray) -> bytearray | None:
    """Write U+FFFD for each half; None where there is none.

    Args:
        text: JSON in UTF-8.
    """
    mended: bytearray | None = None
    second = -1  # where the second half of a pair is
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
    """Whether a backslash is not itself escaped by the ones before it."""
    first = backslash
    while first > 0 and text[first - 1] == _BACKSLASH:
        first -= 1
    return (backslash - first) % 2 == 0
