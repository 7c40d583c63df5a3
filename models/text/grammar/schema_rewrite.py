"""JSON schemas rewritten for the grammar's compiler.

The compiler ignores keywords that it does not know, and differs from the standard in places. So
supported keywords are kept, references lead straight to their targets, annotations are dropped, and
any other keyword that changes which values are valid is refused.
"""

from collections.abc import Iterable
from typing import Any

from ...errors import GrammarError
from . import schema_values as values
from .schema_check import (
    COUNTS,
    DEEPEST,
    KEPT,
    MOST_NODES,
    Scale,
    check,
    each_below,
    effective,
    has_unsupported_effect,
    measure,
    mended,
    types_of,
    within,
)
from .schema_references import LOOKED_THROUGH, Facts, References, Target, additions

_DEFINITIONS = "#/$defs/"
_REWRITTEN = frozenset(
    {"additionalProperties", "allOf", "anyOf", "items"}
    | {"patternProperties", "prefixItems", "properties"}
)


class SchemaReader:
    """Rewrites schemas for the grammar's compiler; several may share one grammar.

    Attributes:
        roots: rewritten schemas.
        definitions: targets of `#/$defs/…` in them.
        noted: all schemas in these, with their places.
        patterns: of texts and names, with their places.
    """

    def __init__(self) -> None:
        self.patterns: dict[str, str] = {}
        self.roots: list[Any] = []
        self.definitions: dict[str, Any] = {}
        self.noted: list[tuple[dict[str, Any], str]] = []
        self._nodes = 0

    def read(self, schema: Any, place: str = "") -> Any:
        """Check a schema and rewrite it; errors name places below `place`.

        Raises:
            GrammarError: it is no schema, too large, or not supported.
        """
        self._nodes += measure(schema, place)
        if self._nodes > MOST_NODES:
            words = f"is too large: with those before it, over {MOST_NODES} values"
            raise GrammarError(words, place)
        schema = mended(schema)
        check(schema, place)
        before = len(self.noted)
        self.roots.append(_Document(self, schema, place).rewritten())
        scale = Scale(self.definitions)
        for rewritten, where in self.noted[before:]:
            scale.weigh(rewritten, where)
        return self.roots[-1]

    def note(self, rewritten: dict[str, Any], place: str) -> None:
        """Record a schema's place; raise GrammarError for too many."""
        self.noted.append((rewritten, place))
        if len(self.noted) > MOST_NODES:
            raise GrammarError("leads to too many schemas by way of references", place)

    def note_patterns(self, patterns: Iterable[str], place: str) -> None:
        """Record the place of patterns."""
        for pattern in patterns:
            self.patterns.setdefault(pattern, place)


