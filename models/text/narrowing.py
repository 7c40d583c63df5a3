"""Schemas whose values can stand as JSON between tags that a parser looks for in the text.

Parsers of calls between tags take the first end tag for the end, also inside a JSON string. So
where a call must be read, no string has a tag in it. And numbers are such that a double holds
them: `1e999` is JSON, and no number. Objects whose properties are named have no others, and their
schema is narrower than the tool's in that.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import GrammarError
from .schema_check import types_of
from .schema_rewrite import SchemaReader

MOST = 10**18
"""The greatest number of either sign."""

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MANY = ("anyOf", "allOf")
_DEEPEST = 100


class UnwritableError(GrammarError):
    """A form of calls cannot write what a schema asks for; the generic form may."""


class Narrowing:
    """Narrows schemas that a reader has rewritten.

    Args:
        reader: gets the definitions to which narrowed schemas refer.
        tags: texts that no value has; each begins with `<` and has no other.
    """

    def __init__(self, reader: SchemaReader, tags: Iterable[str]) -> None:
        self._reader = reader
        self._tags = tuple(tags)
        self._pattern = pattern_without(self._tags)
        self._depth = 0

    def schema(self, schema: Any) -> Any:
        """Narrow a schema.

        Raises:
            UnwritableError: that cannot be told, or leaves nothing.
        """
        if isinstance(schema, bool):
            return {"$ref": self._reference("anything")} if schema else False
        if self._depth > _DEEPEST:
            raise UnwritableError("schemas lead to each other too often")
        self._depth += 1
        narrowed = self._narrowed(schema)
        self._depth -= 1
        return narrowed

    def _narrowed(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "oneOf" in schema or "patternProperties" in schema:
            raise UnwritableError("the schema cannot be narrowed")
        if "const" in schema or "enum" in schema:
            if not self.is_free(schema.get("const", schema.get("enum"))):
                raise UnwritableError("a value has a tag in it")
            return schema
        if schema.keys() & {"$ref", *_MANY}:
            return self._parts(schema)
        new, types = dict(schema), types_of(schema)
        if "string" in types:
            self._narrow_strings(new)
        if "integer" in types or "number" in types:
            if any(abs(new[key]) > MOST for key in BOUNDS if key in new):
                raise UnwritableError("a bound is too large")
            new = {"minimum": -MOST, "maximum": MOST, **new}
        if "array" in types:
            listed = [self.schema(each) for each in new.get("prefixItems", [])]
            new |= {"items": self.schema(new.get("items", True)), "prefixItems": listed}
        if "object" in types:
            self._narrow_objects(new)
        return new

    def _parts(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Narrow what a schema is put together from; what stands beside that need not be."""
        if schema.keys() - {"$ref", *_MANY, "type"}:
            raise UnwritableError("the schema cannot be narrowed")
        new = {key: value for key, value in schema.items() if key not in ("$ref", *_MANY)}
        new |= {key: [self.schema(each) for each in schema[key]] for key in _MANY if key in schema}
        if "$ref" in schema:
            new["$ref"] = self._reference(schema["$ref"].removeprefix("#/$defs/"))
        return new

    def is_free(self, value: Any) -> bool:
        """True if a JSON value has no tag in it, written as JSON."""
        text = json.dumps(value, ensure_ascii=False)
        return not any(tag in text for tag in self._tags)

    def _narrow_strings(self, new: dict[str, Any]) -> None:
        if "pattern" in new:
            new["allOf"] = [{"pattern": self._pattern}]
        elif "format" not in new:  # no format has a `<`
            new["pattern"] = self._pattern

    def _narrow_objects(self, new: dict[str, Any]) -> None:
        properties, other = new.get("properties", {}), new.get("additionalProperties", True)
        if not self.is_free(list(properties)) or set(new.get("required", [])) - set(properties):
            raise UnwritableError("a property has no name that can be written")
        if properties:
            new["properties"] = {name: self.schema(each) for name, each in properties.items()}
        elif other is not False:
            new["patternProperties"] = {self._pattern: self.schema(other)}
        new["additionalProperties"] = False

    def _reference(self, name: str) -> str:
        definitions, narrow = self._reader.definitions, f"narrow_{name}"
        if narrow not in definitions:
            schema = definitions.get(name, True)
            definitions[narrow] = True  # until it is narrowed
            whole = {"items": True, "additionalProperties": True} if schema is True else schema
            definitions[narrow] = self.schema(whole)
        return f"#/$defs/{narrow}"


def pattern_without(tags: Iterable[str]) -> str:
    """Write a pattern of all texts without some tags, each of which has one `<`, and begins so."""
    tree: dict[str, Any] = {}
    for tag in tags:
        node = tree
        for letter in tag[1:]:
            node = node.setdefault(letter, {})
    begun, left = f"<{_begun(tree)}", f"<{_left(tree)}"
    return f"^(?:[^<]|(?:{begun})*{left})*(?:{begun})*$"


def _begun(node: Mapping[str, Any]) -> str:
    """Match part of a tag behind its `<`, where another `<` follows, or the end."""
    parts = [re.escape(letter) + _begun(below) for letter, below in node.items() if below]
    return f"(?:{'|'.join(parts)})?" if parts else ""


def _left(node: Mapping[str, Any]) -> str:
    """Match behind a `<` up to the first letter with which it is no tag's beginning."""
    letters = "".join(map(re.escape, node))
    parts = [re.escape(letter) + _left(below) for letter, below in node.items() if below]
    return f"(?:{'|'.join([f'[^<{letters}]', *parts])})"
