"""JSON schemas: their form, bounds on their size, and the meaning of keywords.

The metaschemas of drafts 4 to 2020-12 taken together: a form that any of them allows is accepted.
Annotations (`title`, `examples`, `deprecated` and the like) are not checked. The checks are written
out because an error must name its place, and a hostile schema must not cost more than its size.
"""

from collections.abc import Callable
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple

from ...errors import GrammarError

MOST_NODES = 20_000
"""Values in a schema, objects, members and elements included."""

MOST_CHARACTERS = 500_000
DEEPEST = 96
_MOST_NAMES = 2000
_MOST_COMBINATIONS = 100
_MOST_PATTERNS = 8
_MOST_MULTIPLES = 10_000
_LONGEST_CHAIN = 100

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
COUNTS = frozenset(
    f"{side}{kind}"
    for side in ("min", "max")
    for kind in ("Contains", "Items", "Length", "Properties")
)
KEPT = frozenset(
    {
        "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maximum",
        "maxProperties", "minItems", "minLength", "minimum", "minProperties", "multipleOf",
        "pattern", "required", "type",
    }
)  # fmt: skip
"""Keywords that the grammar's compiler supports as they are."""

_BELOW = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_BELOW_IN_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_BELOW_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
_REFUSED = {
    "$dynamicRef": "", "$recursiveRef": "", "if": "", "not": "",
    "contains": "array", "unevaluatedItems": "array",
    "dependencies": "object", "dependentRequired": "object", "dependentSchemas": "object",
    "unevaluatedProperties": "object",
}  # fmt: skip
"""Unsupported keywords, and the type of value that each restricts."""

