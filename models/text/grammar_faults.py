"""Why a grammar does not compile: in words, and where in the schema."""

import time
from collections.abc import Iterable
from typing import Any

import llguidance
import numpy as np

from ..errors import GrammarError
from .grammar import in_words, parse
from .lark import as_document
from .schema_check import each_below
from .schema_rewrite import SchemaReader

_MOST_PATTERNS = 500
_LONGEST_PATTERN = 5000
_STEPS = 12  # tokens of a rehearsal
_TRIALS = 100
_PATIENCE = 2.0  # seconds


def rehearse(vocabulary: Any, reader: SchemaReader) -> None:
    """Try the patterns of schemas one by one: some are too complex only once they are followed.

    Raises:
        GrammarError: one of them does not compile.
    """
    for number, (pattern, place) in enumerate(reader.patterns.items()):
        if number >= _MOST_PATTERNS:
            raise GrammarError(f"is one of over {_MOST_PATTERNS} patterns", place)
        if len(pattern) > _LONGEST_PATTERN:
            raise GrammarError(f"has more than {_LONGEST_PATTERN} characters", place)
        parser = _compile(vocabulary, {"type": "string", "pattern": pattern}, reader)
        walk(parser, place)


def walk(parser: Any, place: str = "") -> None:
    """Follow a few tokens, the same at every call.

    Raises:
        GrammarError: the grammar did not compile, or cannot be followed.
    """
    for step in range(_STEPS):
        if parser.is_error() or parser.is_stopped():
            break
        mask = np.frombuffer(parser.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(allowed):
            parser.consume_token(int(allowed[(3 * step + 5) * len(allowed) // 11 % len(allowed)]))
    if parser.is_error():
        raise GrammarError(in_words(parser.get_error()), place)


def explain(vocabulary: Any, message: str, reader: SchemaReader) -> GrammarError:
    """Find the deepest part of the schemas that fails on its own, as the whole grammar does."""
    words, place = in_words(message), ""
    places = {id(rewritten): place for rewritten, place in reader.noted}
    left, until = _TRIALS, time.monotonic() + _PATIENCE
    seen: set[int] = set()

    def failing(candidates: Iterable[Any]) -> dict[str, Any] | None:
        nonlocal left
        for schema in candidates:
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            left -= 1
            if left < 0 or time.monotonic() > until:
                return None
            parser = _compile(vocabulary, schema, reader)
            if parser.is_error() and in_words(parser.get_error()) == words:
                return schema
        return None

    found = failing([*reader.roots, *reader.definitions.values()])
    while found is not None:
        place = places.get(id(found), place)
        found = failing(_below(found))
    return GrammarError(words, place)


def _below(schema: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    each_below(schema, lambda each, _: found.append(each))
    return found


def _compile(vocabulary: Any, schema: Any, reader: SchemaReader) -> Any:
    document = as_document(schema, reader)
    return parse(vocabulary, llguidance.LLMatcher.grammar_from_json_schema(document))
