"""Patterns and formats of texts, as the grammar's compiler takes them."""

import re
from typing import Any

from ..errors import GrammarError
from . import schema_formats
from .schema_form import types_of, within

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
"""An escape, a class of characters, or the start of look-around."""


def check_pattern(pattern: str, place: str) -> None:
    """Refuse a pattern that has look-around.

    Raises:
        GrammarError: it has.
    """
    if any(found[0].startswith("(") for found in _TOKEN.finditer(pattern)):
        raise GrammarError("look-around is not supported", place)


def hold_text(new: dict[str, Any], schema: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Write a schema's pattern and format into the one that is made of it.

    Returns:
        the schemas in `allOf` that have what does not fit into one.

    Raises:
        GrammarError: they are not supported.
    """
    patterns: list[str] = []
    if "pattern" in new:
        check_pattern(new["pattern"], within(place, "pattern"))
        patterns.append(new.pop("pattern"))
    patterns += _of_format(new, schema)
    if patterns:
        new["pattern"] = patterns[0]
    more: list[dict[str, Any]] = [{"pattern": pattern} for pattern in patterns[1:]]
    if more:
        new["allOf"] = [*new.get("allOf", []), *more]
    return more


def format_pattern(name: str, place: str) -> str | None:
    """Give the pattern of a format of texts; None for one that says nothing, or is not known.

    Raises:
        GrammarError: the format is known and has no pattern.
    """
    if name in schema_formats.COMPILED:
        raise GrammarError(f"{name!r} is not supported here", within(place, "format"))
    return schema_formats.PATTERNS.get(name)


def _of_format(new: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    name = schema.get("format")
    if name in schema_formats.RANGES:
        low, high = schema_formats.RANGES[name]
        new["minimum"] = max(low, new.get("minimum", low))
        new["maximum"] = min(high, new.get("maximum", high))
    elif "string" not in types_of(schema):
        return []  # a format of texts: any other value has it
    elif name in schema_formats.PATTERNS:
        return [schema_formats.PATTERNS[name]]
    elif name in schema_formats.COMPILED:
        new["format"] = schema_formats.COMPILED[name]
    return []  # one that is not known is an annotation, as the standard has it
