"""Grammars of calls with arguments between tags: those of Qwen3-Coder, GLM and MiniMax.

mlx-lm's parsers read a value by the parameter's type in the tool's schema, each in its own way. A
grammar allows only text that its parser reads as a value of the schema.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from ..conversation import Tool
from .lark import Lark
from .narrowing import BOUNDS, Narrowing, UnwritableError
from .schema_check import TYPES, types_of
from .schema_formats import PATTERNS

_NAME = re.compile(r"[\w.:/@$-]+")
_NULL = "/(?i:null)/"  # parsers read it as null, for any type
_EDGES = r"/[^\s\x1c-\x1f]((?s:.*)[^\s\x1c-\x1f])?/"
_LISTS = "/[ \\t\\r\\n]*[\\[{](?s:.*)/"
_LONG_NUMBERS = "/[ \\t\\r\\n]*-?[0-9]{400}(?s:.*)/"  # too long for Python to read
_LONGEST = 1000  # largest bound on a text's length
_ROOT = frozenset({"type", "properties", "required", "additionalProperties"})
_EXACT = 2**53  # doubles hold all integers up to this
_DEEPEST = 100
_KINDS = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip


class Written(NamedTuple):
    """Spelling of a parameter's value."""

    json: Any = None  # schema of values written as JSON, if there are any
    text: Mapping[str, Any] | None = None  # schema of values written as text, if there are any
    null: bool = False  # a text may be null
    barred: Sequence[str] = ()  # terminals that no text matches


Leaves = Callable[[Any], list[Mapping[str, Any]]]
"""Lists the alternatives of a rewritten schema, each with one type, or raises UnwritableError."""


class TaggedForm(NamedTuple):
    """A form of arguments between tags. In templates, a line break may stand at `~`."""

    tags: tuple[str, ...]  # texts that no value has
    head: str  # before a call's arguments; `{}` is the tool's name
    tail: str  # after a call's arguments
    before: str  # before a value; `{}` is the parameter's name
    after: str  # after a value
    written: Callable[[Any, Any, Leaves], Written]  # by the own schema and the rewritten one
    stripped: bool  # the parser strips blanks around a value


def add_tagged(lark: Lark, form: TaggedForm, tools: Sequence[tuple[Tool, Any]]) -> str:
    """Write the rule for calls of tools with rewritten schemas, without outer markers.

    Raises:
        UnwritableError: this form cannot write a tool's arguments.
    """
    narrowing = Narrowing(lark.schemas, form.tags)
    calls = []
    for tool, schema in tools:
        parts = [_template(lark, form.head, tool.name)]
        for name, own, each, required in _parameters(tool, schema):
            written = form.written(own, each, lambda s: list(_leaves(s, lark.schemas.definitions)))
            options = []
            if written.json is not None:
                json = lark.json(narrowing.schema(written.json))
                options.append(f"{json} {_template(lark, form.after)}")
            if written.text is not None:
                options.append(_text(lark, form, narrowing, written, written.text))
            pair = f"{_template(lark, form.before, name)} ({' | '.join(options)})"
            parts.append(pair if required else f"({pair})?")
        calls.append(" ".join([*parts, _template(lark, form.tail)]))
    return " | ".join(calls)


def _template(lark: Lark, text: str, name: str = "") -> str:
    parts = text.format(name).split("~")
    return f" {lark.text(chr(10))}? ".join(lark.marker(part) for part in parts)


def _parameters(tool: Tool, schema: Any) -> Iterator[tuple[str, Any, Any, bool]]:
    """List a tool's parameters: name, own schema, rewritten schema, and if it is required."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    own = tool.parameters.get("properties", {})
    if schema.keys() - _ROOT or set(required) - set(properties) or set(own) != set(properties):
        raise UnwritableError("arguments that are no list of parameters")
    for name in (tool.name, *properties):
        if _NAME.fullmatch(name) is None:
            raise UnwritableError("a tool or a parameter that cannot be named")
    for name, each in properties.items():
        if not isinstance(own[name], dict):
            raise UnwritableError("a parameter without a type")
        yield name, own[name], each, name in required


def _text(
    lark: Lark, form: TaggedForm, narrowing: Narrowing, written: Written, schema: Mapping[str, Any]
) -> str:
    if values := _values_of(schema):
        if len(schema.keys() - {"type"}) > 1:
            raise UnwritableError("values that must match more")
        if not all(_is_plain(each, form, written) and narrowing.is_free(each) for each in values):
            raise UnwritableError("a value that would be read as another")
        named = " | ".join(lark.text(value) for value in values)
        return f"({named}) {_template(lark, form.after)}"
    unknown = schema.keys() - {"type", "minLength", "maxLength", "pattern"}
    if unknown or schema.get("pattern", PATTERNS["date"]) not in PATTERNS.values():
        raise UnwritableError("a text that must match more than a length")
    parts = [f"~({each})" for each in (*written.barred, *(() if written.null else (_NULL,)))]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if max(least, most or 0) > _LONGEST:
        raise UnwritableError("a text with a large bound on its length")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    if "pattern" in schema:
        parts.append(f"/{schema['pattern'][1:-1]}/")
    if form.stripped:
        parts.append(_EDGES if least else f'({_EDGES} | "")')
    whole = " & ".join(parts) or "TEXT"
    end, *rest = form.after.split("~")
    text = lark.up_to(end, form.tags, f"({whole}) | {_NULL}" if written.null else whole)
    return f"{text} {_template(lark, '~'.join(['', *rest]))}" if rest else text


def _is_plain(value: Any, form: TaggedForm, written: Written) -> bool:
    """True if the parser reads an option's text as that text."""
    if not isinstance(value, str) or (value.lower() == "null" and not written.null):
        return False
    if form.stripped and value != value.strip():
        return False
    return bool(value) and not (written.barred and value.lstrip()[:1] in ("[", "{"))


