"""What is known of schemas, so that the options of `oneOf` can be told apart."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from ..errors import GrammarError
from .schema_form import is_number, types_of

_MOST_OPTIONS = 100  # each is compared with each
_MOST_COMPARED = 100_000  # names of objects
_DEEPEST = 32

_T = TypeVar("_T")
Values = frozenset[tuple[str, Any]]


class Known(NamedTuple):
    """What holds for every value of a schema.

    Attributes:
        types: it is of one of these; integers are numbers. None where it is not known.
        values: it is one of these; None where there are others.
        required: if it is an object, it has these names.
        tags: if it is an object with such a name, what stands there is one of these.
    """

    types: frozenset[str] | None = None
    values: Values | None = None
    required: frozenset[str] = frozenset()
    tags: dict[str, Values] = {}  # noqa: RUF012  (it is not changed)

    @property
    def is_object(self) -> bool:
        """Whether every value is an object."""
        return self.types == frozenset({"object"})


_NOTHING = Known()


class Facts:
    """Says what is known of the schemas of a document.

    Args:
        resolve: gives the schema to which one that is but a reference leads.
    """

    def __init__(self, resolve: Callable[[Any, str], Any]) -> None:
        self._resolve = resolve
        self._known: dict[int, Known] = {}
        self._depth = 0

    def of(self, schema: Any, place: str) -> Known:
        """Say what is known of a schema."""
        try:
            schema = self._resolve(schema, place)
        except GrammarError:  # it will be found, and its place told, when it is rewritten
            return _NOTHING
        if not isinstance(schema, dict) or self._depth >= _DEEPEST:
            return _NOTHING
        if id(schema) not in self._known:
            self._known[id(schema)] = _NOTHING  # for one that leads back to itself
            self._depth += 1
            try:
                self._known[id(schema)] = self._find(schema, place)
            finally:
                self._depth -= 1
        return self._known[id(schema)]

    def option(self, schema: Any, place: str, beside: dict[str, Any]) -> Known:
        """Say what is known of an option, and by the type and the names that stand beside it."""
        return _both(_named(beside), self.of(schema, place))

    def _find(self, schema: dict[str, Any], place: str) -> Known:
        values = _values([schema["const"]] if "const" in schema else schema.get("enum"))
        tags = {}
        for name, each in schema.get("properties", {}).items():
            held = self.of(each, place).values
            if held is not None:
                tags[name] = held
        known = _named(schema)._replace(values=values, tags=tags)
        for each in [*schema.get("allOf", []), *_reference(schema)]:
            known = _both(known, self.of(each, place))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [self.of(each, place) for each in schema[keyword]]
                known = _both(known, reduce(_either, options))
        return known


def additions(options: Sequence[Known], preferred: str | None) -> list[frozenset[str]] | None:
    """Find which names each option must have, so that no value matches two of them.

    Args:
        options: what is known of them.
        preferred: a name that is meant to tell them apart.

    Returns:
        names for each option; None where they cannot be told apart.
    """
    compared = len(options) * sum(len(option.tags) for option in options)
    if len(options) > _MOST_OPTIONS or compared > _MOST_COMPARED:
        return None
    added: list[frozenset[str]] = [frozenset()] * len(options)
    for j, two in enumerate(options):
        for i, one in enumerate(options[:j]):
            # What one of them lacks still matches the other as it was, without the added name.
            names = one.required | two.required | (added[i] & added[j])
            if not _are_apart(one, two, names):
                name = _telling(one, two, preferred)
                if name is None:
                    return None
                added[i] |= {name}
                added[j] |= {name}
    return added


def _are_apart(one: Known, two: Known, required: frozenset[str]) -> bool:
    if one.types is not None and two.types is not None and not one.types & two.types:
        return True
    if one.values is not None and two.values is not None and not one.values & two.values:
        return True
    objects = one.is_object or two.is_object
    return objects and any(name in required for name in _disjoint(one, two))


def _telling(one: Known, two: Known, preferred: str | None) -> str | None:
    if not one.is_object and not two.is_object:
        return None
    names = _disjoint(one, two)
    return preferred if preferred in names else next(iter(names), None)


def _disjoint(one: Known, two: Known) -> list[str]:
    """The names that cannot have one value in both."""
    return [n for n, held in one.tags.items() if n in two.tags and not held & two.tags[n]]


def _both(one: Known, two: Known) -> Known:
    tags = {**one.tags, **two.tags}
    tags |= {name: one.tags[name] & two.tags[name] for name in one.tags.keys() & two.tags.keys()}
    return Known(
        _narrower(one.types, two.types),
        _narrower(one.values, two.values),
        one.required | two.required,
        tags,
    )


def _narrower(one: frozenset[_T] | None, two: frozenset[_T] | None) -> frozenset[_T] | None:
    if one is None or two is None:
        return two if one is None else one
    return one & two


def _either(one: Known, two: Known) -> Known:
    return Known(
        None if one.types is None or two.types is None else one.types | two.types,
        None if one.values is None or two.values is None else one.values | two.values,
        one.required & two.required,
        {name: one.tags[name] | two.tags[name] for name in one.tags.keys() & two.tags.keys()},
    )


def _named(schema: dict[str, Any]) -> Known:
    """What `type` and `required` say."""
    types = None
    if "type" in schema:
        types = frozenset("number" if t == "integer" else t for t in types_of(schema))
    return Known(types, required=frozenset(schema.get("required", [])))


def comparable(value: Any) -> tuple[str, Any] | None:
    """Give a value's type and what is equal for equal values; None for arrays and objects."""
    if value is None:
        return "null", None
    if is_number(value):
        return "number", value  # equal to a float that is equal
    if isinstance(value, str | bool):
        return "string" if isinstance(value, str) else "boolean", value
    return None


def _values(values: list[Any] | None) -> Values | None:
    keys = [comparable(value) for value in values or []]
    known = [key for key in keys if key is not None]
    return frozenset(known) if values is not None and len(known) == len(keys) else None


def _reference(schema: dict[str, Any]) -> list[Any]:
    return [{"$ref": schema["$ref"]}] if "$ref" in schema else []
