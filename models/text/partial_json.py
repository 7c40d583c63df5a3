"""JSON that was cut off."""

import re

import msgspec
from msgspec import Raw

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]+|"', re.DOTALL)
_SCALAR = re.compile(r'".*"|true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


def close_json(text: str) -> str:
    """Close an object that was cut off, as clients that read streams do.

    Args:
        text: of an object, or its beginning.

    Returns:
        The object with those members and elements that are whole; a number at its end counts.
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
        if found == '"':  # a text without an end
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
