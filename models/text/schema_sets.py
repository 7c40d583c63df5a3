"""`uniqueItems`, which the grammar's compiler does not know, where there are few values."""

from itertools import combinations
from typing import Any

from ..errors import GrammarError
from .schema_form import types_of
from .schema_unions import comparable

_MOST_VALUES = 6
_LISTED = frozenset({"const", "enum", "type"})
_WORDS = f"is supported only for a list of at most {_MOST_VALUES} values, given by enum"


def hold_unique(new: dict[str, Any], items: dict[str, Any], place: str) -> None:
    """Allow no value twice in an array. Values keep the order in which the schema has them.

    Args:
        new: a schema that was rewritten, but for this.
        items: the keywords of its `items` that have an effect.
        place: of `uniqueItems`.

    Raises:
        GrammarError: there are too many values.
    """
    if "array" not in types_of(new) or new.get("maxItems", 2) <= 1:
        return
    values = _values(items)
    if values is None or types_of(new) != ["array"] or "prefixItems" in new:
        raise GrammarError(_WORDS, place)
    new.pop("items", None)
    least, most = new.get("minItems", 0), min(new.get("maxItems", len(values)), len(values))
    sets = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in each],
            "items": False,
            "minItems": count,
        }
        for count in range(least, most + 1)
        for each in combinations(values, count)
    ]
    if not sets:
        raise GrammarError("leaves no array that is long enough", place)
    new["allOf"] = [*new.get("allOf", []), {"anyOf": sets}]


def _values(items: dict[str, Any]) -> list[Any] | None:
    """All values of a schema; None where they cannot be listed."""
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
        if "type" not in items or _has_type(value, key[0], types):
            found.setdefault(key, value)
    return list(found.values()) if len(found) <= _MOST_VALUES else None


def _has_type(value: Any, kind: str, types: list[str]) -> bool:
    whole = kind == "number" and value == int(value)
    return kind in types or (whole and "integer" in types)
