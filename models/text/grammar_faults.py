"""Why a grammar does not compile: in words, and where in the schema."""

import re
import time
from collections.abc import Iterator
from typing import Any

import llguidance
import numpy as np

from ..errors import GrammarError
from .lark import as_document
from .schema_form import within
from .schema_meaning import SchemaReader

_MOST_PATTERNS = 500
_LONGEST_PATTERN = 5000
_STEPS = 12  # tokens of a rehearsal
_TRIALS = 100
_PATIENCE = 2.0  # seconds

_QUOTED = re.compile(r"\d+ \| ")  # a line of the grammar, which no client has seen

_WORDS = (
    ("oneOf constraints", "is supported only where no value can match two of its options"),
    ("Unsatisfiable schema", "no value can match it"),
    ("NoExtensionBias", "no value can match it"),
    ("min/maxProperties only", "minProperties and maxProperties need all properties required"),
    ("circular references", "refers to itself with other keywords beside $ref"),
    ("schema too large", "is too complex"),
    ("fuel exhausted", "is too complex"),
    ("too many", "is too complex"),
    ("recursion limit", "is too complex"),
    ("stack level exceeded", "is too complex"),
    ("Current row has", "is too complex"),
    ("panic", "is too complex"),
    ("can't determine if", "it cannot be told that the patterns exclude each other"),
    ("are not disjoint", "the patterns do not exclude each other, which is not supported"),
    ("look-around", "look-around is not supported"),
    ("lookarounds", "anchors and word boundaries inside a pattern are not supported"),
    ("backreferences", "back-references are not supported"),
    ("multipleOf", "the multiple has too many digits"),
    ("Failed to generate regex", "the bounds are too large"),
)  # fmt: skip


def first_words(message: str) -> str:
    """Cut a message of llguidance to what it says first."""
    message = message.partition("<non-verbose/>")[0].split("failed to compile JSON schema: ")[-1]
    lines = [line.strip() for line in message.splitlines()]
    quoted = next((i for i, line in enumerate(lines) if _QUOTED.match(line)), len(lines))
    return " ".join(filter(None, lines[:quoted]))[:300] or "the grammar cannot be followed"


def in_words(message: str) -> str:
    """Say what a message of llguidance means."""
    known = (words for fragment, words in _WORDS if fragment in message)
    return next(known, first_words(message))


def explain(vocabulary: Any, message: str, reader: SchemaReader, limits: Any) -> GrammarError:
    """Find the part of a schema for which a grammar did not compile."""
    return _Search(vocabulary, message, reader, limits).error()


def rehearse(vocabulary: Any, reader: SchemaReader, limits: Any) -> None:
    """Try the patterns of schemas one by one: some are too complex only once they are followed.

    Raises:
        GrammarError: one of them does not compile.
    """
    tried: set[str] = set()
    for schema, place in reader.noted:
        patterns = [(schema["pattern"], within(place, "pattern"))] if "pattern" in schema else []
        patterns += [(p, reader.patterns[p]) for p in schema.get("patternProperties", {})]
        for pattern, where in patterns:
            if pattern not in tried:
                tried.add(pattern)
                if len(tried) > _MOST_PATTERNS:
                    raise GrammarError(f"is one of over {_MOST_PATTERNS} patterns", where)
                _rehearse_pattern(vocabulary, pattern, where, limits)


def _rehearse_pattern(vocabulary: Any, pattern: str, place: str, limits: Any) -> None:
    if len(pattern) > _LONGEST_PATTERN:
        raise GrammarError(f"has more than {_LONGEST_PATTERN} characters", place)
    parser = _compile(vocabulary, {"type": "string", "pattern": pattern}, SchemaReader(), limits)
    walk(parser)
    if parser.is_error():
        raise GrammarError(in_words(parser.get_error()), place)


def walk(parser: Any) -> None:
    """Follow a few tokens, the same at every call."""
    for step in range(_STEPS):
        if parser.is_error() or parser.is_stopped():
            return
        mask = np.frombuffer(parser.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(allowed):
            parser.consume_token(int(allowed[(3 * step + 5) * len(allowed) // 11 % len(allowed)]))


def _compile(vocabulary: Any, schema: Any, reader: SchemaReader, limits: Any) -> Any:
    document = as_document(schema, reader)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(document)
    return llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


class _Search:
    """Looks for the deepest part of the schemas that fails on its own, in the same way."""

    def __init__(self, vocabulary: Any, message: str, reader: SchemaReader, limits: Any) -> None:
        self._vocabulary = vocabulary
        self._message = message
        self._reader = reader
        self._limits = limits
        self._places = reader.places()
        self._left = _TRIALS
        self._until = time.monotonic() + _PATIENCE

    def error(self) -> GrammarError:
        place, message = "", self._message
        roots = [schema for schema in self._reader.roots if isinstance(schema, dict)]
        candidates = [*roots, *self._reader.definitions.values()]
        seen: set[int] = set()
        while (found := self._failing(candidates, seen)) is not None:
            schema, message = found
            place = self._places.get(id(schema), place)
            candidates = list(_parts(schema))
        return GrammarError(in_words(message), place)

    def _failing(self, candidates: list[Any], seen: set[int]) -> tuple[Any, str] | None:
        for schema in candidates:
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self._left -= 1
            if self._left < 0 or time.monotonic() > self._until:
                return None
            parser = _compile(self._vocabulary, schema, self._reader, self._limits)
            message = parser.get_error()
            if parser.is_error() and in_words(message) == in_words(self._message):
                return schema, message
        return None


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in ("items", "additionalProperties"):
        yield schema.get(keyword)
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from schema.get(keyword, [])
    for keyword in ("properties", "patternProperties"):
        yield from schema.get(keyword, {}).values()
