"""References of a schema, and the facts by which `oneOf` options exclude each other.

The grammar's compiler tells options apart in few cases only.
"""

import re
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from ...errors import GrammarError
from .schema_check import EFFECTIVE, MOST_NODES, check, measure, mended, types_of, within
from .schema_values import comparable

_REF_STANDS_ALONE = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")
_MOST_CHECKED = 10 * MOST_NODES
_INDEX = re.compile("[0-9]{1,9}")
_MOST_OPTIONS = 100  # all pairs are compared
_MOST_COMPARED = 100_000  # names of objects
_DEEPEST = 32

LOOKED_THROUGH = 16
"""References that follow each other."""

_T = TypeVar("_T")
Values = frozenset[tuple[str, Any]]


class Target(NamedTuple):
    """A schema and its place."""

    schema: Any
    place: str


class References:
    """Resolves references within a schema, the root.

    Attributes:
        root: the schema.
        stand_alone: in its dialect, keywords beside a reference have no effect.
        other_base: references now mean something else than in the root.
    """

    def __init__(self, schema: Any, place: str) -> None:
        self.root = Target(schema, place)
        dialect = schema.get("$schema", "") if isinstance(schema, dict) else ""
        self.stand_alone = any(draft in dialect for draft in _REF_STANDS_ALONE)
        self.other_base = False
        self._targets: dict[str, Target] = {}
        self._checked: dict[str, Target] = {}
        self._left_to_check = _MOST_CHECKED

    def is_reference(self, schema: Any) -> bool:
        """True if a schema is a reference without other effective keywords."""
        if not isinstance(schema, dict) or "$ref" not in schema:
            return False
        return self.stand_alone or schema.keys() & EFFECTIVE == {"$ref"}

    def followed(self, schema: Any, place: str) -> Target:
        """Follow plain references; raise GrammarError as `target` does."""
        target = Target(schema, place)
        for _ in range(LOOKED_THROUGH):
            if not self.is_reference(target.schema):
                break
            target = self.target(target.schema["$ref"], within(target.place, "$ref"))
        return target

    def resolved(self, schema: Any, place: str) -> Any:
        """Follow references to a schema; below another `$id` anything is allowed."""
        schema = self.followed(schema, place).schema
        return True if self.has_other_base(schema) else schema

    def has_other_base(self, schema: Any) -> bool:
        """True if references in a schema mean something else than in the root."""
        return schema is not self.root.schema and _is_resource(schema)

    def target(self, reference: str, place: str) -> Target:
        """Find a reference's target.

        Raises:
            GrammarError: it is no schema, or is not supported.
        """
        if self.other_base:
            raise GrammarError("is not supported below another $id", place)
        if reference not in self._targets:
            self._targets[reference] = self._check(self._find(reference, place), place)
        return self._targets[reference]

    def _check(self, target: Target, place: str) -> Target:
        """Check and mend a target, once for all its names."""
        if target.place not in self._checked:
            self._left_to_check -= measure(target.schema, target.place)
            if self._left_to_check < 0:
                raise GrammarError("leads to too many schemas by way of references", place)
            if target.schema is not self.root.schema:
                target = Target(mended(target.schema), target.place)
            check(*target)
            self._checked[target.place] = target
        return self._checked[target.place]

    def _find(self, reference: str, place: str) -> Target:
        base, _, fragment = reference.partition("#")
        root = self.root.schema
        if base and base not in {str(root.get(key)).rstrip("#") for key in ("$id", "id")}:
            words = f"leads to {reference!r}: only references within the schema are supported"
            raise GrammarError(words, place)
        if fragment and not fragment.startswith("/"):
            raise GrammarError(f"leads to {reference!r}: anchors are not supported", place)
        found, at = root, self.root.place
        for part in unquote(fragment).split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            found, at = _step(found, step), within(at, step)
            if found is None:
                raise GrammarError(f"leads to {reference!r}, where no schema is", place)
            if _is_resource(found):
                raise GrammarError(f"leads to {reference!r}, below another $id", place)
        return Target(found, at)


def _is_resource(schema: Any) -> bool:
    name = schema.get("$id") if isinstance(schema, dict) else None
    return isinstance(name, str) and not name.startswith("#")


def _step(found: Any, step: str) -> Any:
    if isinstance(found, dict):
        return found.get(step)
    if isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
        return found[int(step)]
    return None


