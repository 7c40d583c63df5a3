"""Schemas narrowed to values that can stand as JSON between tags.

Parsers of tagged calls take the first end tag for the end, even inside a JSON string. So no string
has a tag in it. Numbers are such that a double holds them: `1e999` is JSON, but no number. Objects
with named properties have no others.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import GrammarError
from .schema_check import each_below, types_of
from .schema_rewrite import SchemaReader

MOST = 10**18
"""The largest absolute value of a number."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PARTS = frozenset({"$ref", "allOf", "anyOf"})
_NEVER = frozenset({"oneOf", "patternProperties"})
_DEEPEST = 100


class UnwritableError(GrammarError):
    """A form of calls cannot write a schema's values; the generic form may."""


class Narrowing:
    """Narrows schemas that a reader has rewritten.

    Args:
        reader: receives the definitions to which narrowed schemas refer.
        tags: texts that no value has; each begins with its only `<`.
    """

    def __init__(self, reader: SchemaReader, tags: Iterable[str]) -> None:
        self._reader = reader
        self._tags = tuple(tags)
        self._pattern = pattern_without(self._tags)
        self._depth = 0

    def schema(self, schema: Any) -> Any:
        """Narrow a schema; raise UnwritableError if that fails or leaves no value."""
        if isinstance(schema, bool):
            return {"$ref": self._reference("anything")} if schema else False
        if self._depth > _DEEPEST:
            raise UnwritableError("schemas lead to each other too often")
        self._depth += 1
        narrowed = self._narrowed(schema)
        self._depth -= 1
        return narrowed

    def _narrowed(self, schema: dict[str, Any]) -> dict[str, Any]:
        parts = not _PARTS.isdisjoint(schema)  # only these are narrowed, not keywords beside them
        if _NEVER.intersection(schema) or (parts and schema.keys() - {*_PARTS, "type"}):
            raise UnwritableError("the schema cannot be narrowed")
        if "const" in schema or "enum" in schema:
            if not self.is_free(schema.get("const", schema.get("enum"))):
                raise UnwritableError("a value has a tag in it")
            return schema
        types, whole = [] if parts else types_of(schema), dict(schema)
        if "array" in types:
            whole.setdefault("items", True)
        if "object" in types:
            self._close(whole)
        new = each_below(whole, lambda each, _: self.schema(each))
        if "$ref" in new:
            new["$ref"] = self._reference(new["$ref"].removeprefix("#/$defs/"))
        if "string" in types and ("pattern" in new or "format" not in new):  # formats have no `<`
            pattern = {"pattern": self._pattern}
            new |= {"allOf": [pattern]} if "pattern" in new else pattern
        if "integer" in types or "number" in types:
            if any(abs(new[key]) > MOST for key in BOUNDS if key in new):
                raise UnwritableError("a bound is too large")
            new = {"minimum": -MOST, "maximum": MOST, **new}
        return new

    def _close(self, new: dict[str, Any]) -> None:
        """Allow an object its named properties only; one without any has others."""
        properties, other = new.get("properties", {}), new.get("additionalProperties", True)
        if not self.is_free(list(properties)) or set(new.get("required", [])) - set(properties):
            raise UnwritableError("a property has no name that can be written")
        if not properties and other is not False:
            new["patternProperties"] = {self._pattern: other}
        new["additionalProperties"] = False

    def is_free(self, value: Any) -> bool:
        """True if a JSON value has no tag in it."""
        text = json.dumps(value, ensure_ascii=False)
        return not any(tag in text for tag in self._tags)

    def _reference(self, name: str) -> str:
        definitions, narrow = self._reader.definitions, f"narrow_{name}"
        if narrow not in definitions:
            schema = definitions.get(name, True)
            definitions[narrow] = True  # until it is narrowed
            whole = {"items": True, "additionalProperties": True} if schema is True else schema
            definitions[narrow] = self.schema(whole)
        return f"#/$defs/{narrow}"


def pattern_without(tags: Iterable[str]) -> str:
    """Write a pattern of all texts without tags, each of which begins with its only `<`."""
    tree: dict[str, Any] = {}
    for tag in tags:
        node = tree
        for letter in tag[1:]:
            node = node.setdefault(letter, {})
    begun, left = f"<{_begun(tree)}", f"<{_left(tree)}"
    return f"^(?:[^<]|(?:{begun})*{left})*(?:{begun})*$"


def _begun(node: Mapping[str, Any]) -> str:
    """Match part of a tag after its `<`, before another `<` or the end."""
    parts = [re.escape(letter) + _begun(below) for letter, below in node.items() if below]
    return f"(?:{'|'.join(parts)})?" if parts else ""


def _left(node: Mapping[str, Any]) -> str:
    """Match after a `<` up to the first letter that belongs to no tag."""
    letters = "".join(map(re.escape, node))
    parts = [re.escape(letter) + _left(below) for letter, below in node.items() if below]
    return f"(?:{'|'.join([f'[^<{letters}]', *parts])})"