def _leaves(
    schema: Any, definitions: Mapping[str, Any], depth: int = 0
) -> Iterator[Mapping[str, Any]]:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        raise UnwritableError("a schema without a type")
    keys = schema.keys() - {"type"} if "anyOf" in schema else schema.keys()
    if keys in ({"anyOf"}, {"$ref"}):
        name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
        for each in schema.get("anyOf") or [definitions[name]]:
            yield from _leaves(each, definitions, depth + 1)
    elif "type" in schema:
        yield from ({**schema, "type": each} for each in types_of(schema))
    elif all(isinstance(value, str) for value in _values_of(schema) or [None]):
        yield {**schema, "type": "string"}
    else:
        raise UnwritableError("a schema without a type")


def _values_of(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def _qwen3_coder(own: Any, schema: Any, leaves: Leaves) -> Written:
    """Plain text for the type `string`, numbers as doubles, other types as JSON.

    Several types in a list are read as Python. Without a type, only objects and arrays are JSON.
    """
    if not schema:
        lists = {"type": ["object", "array"]}
        return Written(json=lists, text={}, null=True, barred=(_LISTS, _LONG_NUMBERS))
    kind = own.get("type")
    if kind == "string":
        return Written(text=schema)
    if isinstance(kind, list) and not {"string", "integer", "number", "null"}.issuperset(kind):
        raise UnwritableError("types that Python writes in another way than JSON")
    if kind is not None:
        return Written(json=_as_double(schema))
    return _by_leaves(leaves(schema), {"null", "object", "array"}, (_LISTS, _LONG_NUMBERS))


def _glm(own: Any, schema: Any, _: Leaves) -> Written:
    """Plain text for the type `string`, JSON for all others."""
    if own.get("type") == "string":
        return Written(text=schema, null=True)
    return Written(json=schema)


def _minimax(own: Any, schema: Any, leaves: Leaves) -> Written:
    """Plain text if no other type is possible, JSON if there is no text."""
    named = _named_types(own)
    if not schema and named == {"string"}:
        return Written(text={}, null=True)
    found = leaves(schema)
    types = {str(leaf["type"]) for leaf in found}
    if types - named or named - types - {"integer"}:
        raise UnwritableError("a type that the parser does not see")
    return _by_leaves(found, {"null"} if "string" in types else TYPES - {"string"}, ())


def _named_types(own: Any) -> set[str]:
    """Find the types that MiniMax's parser sees in a schema."""
    types = set(types_of(own)) if "type" in own else set()
    types |= {_KINDS[type(value)] for value in own.get("enum", [])}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in own.get(key, []):
            types |= _named_types(each) if isinstance(each, dict) else {"string"}
    return types or {"string"}


def _by_leaves(
    leaves: Sequence[Mapping[str, Any]], in_json: AbstractSet[str], barred: Sequence[str]
) -> Written:
    """Write all types but text as JSON."""
    texts = [leaf for leaf in leaves if leaf["type"] == "string"]
    others = [leaf for leaf in leaves if leaf["type"] != "string"]
    types = {leaf["type"] for leaf in others}
    if types - in_json or len(texts) > 1 or (texts and types - {"null", "object", "array"}):
        raise UnwritableError("types that would be read as others")
    if texts:  # a text may be null
        others = [leaf for leaf in others if leaf["type"] != "null"]
    json = {"anyOf": [_as_double(leaf) for leaf in others]} if others else None
    return Written(json, texts[0] if texts else None, "null" in types, barred)


def _as_double(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Narrow bounded numbers to those that a double holds exactly."""
    new = dict(schema)
    if any(abs(new[key]) > _EXACT for key in BOUNDS if key in new):
        raise UnwritableError("a bound that a double does not hold")
    numeric = {"integer", "number"}.intersection(types_of(new) if "type" in new else ())
    if numeric and new.keys() & {*BOUNDS, "multipleOf"}:
        new.setdefault("minimum", -_EXACT)
        new.setdefault("maximum", _EXACT)
    return new


QWEN3_CODER = TaggedForm(
    tags=("</parameter>", "<parameter=", "</function>", "<function=", "</tool_call>"),
    head="\n<function={}>\n",
    tail="</function>\n",
    before="<parameter={}>\n",
    after="\n</parameter>\n",
    written=_qwen3_coder,
    stripped=False,
)
GLM = TaggedForm(
    tags=("<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>"),
    head="{}~",
    tail="",
    before="<arg_key>{}</arg_key>~<arg_value>",
    after="</arg_value>~",
    written=_glm,
    stripped=True,
)
MINIMAX = TaggedForm(
    tags=("</parameter>", "<parameter ", "<invoke ", "</invoke>", "</minimax:tool_call>"),
    head='<invoke name="{}">\n',
    tail="</invoke>\n",
    before='<parameter name="{}">',
    after="</parameter>\n",
    written=_minimax,
    stripped=True,
)
