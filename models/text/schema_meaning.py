"""What of a JSON schema an answer can be held to.

The grammar's own compiler passes over what it does not know, and differs from the standard in
places. So a schema is rewritten for it: what it honours is kept, references lead straight to their
targets, annotations are dropped, and whatever else would change which values are valid is refused.
"""

from typing import Any, NamedTuple
from urllib.parse import unquote

from ..errors import GrammarError
from . import schema_formats
from .schema_form import COUNTS, MOST_NODES, check, measure, within
from .schema_values import check_values, count, set_bounds
from .schema_weight import Scale

_KEPT = frozenset(
    {
        "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maximum",
        "maxProperties", "minItems", "minLength", "minimum", "minProperties", "multipleOf",
        "pattern", "required", "type",
    }
)  # fmt: skip
_MANY = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_BY_NAME = frozenset({"patternProperties", "properties"})
_HONOURED = _KEPT | _MANY | _BY_NAME | {"$ref", "additionalProperties", "items"}
_REFUSED = {
    "$dynamicRef": "", "$recursiveRef": "", "if": "", "not": "",
    "contains": "array", "unevaluatedItems": "array", "uniqueItems": "array",
    "dependencies": "object", "dependentRequired": "object", "dependentSchemas": "object",
    "propertyNames": "object", "unevaluatedProperties": "object",
}  # fmt: skip
"""What is not supported, and the one type of value that it is about."""

_WITHOUT_EFFECT: dict[str, list[Any]] = {
    "dependencies": [{}], "dependentRequired": [{}], "dependentSchemas": [{}],
    "propertyNames": [True, {}, {"type": "string"}], "unevaluatedItems": [True, {}],
    "unevaluatedProperties": [True, {}], "uniqueItems": [False],
}  # fmt: skip
_REF_STANDS_ALONE = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")
_LOOKED_THROUGH = 16  # references one behind the other


class SchemaReader:
    """Rewrites schemas for the grammar's compiler; several may share one grammar.

    Attributes:
        roots: what was rewritten.
        definitions: what `#/$defs/…` in it refers to.
        noted: all schemas in these, with the places where they stood.
    """

    def __init__(self) -> None:
        self.roots: list[Any] = []
        self.definitions: dict[str, Any] = {}
        self.noted: list[tuple[dict[str, Any], str]] = []
        self._nodes = 0

    def read(self, schema: Any, place: str = "") -> Any:
        """Check a schema and rewrite it.

        Args:
            schema: decoded JSON; it is not changed.
            place: what faults are named after.

        Raises:
            GrammarError: it is no schema, too large, or asks for what cannot be honoured.
        """
        self._nodes += measure(schema, place)
        if self._nodes > MOST_NODES:
            raise GrammarError(
                f"is too large: with those before it, over {MOST_NODES} values", place
            )
        check(schema, place)
        before = len(self.noted)
        self.roots.append(_Document(self, schema, place).rewritten())
        scale = Scale(self.definitions)
        for rewritten, where in self.noted[before:]:
            scale.weigh(rewritten, where)
        return self.roots[-1]

    def places(self) -> dict[int, str]:
        """Where what was rewritten stood, by identity."""
        return {id(rewritten): place for rewritten, place in self.noted}

    def note(self, rewritten: dict[str, Any], place: str) -> None:
        """Remember where a schema stood.

        Raises:
            GrammarError: references lead to too many.
        """
        self.noted.append((rewritten, place))
        if len(self.noted) > MOST_NODES:
            raise GrammarError("leads to too many schemas by way of references", place)


class _Target(NamedTuple):
    schema: Any
    place: str