class _Document:
    def __init__(self, reader: SchemaReader, schema: Any, place: str) -> None:
        self._reader = reader
        self._references = References(schema, place)
        self._names: dict[tuple[str, frozenset[str]], str] = {}
        self._facts = Facts(self._references)
        self._left: list[tuple[str, Target]] = []
        self._inside: list[str] = []  # targets that are being copied
        self._depth = 0

    def rewritten(self) -> Any:
        root = self._rewrite(*self._references.root)
        while self._left:  # in a loop: a chain of references would be a deep recursion
            name, target = self._left.pop()
            self._reader.definitions[name] = self._rewrite(*target)
        self._check_ends()
        return root

    def _check_ends(self) -> None:
        """Refuse references that lead only to each other."""
        ended: set[str] = set()
        for (place, _), first in self._names.items():
            reference, way = first, {first}
            while reference not in ended:
                schema = self._reader.definitions[reference.removeprefix(_DEFINITIONS)]
                if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                    break
                reference = schema["$ref"]
                if reference in way:
                    raise GrammarError("refers to itself and says nothing else", place)
                way.add(reference)
            ended |= way

    def _rewrite(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if self._depth > DEEPEST:
            raise GrammarError(f"leads deeper than {DEEPEST} levels", place)
        new: dict[str, Any] = {}
        self._reader.note(new, place)
        self._depth += 1
        if "$ref" in schema and self._references.stand_alone:
            schema = {"$ref": schema["$ref"]}
        outer = self._references.other_base
        self._references.other_base |= self._references.has_other_base(schema)
        self._keywords(new, schema, place)
        for pattern in schema.get("patternProperties", {}):
            at = within(within(place, "patternProperties"), pattern)
            values.check_pattern(pattern, at)
            self._reader.note_patterns([pattern], at)
        if "propertyNames" in schema and "object" in types_of(schema):
            self._hold_names(new, schema["propertyNames"], within(place, "propertyNames"))
        if schema.get("uniqueItems"):
            items = schema.get("items", {})
            target = self._references.resolved(items, within(place, "items"))
            known = effective(target) if isinstance(target, dict) else {}
            values.hold_unique(new, known, within(place, "uniqueItems"))
        self._references.other_base = outer
        self._depth -= 1
        more = values.hold_text(new, schema, place)
        for part in more:
            self._reader.note(part, place)
        patterns = [part["pattern"] for part in (new, *more) if "pattern" in part]
        self._reader.note_patterns(patterns, within(place, "pattern"))
        values.set_bounds(new, place)
        values.check_values(new, place)
        return new

    def _keywords(self, new: dict[str, Any], schema: dict[str, Any], place: str) -> None:
        for keyword, value in schema.items():
            at = within(place, keyword)
            if keyword in COUNTS:
                new[keyword] = values.count(keyword, int(value), at)
            elif keyword in KEPT:
                new[keyword] = value
            elif keyword == "$ref":
                new[keyword] = self._refer(self._references.target(value, at), frozenset())
            elif keyword == "oneOf":
                self._one_of(new, schema, at)
            elif keyword in _REWRITTEN:
                new |= each_below({keyword: value}, self._rewrite, place)
            elif has_unsupported_effect(keyword, schema):
                raise GrammarError("is not supported", at)
        if isinstance(new.get("items"), list):
            new["prefixItems"] = new.pop("items")
            if "additionalItems" in schema:
                at = within(place, "additionalItems")
                new["items"] = self._rewrite(schema["additionalItems"], at)

    def _hold_names(self, new: dict[str, Any], names: Any, place: str) -> None:
        target = self._references.resolved(names, place)
        if target is False:
            raise GrammarError("false is not supported", place)
        known = {} if target is True else effective(target)
        if not known.keys() - {"type"} and "string" in types_of(known):
            return
        value = new.get("additionalProperties", True)
        if isinstance(value, dict):  # not copied: there may be many names
            value = {"$ref": self._define(value)}
        values.hold_names(new, known, value, place)
        self._reader.note_patterns(new.get("patternProperties", {}), place)

    def _one_of(self, new: dict[str, Any], schema: dict[str, Any], place: str) -> None:
        """Write options that exclude each other as `anyOf`; others are the compiler's task."""
        options = [(each, within(place, i)) for i, each in enumerate(schema["oneOf"])]
        by = schema.get("discriminator")
        name = by.get("propertyName") if isinstance(by, dict) else None
        added = None
        if "anyOf" not in schema:
            added = additions([self._facts.option(*each, schema) for each in options], name)
        if added is None:
            new["oneOf"] = [self._option(*option) for option in options]
        else:
            pairs = zip(options, added, strict=True)
            new["anyOf"] = [self._with_names(*option, names) for option, names in pairs]

    def _with_names(self, schema: Any, place: str, names: frozenset[str]) -> Any:
        """Rewrite a schema with further required names."""
        if not names:
            return self._rewrite(schema, place)
        if not self._references.is_reference(schema):
            return self._rewrite(_requiring(schema, names), place)
        target = self._references.followed(schema, place)
        return {"$ref": self._refer(target, names)}

    def _option(self, schema: Any, place: str) -> Any:
        """Rewrite an option of `oneOf`, in which the compiler does not follow references."""
        if not self._references.is_reference(schema):
            return self._rewrite(schema, place)
        target = self._references.target(schema["$ref"], within(place, "$ref"))
        if target.place in self._inside or len(self._inside) >= LOOKED_THROUGH:
            return self._rewrite(schema, place)
        self._inside.append(target.place)
        try:
            return self._option(*target)
        finally:
            self._inside.pop()

    def _refer(self, target: Target, names: frozenset[str]) -> str:
        """Refer to a schema with further required names."""
        if (target.place, names) not in self._names:
            schema = _requiring(target.schema, names) if names else target.schema
            written = self._names[target.place, names] = self._define(True)  # until it is rewritten
            self._left.append((written.removeprefix(_DEFINITIONS), Target(schema, target.place)))
        return self._names[target.place, names]

    def _define(self, rewritten: Any) -> str:
        name = str(len(self._reader.definitions))
        self._reader.definitions[name] = rewritten
        return _DEFINITIONS + name


def _requiring(schema: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    required = schema.get("required", [])
    return {**schema, "required": [*required, *sorted(names.difference(required))]}
