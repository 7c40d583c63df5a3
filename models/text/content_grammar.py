"""Content that is held to something, as grammars."""

from collections.abc import Sequence

from ..errors import GrammarError
from .constraint import Choice, Constraint, JSONObject, JSONSchema, Regex
from .lark import Lark
from .patterns import one_of, terminal
from .schema_meaning import SchemaReader

_QUOTED = 100  # characters of an option


def write_content(
    lark: Lark, reader: SchemaReader, constraint: Constraint, markers: Sequence[str]
) -> str:
    """Write what an answer without calls matches; return it.

    Args:
        lark: the grammar.
        reader: of schemas.
        constraint: for the content.
        markers: content does not begin with them. No JSON does anyway.

    Raises:
        GrammarError: it cannot be honoured.
    """
    match constraint:
        case JSONObject():
            return lark.json({"type": "object"}, reader)
        case JSONSchema(schema=schema):
            rewritten = reader.read(schema)
            if rewritten is False:
                raise GrammarError("false allows nothing")
            return lark.json(rewritten, reader)
        case Regex(pattern=pattern):
            barred = f" & ~({lark.beginning_with(markers)})" if markers else ""
            lark.rule("ANSWER", f"{terminal(pattern)}{barred}")
        case Choice(options=options):
            for option in options:
                if option.lstrip().startswith(tuple(markers)):
                    words = "begins with a marker, and would be read as a call or a thought"
                    raise GrammarError(f"the option {option[:_QUOTED]!r} {words}")
            lark.rule("ANSWER", one_of(lark, options))
    return "ANSWER"
