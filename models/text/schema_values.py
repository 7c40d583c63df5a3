"""The numbers and texts in a schema, as the grammar's compiler takes them."""

import math
import re
from typing import Any

from ..errors import GrammarError
from .schema_form import is_number, within

_MOST = 2**63 - 1  # the greatest number that a bound can be, of either sign
_LONGEST = 10_000_000  # characters, elements or names
_CONTROL = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")


def count(keyword: str, number: int, place: str) -> int:
    """Cut what cannot be reached anyway to what the compiler takes."""
    if number <= _LONGEST:
        return number
    if keyword.startswith("min"):
        raise GrammarError(f"is too large: at most {_LONGEST} is supported", place)
    return _LONGEST


def set_bounds(new: dict[str, Any], place: str) -> None:
    """Write bounds as the compiler takes them: in doubles, never wider than they are."""
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
    """See that values can be written, and names be counted.

    Raises:
        GrammarError: they cannot.
    """
    for value in [new["const"]] if "const" in new else new.get("enum", []):
        _check_value(value, within(place, "const" if "const" in new else "enum"))
    # Additional names may be repeated in a grammar, and then count once only.
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