class _Document:
    """One schema, and what its references refer to."""

    def __init__(self, reader: SchemaReader, schema: Any, place: str) -> None:
        self._reader = reader
        self._root = _Target(schema, place)
        dialect = schema.get("$schema", "") if isinstance(schema, dict) else ""
        self._stands_alone = any(draft in dialect for draft in _REF_STANDS_ALONE)
        self._targets: dict[str, _Target] = {}
        self._names: dict[str, str] = {}
        self._left: list[tuple[str, _Target]] = []
        self._inside: list[str] = []  # targets that are being copied
        self._other_base = False

    def rewritten(self) -> Any:
        root = self._rewrite(*self._root)
        while self._left:  # not where they are met: a chain of them would be a deep recursion
            name, target = self._left.pop()
            self._reader.definitions[name] = self._rewrite(*target)
        return root

    def _rewrite(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        new: dict[str, Any] = {}
        self._reader.note(new, place)
        if "$ref" in schema and self._stands_alone:
            schema = {"$ref": schema["$ref"]}
        outer = self._other_base
        self._other_base |= schema is not self._root.schema and _is_resource(schema)
        for keyword in schema:
            self._keyword(new, schema, keyword, within(place, keyword))
        self._other_base = outer
        _use_format(new, schema, place)
        set_bounds(new, place)
        check_values(new, place)
        return new

    def _keyword(
        self, new: dict[str, Any], schema: dict[str, Any], keyword: str, place: str
    ) -> None:
        value = schema[keyword]
        if keyword in COUNTS:
            new[keyword] = count(keyword, int(value), place)
        elif keyword in _KEPT:
            new[keyword] = value
        elif keyword in _MANY:
            rewrite = self._option if keyword == "oneOf" else self._rewrite
            new[keyword] = [rewrite(each, within(place, i)) for i, each in enumerate(value)]
        elif keyword in _BY_NAME:
            new[keyword] = {n: self._rewrite(each, within(place, n)) for n, each in value.items()}
        elif keyword == "additionalProperties" or (keyword == "items" and not _is_list(value)):
            new[keyword] = self._rewrite(value, place)
        elif keyword == "items":
            new["prefixItems"] = [self._rewrite(v, within(place, i)) for i, v in enumerate(value)]
        elif keyword == "additionalItems" and _is_list(schema.get("items")):
            new["items"] = self._rewrite(value, place)
        elif keyword == "$ref":
            new["$ref"] = self._reference(value, place)
        elif _has_unsupported_effect(keyword, schema):
            raise GrammarError("is not supported", place)

    # -- references --------------------------------------------------------------------

    def _reference(self, reference: str, place: str) -> str:
        target = self._target(reference, place)
        if target.place not in self._names:
            name = self._names[target.place] = str(len(self._reader.definitions))
            self._reader.definitions[name] = True  # until it is rewritten
            self._left.append((name, target))
        return f"#/$defs/{self._names[target.place]}"

    def _option(self, schema: Any, place: str) -> Any:
        """Rewrite an option of `oneOf`. The compiler does not look through references there."""
        if not isinstance(schema, dict) or schema.keys() & _HONOURED != {"$ref"}:
            return self._rewrite(schema, place)
        target = self._target(schema["$ref"], within(place, "$ref"))
        if target.place in self._inside or len(self._inside) >= _LOOKED_THROUGH:
            return self._rewrite(schema, place)
        self._inside.append(target.place)
        try:
            return self._option(*target)
        finally:
            self._inside.pop()

    def _target(self, reference: str, place: str) -> _Target:
        if self._other_base:
            raise GrammarError("is not supported below another $id", place)
        if reference not in self._targets:
            target = self._targets[reference] = self._find(reference, place)
            check(*target)
        return self._targets[reference]

    def _find(self, reference: str, place: str) -> _Target:
        base, _, fragment = reference.partition("#")
        root = self._root.schema
        if base and base not in {str(root.get(key)).rstrip("#") for key in ("$id", "id")}:
            words = f"leads to {reference!r}: only references within the schema are supported"
            raise GrammarError(words, place)
        if fragment and not fragment.startswith("/"):
            raise GrammarError(f"leads to {reference!r}: anchors are not supported", place)
        found, at = root, self._root.place
        for part in unquote(fragment).split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            found, at = _step(found, step), within(at, step)
            if found is None:
                raise GrammarError(f"leads to {reference!r}, where no schema is", place)
            if _is_resource(found):
                raise GrammarError(f"leads to {reference!r}, below another $id", place)
        return _Target(found, at)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_resource(schema: Any) -> bool:
    """Whether references below mean something else than elsewhere."""
    name = schema.get("$id") if isinstance(schema, dict) else None
    return isinstance(name, str) and not name.startswith("#")


def _step(found: Any, step: str) -> Any:
    if isinstance(found, dict):
        return found.get(step)
    if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
        return found[int(step)]
    return None


def _types(schema: dict[str, Any]) -> list[str]:
    """The types that a schema names, or all."""
    types = schema.get("type", ["array", "object", "string", "number"])
    return types if isinstance(types, list) else [types]


def _has_unsupported_effect(keyword: str, schema: dict[str, Any]) -> bool:
    kind = _REFUSED.get(keyword)
    if kind is None or (kind and kind not in _types(schema)):
        return False
    if keyword == "if":
        return "then" in schema or "else" in schema
    return schema[keyword] not in _WITHOUT_EFFECT.get(keyword, [])


def _use_format(new: dict[str, Any], schema: dict[str, Any], place: str) -> None:
    name = schema.get("format")
    if name in schema_formats.RANGES:
        low, high = schema_formats.RANGES[name]
        new["minimum"] = max(low, new.get("minimum", low))
        new["maximum"] = min(high, new.get("maximum", high))
    elif name is None or name in schema_formats.FREE or "string" not in _types(schema):
        return  # a format of texts: any other value has it
    elif name in schema_formats.PATTERNS:
        pattern = {"pattern": schema_formats.PATTERNS[name]}
        if "pattern" in new:
            new.setdefault("allOf", []).append(pattern)
        else:
            new |= pattern
    elif name in schema_formats.COMPILED:
        new["format"] = name
    else:
        words = f"{name!r} is not supported; supported are {', '.join(schema_formats.NAMES)}"
        raise GrammarError(words, within(place, "format"))