class Known(NamedTuple):
    """Facts about each value of a schema."""

    types: frozenset[str] | None = None  # integers are numbers; None if unknown
    values: Values | None = None  # None if there are others
    required: frozenset[str] = frozenset()  # names that an object has
    tags: dict[str, Values] = {}  # noqa: RUF012  (it is not changed)

    @property
    def is_object(self) -> bool:
        """True if each value is an object."""
        return self.types == frozenset({"object"})


_NOTHING = Known()


class Facts:
    """Facts about the schemas of a document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[int, Known] = {}
        self._depth = 0

    def of(self, schema: Any, place: str) -> Known:
        """Find the facts about a schema."""
        try:
            schema = self._references.resolved(schema, place)
        except GrammarError:  # the rewriting will raise it, with its place
            return _NOTHING
        if not isinstance(schema, dict) or self._depth >= _DEEPEST:
            return _NOTHING
        if id(schema) not in self._known:
            self._known[id(schema)] = _NOTHING  # for a schema that leads back to itself
            self._depth += 1
            try:
                self._known[id(schema)] = self._find(schema, place)
            finally:
                self._depth -= 1
        return self._known[id(schema)]

    def option(self, schema: Any, place: str, beside: dict[str, Any]) -> Known:
        """Find the facts about an option, including the type and names beside it."""
        return _both(_named(beside), self.of(schema, place))

    def _find(self, schema: dict[str, Any], place: str) -> Known:
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        named = schema.get("properties", {}).items()
        held = {name: self.of(each, place).values for name, each in named}
        tags = {name: values for name, values in held.items() if values is not None}
        known = _named(schema)._replace(values=_values(listed), tags=tags)
        target = [{"$ref": schema["$ref"]}] if "$ref" in schema else []
        for each in [*schema.get("allOf", []), *target]:
            known = _both(known, self.of(each, place))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [self.of(each, place) for each in schema[keyword]]
                known = _both(known, reduce(_either, options))
        return known


def additions(options: Sequence[Known], preferred: str | None) -> list[frozenset[str]] | None:
    """Find the names that each option must require so that no value matches two options.

    The preferred name is used where it is possible. None if options can overlap.
    """
    compared = len(options) * sum(len(option.tags) for option in options)
    if len(options) > _MOST_OPTIONS or compared > _MOST_COMPARED:
        return None
    added: list[frozenset[str]] = [frozenset()] * len(options)
    for j, two in enumerate(options):
        for i, one in enumerate(options[:j]):
            if _are_disjoint(one.types, two.types) or _are_disjoint(one.values, two.values):
                continue
            # A name that only one option requires still lets values match both.
            required = one.required | two.required | (added[i] & added[j])
            names = _telling(one, two)
            if not names:
                return None
            if required.isdisjoint(names):
                name = preferred if preferred in names else names[0]
                added[i] |= {name}
                added[j] |= {name}
    return added


def _are_disjoint(one: frozenset[Any] | None, two: frozenset[Any] | None) -> bool:
    return one is not None and two is not None and not one & two


def _telling(one: Known, two: Known) -> list[str]:
    """List the names whose values differ in both; none unless one option has objects only."""
    if not one.is_object and not two.is_object:
        return []
    return [name for name in _shared(one, two) if not one.tags[name] & two.tags[name]]


def _both(one: Known, two: Known) -> Known:
    return Known(
        _met(one.types, two.types),
        _met(one.values, two.values),
        one.required | two.required,
        {**one.tags, **two.tags, **{n: one.tags[n] & two.tags[n] for n in _shared(one, two)}},
    )


def _either(one: Known, two: Known) -> Known:
    return Known(
        None if one.types is None or two.types is None else one.types | two.types,
        None if one.values is None or two.values is None else one.values | two.values,
        one.required & two.required,
        {name: one.tags[name] | two.tags[name] for name in _shared(one, two)},
    )


def _met(one: frozenset[_T] | None, two: frozenset[_T] | None) -> frozenset[_T] | None:
    if one is None or two is None:
        return two if one is None else one
    return one & two


def _shared(one: Known, two: Known) -> list[str]:
    return [name for name in one.tags if name in two.tags]


def _named(schema: dict[str, Any]) -> Known:
    types = None
    if "type" in schema:
        types = frozenset("number" if t == "integer" else t for t in types_of(schema))
    return Known(types, required=frozenset(schema.get("required", [])))


def _values(values: list[Any] | None) -> Values | None:
    keys = [comparable(value) for value in values or []]
    known = frozenset(key for key in keys if key is not None)
    return None if values is None or None in keys else known
