"""Calls whose arguments stand each between tags, as grammars."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .conversation import Tool
from .lark import Lark
from .narrowing import Narrowing, UnwritableError
from .schema_formats import PATTERNS
from .schema_meaning import SchemaReader
from .tagged_forms import Leaves, TaggedForm, Written, values_of

_NAME = re.compile(r"[\w.:/@$-]+")
_NULL = "/(?i:null)/"  # what parsers take for no value, whatever its type is
_EDGES = r"/[^\s\x1c-\x1f]((?s:.*)[^\s\x1c-\x1f])?/"
_LONGEST = 1000  # a bound on a text's length
_ROOT = frozenset({"type", "properties", "required", "additionalProperties"})


def add_tagged(
    lark: Lark, reader: SchemaReader, form: TaggedForm, tools: Sequence[tuple[Tool, Any]]
) -> str:
    """Write the rule of a call, without the markers around it.

    Args:
        lark: the grammar.
        reader: of the tools' schemas.
        form: how calls are written.
        tools: with their rewritten schemas.

    Raises:
        UnwritableError: a tool's arguments cannot be written like this.
    """
    narrowing = Narrowing(reader, form.tags)
    calls = []
    for tool, schema in tools:
        parts = [_template(lark, form.head, tool.name)]
        for name, each, required in _parameters(tool, schema):
            written = form.written(tool.parameters["properties"][name], each, Leaves(reader))
            value = _value(lark, reader, form, narrowing, written)
            pair = f"{_template(lark, form.before, name)} {value}"
            parts.append(pair if required else f"({pair})?")
        calls.append(" ".join([*parts, _template(lark, form.tail, "")]))
    return " | ".join(calls)


def _template(lark: Lark, text: str, name: str) -> str:
    """Write text; where it has `~`, a line break may stand."""
    parts = text.format(name).split("~")
    return f" {lark.text(chr(10))}? ".join(lark.marker(part) for part in parts)


def _parameters(tool: Tool, schema: Any) -> Iterator[tuple[str, Any, bool]]:
    """A tool's parameters: their names, schemas, and whether they must be there."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    own = tool.parameters.get("properties", {})
    if schema.keys() - _ROOT or set(required) - set(properties) or set(own) != set(properties):
        raise UnwritableError("arguments that are no list of parameters")
    for name, each in properties.items():
        if not isinstance(own[name], dict) or _NAME.fullmatch(name) is None:
            raise UnwritableError("a parameter that cannot be named")
        yield name, each, name in required
    if _NAME.fullmatch(tool.name) is None:
        raise UnwritableError("a tool that cannot be named")


def _value(
    lark: Lark, reader: SchemaReader, form: TaggedForm, narrowing: Narrowing, written: Written
) -> str:
    """Write a value and what stands behind it."""
    options = []
    if written.json is not None:
        json = lark.json(narrowing.schema(written.json), reader)
        options.append(f"{json} {_template(lark, form.after, '')}")
    if written.text:
        options.append(_text(lark, form, narrowing, written))
    return f"({' | '.join(options)})"


def _text(lark: Lark, form: TaggedForm, narrowing: Narrowing, written: Written) -> str:
    schema = written.schema
    if values := values_of(schema):
        if len(schema.keys() - {"type"}) > 1:
            raise UnwritableError("values that must match more")
        if not all(
            _is_plain(value, form, written) and narrowing.is_free(value) for value in values
        ):
            raise UnwritableError("a value that would be read as another")
        named = " | ".join(lark.text(value) for value in values)
        return f"({named}) {_template(lark, form.after, '')}"
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
    text = lark.until(end, form.tags, f"({whole}) | {_NULL}" if written.null else whole)
    return f"{text} {_template(lark, '~'.join(['', *rest]), '')}" if rest else text


def _is_plain(value: Any, form: TaggedForm, written: Written) -> bool:
    """Whether a parser reads an option's text as that text."""
    if not isinstance(value, str) or (value.lower() == "null" and not written.null):
        return False
    if form.stripped and value != value.strip():
        return False
    return bool(value) and not (written.barred and value.lstrip()[:1] in ("[", "{"))
