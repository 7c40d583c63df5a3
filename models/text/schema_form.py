"""What a JSON schema must look like to be one, and how large it may be.

The metaschemas of drafts 4 to 2020-12 taken together: what any of them allows is no fault here.
Annotations (`title`, `examples`, `deprecated` and the like) are not checked: they say nothing of a
value.
Written out, because a fault must name its place, and a hostile schema must not cost more than its
size.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any

from ..errors import GrammarError

MOST_NODES = 20_000
"""Values in a schema, all counted: objects, members, elements."""

MOST_CHARACTERS = 500_000
DEEPEST = 96

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

SCHEMA = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "else", "if", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMAS_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
COUNTS = frozenset(
    {
        "maxContains", "maxItems", "maxLength", "maxProperties",
        "minContains", "minItems", "minLength", "minProperties",
    }
)  # fmt: skip
_NUMBERS = frozenset({"maximum", "minimum"})
_TEXTS = frozenset(
    {
        "$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema", "format", "pattern",
    }
)  # fmt: skip


def within(place: str, name: str | int) -> str:
    """Name a place below another: `properties.city`, `anyOf.0`, `properties."a.b"`."""
    text = str(name)
    if not text or any(c in text for c in '." \t\n') or not text.isprintable():
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{place}.{text}" if place else text


def measure(schema: Any, place: str = "") -> int:
    """Count the values of a JSON text.

    Raises:
        GrammarError: there are too many, they are nested too deeply, or say too much.
    """
    nodes = characters = 0
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
                characters += sum(map(len, value))
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, str):
                characters += len(value)
        nodes += len(level)
        if nodes + len(below) > MOST_NODES:
            raise GrammarError(f"is too large: it has more than {MOST_NODES} values", place)
        if characters > MOST_CHARACTERS:
            raise GrammarError(f"is too long: more than {MOST_CHARACTERS} characters", place)
        if not below:
            return nodes
        level = below
    raise GrammarError(f"is nested deeper than {DEEPEST} levels", place)


def check(schema: Any, place: str = "") -> None:
    """See that a schema is one, in all its parts. It must have been measured.

    Raises:
        GrammarError: it is not; the place is where.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError("must be a schema: an object, true or false", place)
    for keyword, value in schema.items():
        _check_keyword(keyword, value, within(place, keyword))


def types_of(schema: dict[str, Any]) -> list[str]:
    """List the types that a schema names, or all."""
    types = schema.get("type", ["array", "object", "string", "number"])
    return types if isinstance(types, list) else [types]


def _check_keyword(keyword: str, value: Any, place: str) -> None:
    if keyword in SCHEMAS or (keyword == "items" and isinstance(value, list)):
        _expect(isinstance(value, list) and value, "must be a list of schemas, not empty", place)
        for i, each in enumerate(value):
            check(each, within(place, i))
    elif keyword in SCHEMAS_BY_NAME:
        _expect(isinstance(value, dict), "must be an object of schemas", place)
        for name, each in value.items():
            check(each, within(place, name))
    elif keyword in SCHEMA or keyword == "items":
        check(value, place)
    elif keyword in _CHECKS:
        _CHECKS[keyword](value, place)


def _expect(fulfilled: Any, words: str, place: str) -> None:
    if not fulfilled:
        raise GrammarError(words, place)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are none."""
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _check_type(value: Any, place: str) -> None:
    names = value if isinstance(value, list) else [value]
    known = all(isinstance(name, str) and name in TYPES for name in names)
    words = f"must be one of {', '.join(sorted(TYPES))}, or a list of these without repetition"
    _expect(names and known and len(set(names)) == len(names), words, place)


def _check_required(value: Any, place: str) -> None:
    names = value if isinstance(value, list) else [None]
    fulfilled = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    _expect(fulfilled, "must be a list of names without repetition", place)


def _check_count(value: Any, place: str) -> None:
    fulfilled = is_number(value) and value >= 0 and value == int(value)
    _expect(fulfilled, "must be an integer, 0 or greater", place)


def _check_dependencies(value: Any, place: str) -> None:
    _expect(isinstance(value, dict), "must be an object", place)
    for name, each in value.items():
        if isinstance(each, list):
            _check_required(each, within(place, name))
        else:
            check(each, within(place, name))


def _is(kinds: type, words: str) -> Callable[[Any, str], None]:
    return lambda value, place: _expect(isinstance(value, kinds), words, place)


def _check_number(value: Any, place: str) -> None:
    _expect(is_number(value), "must be a number", place)


def _check_exclusive(value: Any, place: str) -> None:
    _expect(isinstance(value, int | float), "must be a number", place)


def _check_multiple(value: Any, place: str) -> None:
    _expect(is_number(value) and value > 0, "must be a number greater than 0", place)


_CHECKS: dict[str, Callable[[Any, str], None]] = {
    **dict.fromkeys(COUNTS, _check_count),
    **dict.fromkeys(_NUMBERS, _check_number),
    **dict.fromkeys(_TEXTS, _is(str, "must be a text")),
    "dependencies": _check_dependencies,
    "dependentRequired": _check_dependencies,
    "enum": _is(list, "must be a list"),
    "exclusiveMaximum": _check_exclusive,
    "exclusiveMinimum": _check_exclusive,
    "multipleOf": _check_multiple,
    "required": _check_required,
    "type": _check_type,
    "uniqueItems": _is(bool, "must be true or false"),
}
