"""What is wrong with a table `[models.NAME]` or `[tenants.NAME]`, in words."""

import re
from difflib import get_close_matches
from typing import get_args, get_type_hints

import msgspec

from ..quoting import quote

_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_KINDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
}


def in_words(error: msgspec.ValidationError, table: type[msgspec.Struct]) -> str:
    """Say which key of a table is wrong, and what it must be.

    Args:
        error: of reading the table.
        table: what it was read as.
    """
    keys = table.__struct_fields__
    found = _PLACE.fullmatch(str(error))
    text, place = (found[1], found[2] or "") if found else (str(error), "")
    if unknown := _UNKNOWN.fullmatch(text):
        near = get_close_matches(unknown[1], keys, 1)
        meant = f"did you mean {near[0]}? Its" if near else "its"
        return f"unknown key {quote(unknown[1])}; {meant} keys are: {', '.join(keys)}"
    if text.startswith("Invalid enum value"):
        text = " or ".join(get_args(get_type_hints(table)[place]))
    elif "matching regex" in text:
        text = "Expected a size: 8GiB, 500MB, or a whole number of bytes"
    text = text.removeprefix("Expected ").replace(" | null", "").replace("> 0.0", "over 0")
    for kind, words in _KINDS.items():
        text = text.replace(kind, words)
    return f"{place or 'it'} must be {text.replace(', got', ', and is')}"
