"""Keywords about one value that the grammar's compiler does not support as they are.

They are written in keywords that it knows: bounds as doubles, formats as patterns, `propertyNames`
as properties, `uniqueItems` as the possible sets.
"""

import math
import re
from itertools import combinations
from typing import Any

from ...errors import GrammarError
from . import schema_formats
from .schema_check import is_number, types_of, within

_MOST = 2**63 - 1  # largest absolute value of a bound
_LONGEST = 10_000_000  # characters, elements or names
_MOST_VALUES = 6  # of an array without repetition
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]", re.DOTALL)
"""An escape, a class of characters, or the start of look-around."""

_LISTED = frozenset({"const", "enum", "type"})
_DESCRIBED = frozenset({"format", "maxLength", "minLength", "pattern", "type"})
_UNIQUE = f"is supported only for a list of at most {_MOST_VALUES} values, given by enum"


def check_pattern(pattern: str, place: str) -> None:
    """Raise GrammarError for a pattern with look-around."""
    if any(found[0].startswith("(") for found in _TOKEN.finditer(pattern)):
        raise GrammarError("look-around is not supported", place)


def hold_text(new: dict[str, Any], schema: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """Write a schema's pattern and format into the rewritten one.

    Returns the schemas in `allOf` for further patterns. Raises GrammarError for unsupported ones.
    """
    patterns: list[str] = []
    if "pattern" in new:
        check_pattern(new["pattern"], within(place, "pattern"))
        patterns.append(new.pop("pattern"))
    name = schema.get("format")
    if name in schema_formats.RANGES:
        low, high = schema_formats.RANGES[name]
        new["minimum"] = max(low, new.get("minimum", low))
        new["maximum"] = min(high, new.get("maximum", high))
    elif "string" in types_of(schema):  # other values have no format
        if name in schema_formats.PATTERNS:
            patterns.append(schema_formats.PATTERNS[name])
        elif name in schema_formats.COMPILED:
            new["format"] = schema_formats.COMPILED[name]
    if patterns:
        new["pattern"] = patterns[0]
    more: list[dict[str, Any]] = [{"pattern": pattern} for pattern in patterns[1:]]
    if more:
        new["allOf"] = [*new.get("allOf", []), *more]
    return more


def count(keyword: str, number: int, place: str) -> int:
    """Cut an upper bound to the compiler's limit; raise GrammarError for such a lower bound."""
    if number > _LONGEST and keyword.startswith("min"):
        raise GrammarError(f"is too large: at most {_LONGEST} is supported", place)
    return min(number, _LONGEST)


def set_bounds(new: dict[str, Any], place: str) -> None:
    """Write bounds as doubles, never wider; raise GrammarError for too large ones."""
    for side, way in (("Minimum", math.inf), ("Maximum", -math.inf)):
        plain, exclusive = side.lower(), f"exclusive{side}"
        if isinstance(new.get(exclusive), bool):  # draft 4's
            strict = new.pop(exclusive)
            if strict and plain in new:
                new[exclusive] = new.pop(plain)
        for key in (plain, exclusive):
            bound = new.get(key)
            if bound is not None and (isinstance(bound, int) or abs(bound) > _MOST):
                new[key] = _as_double(int(bound), way, within(place, key))


def _as_double(bound: int, way: float, place: str) -> int:
    bound = max(bound, -_MOST) if way > 0 else min(bound, _MOST)
    if abs(bound) > _MOST:
        raise GrammarError("is a number that is too large", place)
    near = float(bound)
    wider = near < bound if way > 0 else near > bound
    return int(math.nextafter(near, way) if wider else near)


def check_values(new: dict[str, Any], place: str) -> None:
    """Raise GrammarError for values that cannot be written or names that cannot be counted."""
    keyword = "const" if "const" in new else "enum"
    _check_value(new.get(keyword), within(place, keyword))
    # A grammar lets additional names repeat, and each counts only once.
    open_ended = new.get("additionalProperties", True) is not False or "patternProperties" in new
    if open_ended and new.get("minProperties", 0) - len(new.get("required", [])) > 1:
        words = "is not supported where it asks for more than one name that is not required"
        raise GrammarError(words, within(place, "minProperties"))


def _check_value(value: Any, place: str) -> None:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_value(each, place)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise GrammarError("has control characters, which are not supported", place)
    elif is_number(value) and (abs(value) > _MOST or float(value) != value):
        raise GrammarError("is a number that is too large to be written exactly", place)


def hold_names(new: dict[str, Any], names: dict[str, Any], value: Any, place: str) -> None:
    """Restrict an object to the names that the effective keywords `names` allow.

    `value` is the rewritten schema for a name without one. Raises GrammarError if the restriction
    is not supported.
    """
    if "string" not in types_of(names):
        raise GrammarError("must allow texts", place)
    if names.keys() <= _LISTED and names.keys() & {"const", "enum"}:
        if "patternProperties" in new:
            raise GrammarError("is not supported beside patternProperties", place)
        listed = [names["const"]] if "const" in names else names["enum"]
        texts = [n for n in listed if isinstance(n, str) and n in names.get("enum", listed)]
        own = new.get("properties", {})
        new["properties"] = {name: own.get(name, value) for name in texts}
        new["additionalProperties"] = False
        return
    if not names.keys() <= _DESCRIBED:
        words = "is supported only with enum or const, or with pattern, lengths and format"
        raise GrammarError(words, place)
    if new.get("properties"):
        raise GrammarError("is not supported beside properties", place)
    patterns = _patterns_of(names, place)
    if len(patterns) > 1 or (patterns and "patternProperties" in new):
        words = "is supported only with one of pattern, lengths and format, and alone"
        raise GrammarError(words, place)
    for pattern in patterns:
        check_pattern(pattern, within(place, "pattern"))
        new["patternProperties"] = {pattern: value}
        new["additionalProperties"] = False


def _patterns_of(names: dict[str, Any], place: str) -> list[str]:
    patterns = [names["pattern"]] if "pattern" in names else []
    if "minLength" in names or "maxLength" in names:
        most = names.get("maxLength")
        bounds = f"{int(names.get('minLength', 0))},{'' if most is None else int(most)}"
        patterns.append(rf"^[\s\S]{{{bounds}}}$")
    name = names.get("format")
    if name in schema_formats.COMPILED:
        raise GrammarError(f"{name!r} is not supported here", within(place, "format"))
    if name in schema_formats.PATTERNS:
        patterns.append(schema_formats.PATTERNS[name])
    return patterns


def hold_unique(new: dict[str, Any], items: dict[str, Any], place: str) -> None:
    """Allow no value of `items` (effective keywords) twice; values keep the schema's order.

    Raises GrammarError for too many values.
    """
    if "array" not in types_of(new) or new.get("maxItems", 2) <= 1:
        return
    values = _values(items)
    if values is None or types_of(new) != ["array"] or "prefixItems" in new:
        raise GrammarError(_UNIQUE, place)
    new.pop("items", None)
    least, most = new.get("minItems", 0), min(new.get("maxItems", len(values)), len(values))
    sets = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in each],
            "items": False,
            "minItems": size,
        }
        for size in range(least, most + 1)
        for each in combinations(values, size)
    ]
    if not sets:
        raise GrammarError("leaves no array that is long enough", place)
    new["allOf"] = [*new.get("allOf", []), {"anyOf": sets}]


def _values(items: dict[str, Any]) -> list[Any] | None:
    """List all values of a schema; None if that is impossible."""
    types = types_of(items)
    listed = [False, True] if types == ["boolean"] else None
    if "enum" in items or "const" in items:
        listed = items.get("enum", [items.get("const")])
    if listed is None or not items.keys() <= _LISTED or {"enum", "const"} <= items.keys():
        return None
    found: dict[Any, Any] = {}
    for value in listed:
        key = comparable(value)
        if key is None:
            return None
        whole = key[0] == "number" and value == int(value)
        if "type" not in items or key[0] in types or (whole and "integer" in types):
            found.setdefault(key, value)
    return list(found.values()) if len(found) <= _MOST_VALUES else None


def comparable(value: Any) -> tuple[str, Any] | None:
    """Return a value's type and a key that equal values share; None for arrays and objects."""
    if value is None:
        return "null", None
    if is_number(value):
        return "number", value  # an int and an equal float are equal keys
    if isinstance(value, str | bool):
        return "string" if isinstance(value, str) else "boolean", value
    return None