_WITHOUT_EFFECT: dict[str, list[Any]] = {
    **{keyword: [{}] for keyword in ("dependencies", "dependentRequired", "dependentSchemas")},
    **{keyword: [True, {}] for keyword in ("unevaluatedItems", "unevaluatedProperties")},
}
EFFECTIVE = KEPT.union(
    ("$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "else", "format"),
    ("items", "oneOf", "patternProperties", "prefixItems", "properties", "propertyNames", "then"),
    ("uniqueItems", *_REFUSED),
)
"""Keywords that restrict a value."""


def within(place: str, name: str | int) -> str:
    """Name a place below another: `properties.city`, `anyOf.0`, `properties."a.b"`."""
    text = str(name)
    if not text or any(c in text for c in '." \t\n') or not text.isprintable():
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{place}.{text}" if place else text


def types_of(schema: dict[str, Any]) -> list[str]:
    """List the types that a schema names, or all."""
    types = schema.get("type", ["array", "object", "string", "number"])
    return types if isinstance(types, list) else [types]


def is_number(value: Any) -> bool:
    """True if a JSON value is a number; true and false are none."""
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def effective(schema: dict[str, Any]) -> dict[str, Any]:
    """Select a schema's keywords that restrict its values."""
    return {keyword: value for keyword, value in schema.items() if keyword in EFFECTIVE}


def has_unsupported_effect(keyword: str, schema: dict[str, Any]) -> bool:
    """True if an unsupported keyword changes which values are valid."""
    kind = _REFUSED.get(keyword)
    if kind is None or (kind and kind not in types_of(schema)):
        return False
    if keyword == "if":
        return "then" in schema or "else" in schema
    return schema[keyword] not in _WITHOUT_EFFECT.get(keyword, [])


def each_below(
    schema: dict[str, Any], see: Callable[[Any, str], Any], place: str = ""
) -> dict[str, Any]:
    """Copy a schema; apply `see` to each schema directly below it, and its place."""
    new = dict(schema)
    for keyword, value in schema.items():
        at = within(place, keyword)
        if isinstance(value, list) and (keyword in _BELOW_IN_LIST or keyword == "items"):
            new[keyword] = [see(each, within(at, i)) for i, each in enumerate(value)]
        elif isinstance(value, dict) and keyword in _BELOW_BY_NAME:
            new[keyword] = {name: see(each, within(at, name)) for name, each in value.items()}
        elif keyword in _BELOW:
            new[keyword] = see(value, at)
    return new


# -- size ----------------------------------------------------------------------------------


def measure(schema: Any, place: str = "") -> int:
    """Count the values of a JSON text.

    Raises:
        GrammarError: it has too many values, levels or characters.
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


class _Weight(NamedTuple):
    """Size of a schema when all that applies to one value is merged."""

    names: int = 0  # of properties; compiling an object takes their square
    combinations: int = 1  # of the options of several lists of options
    patterns: int = 0  # for one text; each doubles the time of a match


class Scale:
    """Bounds the cost of compiling schemas where it grows faster than their text."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._known: dict[int, _Weight] = {}
        self._multiples = 0

    def weigh(self, schema: dict[str, Any], place: str) -> None:
        """Raise GrammarError for a schema that is too heavy; schemas below it are not weighed."""
        weight = self._weight(schema, place, 0)
        for found, most, words in (
            (weight.names, _MOST_NAMES, "properties"),
            (weight.combinations, _MOST_COMBINATIONS, "combinations of alternatives"),
            (weight.patterns, _MOST_PATTERNS, "patterns for one text"),
        ):
            if found > most:
                raise GrammarError(f"has over {most} {words}", place)
        if "multipleOf" in schema:
            # The compiler tells the remainders apart, digit by digit.
            number = Decimal(str(schema["multipleOf"])).normalize().as_tuple()
            zeros = max(0, int(number.exponent))
            self._multiples += int(Decimal((0, number.digits, min(zeros, 5))))
            if self._multiples > _MOST_MULTIPLES:
                words = f"is too great: all of them together may be {_MOST_MULTIPLES}"
                raise GrammarError(words, within(place, "multipleOf"))

    def _weight(self, schema: Any, place: str, depth: int) -> _Weight:
        if not isinstance(schema, dict):
            return _Weight()
        if id(schema) in self._known:
            return self._known[id(schema)]
        if depth > _LONGEST_CHAIN:
            raise GrammarError(f"leads to over {_LONGEST_CHAIN} nested schemas", place)
        self._known[id(schema)] = _Weight()  # for a schema that leads back to itself
        names, combinations = len(schema.get("properties", {})), 1
        patterns = ("pattern" in schema) + ("format" in schema)
        target = self._definitions.get(str(schema.get("$ref")).removeprefix("#/$defs/"))
        for part in [target, *schema.get("allOf", [])]:
            weight = self._weight(part, place, depth + 1)
            names += weight.names
            combinations *= weight.combinations
            patterns += weight.patterns
        for keyword in ("anyOf", "oneOf"):
            options = [self._weight(part, place, depth + 1) for part in schema.get(keyword, [])]
            names += sum(option.names for option in options)
            combinations *= sum(option.combinations for option in options) or 1
            patterns += max((option.patterns for option in options), default=0)
        combinations = min(combinations, _MOST_COMBINATIONS + 1)
        self._known[id(schema)] = _Weight(names, combinations, patterns)
        return self._known[id(schema)]


# -- slips ---------------------------------------------------------------------------------


def mended(schema: Any, _: str = "") -> Any:
    """Return a schema without slips, and without a `not` that allows all values or none.

    Generators make slips: a Go struct without a value writes null for an absent keyword, PHP writes
    an empty object as `[]`, and draft 3 wrote `required: true` into a property. None of them
    restricts a value. The schema has been measured, and is not changed.
    """
    if schema == []:
        return {}
    if not isinstance(schema, dict):
        return schema
    left = {keyword: value for keyword, value in schema.items() if not _is_slip(keyword, value)}
    for keyword in left.keys() & _BELOW_BY_NAME:
        if left[keyword] == []:
            left[keyword] = {}
        elif isinstance(left[keyword], dict):
            named = left[keyword].items()
            left[keyword] = {name: {} if each is None else each for name, each in named}
    if left.get("items") == []:
        left["items"] = {}
    new = each_below(left, mended)
    if "not" in new and (new["not"] is True or new["not"] == {}):
        return False
    if new.get("not") is False:
        del new["not"]
    return new


def _is_slip(keyword: str, value: Any) -> bool:
    if value is None:
        return keyword not in ("const", "default")
    return keyword == "required" and isinstance(value, bool)


# -- form ----------------------------------------------------------------------------------


def check(schema: Any, place: str = "") -> None:
    """Raise GrammarError for an invalid part of a measured schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarError("must be a schema: an object, true or false", place)
    for keyword, value in schema.items():
        at = within(place, keyword)
        if keyword in _BELOW_IN_LIST or (keyword == "items" and isinstance(value, list)):
            fulfilled = isinstance(value, list) and bool(value)
            _expect(fulfilled, "must be a list of schemas, not empty", at)
        elif keyword in _BELOW_BY_NAME:
            _expect(isinstance(value, dict), "must be an object of schemas", at)
        elif keyword in ("dependencies", "dependentRequired"):
            _check_dependencies(value, at)
        elif keyword in _CHECKS:
            fulfils, words = _CHECKS[keyword]
            _expect(fulfils(value), words, at)
        each_below({keyword: value}, check, place)


def _expect(fulfilled: bool, words: str, place: str) -> None:  # noqa: FBT001
    if not fulfilled:
        raise GrammarError(words, place)


def _check_dependencies(value: Any, place: str) -> None:
    _expect(isinstance(value, dict), "must be an object", place)
    for name, each in value.items():
        if isinstance(each, list):
            _expect(_are_names(each), _NAMES, within(place, name))
        else:
            check(each, within(place, name))


def _are_names(value: Any, known: frozenset[str] | None = None) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value) and (known is None or known.issuperset(value))


def _are_types(value: Any) -> bool:
    return bool(value) and _are_names(value if isinstance(value, list) else [value], TYPES)


def _is_count(value: Any) -> bool:
    return is_number(value) and bool(value >= 0 and value == int(value))


def _is(kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


_NAMES = "must be a list of names without repetition"
_NUMBER = "must be a number"
_COUNT = _is_count, "must be an integer, 0 or greater"
_TEXT = _is(str), "must be a text"
_EXCLUSIVE = _is(int | float), _NUMBER  # true and false are draft 4's
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("maximum", "minimum"), (is_number, _NUMBER)),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _EXCLUSIVE),
    **dict.fromkeys(("$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$ref", "$schema"), _TEXT),
    **dict.fromkeys(("format", "pattern"), _TEXT),
    "enum": (_is(list), "must be a list"),
    "multipleOf": (lambda value: is_number(value) and value > 0, "must be a number greater than 0"),
    "required": (_are_names, _NAMES),
    "type": (
        _are_types,
        f"must be one of {', '.join(sorted(TYPES))}, or a list of these without repetition",
    ),
    "uniqueItems": (_is(bool), "must be true or false"),
}
