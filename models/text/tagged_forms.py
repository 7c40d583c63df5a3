"""The ways in which models write arguments between tags: Qwen3-Coder's, GLM's and MiniMax's.

mlx-lm's parsers read a value by the type that the tool's schema names beside the parameter's name,
each in its own way. What is written here is what they read back as a value of the schema; for a
schema to which there is no such way, `UnwritableError` is raised.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from .narrowing import UnwritableError
from .schema_form import TYPES
from .schema_meaning import SchemaReader

_LISTS = "/[ \\t\\r\\n]*[\\[{](?s:.*)/"
_LONG_NUMBERS = "/[ \\t\\r\\n]*-?[0-9]{400}(?s:.*)/"  # Python refuses to read very long ones
_EXACT = 2**53  # up to here doubles have all integers
_DEEPEST = 100
_KINDS = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip
_PYTHON_TYPES = frozenset({"string", "integer", "number", "null"})


class Written(NamedTuple):
    """How a parameter's value is written.

    Attributes:
        json: the schema of those that are JSON; None if there are none.
        text: whether others are plain text.
        schema: what the text must match: the part of a schema that is about texts.
        null: whether a text may be null.
        barred: more that no text is, as terminals.
    """

    json: Any = None
    text: bool = False
    schema: Mapping[str, Any] = {}
    null: bool = False
    barred: Sequence[str] = ()


class TaggedForm(NamedTuple):
    """A way of writing arguments between tags.

    Attributes:
        tags: what no value has in it.
        head: stands before a call's arguments, with `{}` for the tool's name.
        tail: stands behind them.
        before: stands before a value, with `{}` for the parameter's name.
        after: stands behind it.
        written: says how a value is written, by the tool's own schema and the rewritten one.
        stripped: the parser drops blanks around a value.
    """

    tags: tuple[str, ...]
    head: str
    tail: str
    before: str
    after: str
    written: Callable[[Any, Any, "Leaves"], Written]
    stripped: bool


class Leaves:
    """Looks through references and alternatives of rewritten schemas."""

    def __init__(self, reader: SchemaReader) -> None:
        self._reader = reader

    def of(self, schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """List the alternatives of a schema, each with one type.

        Raises:
            UnwritableError: they cannot be told.
        """
        if not isinstance(schema, dict) or depth > _DEEPEST:
            raise UnwritableError("a schema without a type")
        keys = schema.keys() - {"type"} if "anyOf" in schema else schema.keys()
        if keys in ({"anyOf"}, {"$ref"}):
            name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
            for each in schema.get("anyOf") or [self._reader.definitions[name]]:
                yield from self.of(each, depth + 1)
        elif isinstance(schema.get("type"), str):
            yield schema
        elif isinstance(schema.get("type"), list):
            yield from ({**schema, "type": each} for each in schema["type"])
        elif all(isinstance(value, str) for value in values_of(schema) or [None]):
            yield {**schema, "type": "string"}
        else:
            raise UnwritableError("a schema without a type")


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """List the values to which a schema holds; none where it does not name them."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _qwen3_coder(own: Any, schema: Any, leaves: Leaves) -> Written:
    """Plain text for the type `string`; numbers by way of doubles; other types as JSON.

    Several types in a list are read as Python, and without a type only objects and arrays as JSON.
    """
    if not schema:
        lists = {"type": ["object", "array"]}
        return Written(json=lists, text=True, null=True, barred=(_LISTS, _LONG_NUMBERS))
    kind = own.get("type")
    if kind == "string":
        return Written(text=True, schema=schema)
    if isinstance(kind, str):
        return Written(json=_as_double(schema))
    if isinstance(kind, list):
        if not _PYTHON_TYPES.issuperset(kind):
            raise UnwritableError("types that Python writes in another way than JSON")
        return Written(json=_as_double(schema))
    return _by_leaves(list(leaves.of(schema)), {"null", "object", "array"}, (_LISTS, _LONG_NUMBERS))


def _glm(own: Any, schema: Any, _: Leaves) -> Written:
    """Plain text for the type `string`, JSON for all others."""
    if own.get("type") == "string":
        return Written(text=True, schema=schema, null=True)
    return Written(json=schema)


def _minimax(own: Any, schema: Any, leaves: Leaves) -> Written:
    """Plain text where no other type is possible; JSON where there is no text."""
    named = _named_types(own)
    if not schema and named == {"string"}:
        return Written(text=True, null=True)
    found = list(leaves.of(schema))
    types = {str(leaf["type"]) for leaf in found}
    if types - named or named - types - {"integer"}:
        raise UnwritableError("a type that the parser does not see")
    texts = "string" in types
    return _by_leaves(found, {"null"} if texts else TYPES - {"string"}, ())


def _named_types(own: Any) -> set[str]:
    """The types that MiniMax's parser finds in a schema."""
    kind = own.get("type", [])
    types = {kind} if isinstance(kind, str) else set(kind)
    types |= {_KINDS[type(value)] for value in own.get("enum", [])}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in own.get(key, []):
            types |= _named_types(each) if isinstance(each, dict) else {"string"}
    return types or {"string"}


def _by_leaves(
    leaves: Sequence[Mapping[str, Any]], in_json: AbstractSet[str], barred: Sequence[str]
) -> Written:
    """Write some types as JSON, and a text as it is."""
    texts = [leaf for leaf in leaves if leaf["type"] == "string"]
    others = [leaf for leaf in leaves if leaf["type"] != "string"]
    types = {leaf["type"] for leaf in others}
    if types - in_json or len(texts) > 1 or (texts and types - {"null", "object", "array"}):
        raise UnwritableError("types that would be read as others")
    null = "null" in types
    if texts:  # a text may be null
        others = [leaf for leaf in others if leaf["type"] != "null"]
    return Written(
        json={"anyOf": [_as_double(leaf) for leaf in others]} if others else None,
        text=bool(texts),
        schema=texts[0] if texts else {},
        null=null,
        barred=barred,
    )


def _as_double(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Narrow numbers that are bounded to those that a double holds exactly."""
    new = dict(schema)
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    if any(abs(new[key]) > _EXACT for key in bounds if key in new):
        raise UnwritableError("a bound that a double does not hold")
    types = new.get("type")
    types = {*(types if isinstance(types, list) else [types])}
    if types & {"integer", "number"} and new.keys() & {*bounds, "multipleOf"}:
        new.setdefault("minimum", -_EXACT)
        new.setdefault("maximum", _EXACT)
    return new


QWEN3_CODER = TaggedForm(
    ("</parameter>", "<parameter=", "</function>", "<function=", "</tool_call>"),
    "\n<function={}>\n",
    "</function>\n",
    "<parameter={}>\n",
    "\n</parameter>\n",
    _qwen3_coder,
    stripped=False,
)
GLM = TaggedForm(
    ("<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>"),
    "{}~",
    "",
    "<arg_key>{}</arg_key>~<arg_value>",
    "</arg_value>~",
    _glm,
    stripped=True,
)
MINIMAX = TaggedForm(
    ("</parameter>", "<parameter ", "<invoke ", "</invoke>", "</minimax:tool_call>"),
    '<invoke name="{}">\n',
    "</invoke>\n",
    '<parameter name="{}">',
    "</parameter>\n",
    _minimax,
    stripped=True,
)
