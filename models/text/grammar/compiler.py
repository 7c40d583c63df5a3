"""Constraints to grammars; a constraint that does not compile is explained, with its place."""

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import llguidance
import msgspec
import numpy as np

from ...errors import GrammarError, MatcherError
from ..codec import TextCodec
from ..conversation import Choice, Constraint, JSONObject, JSONSchema, Reasoning, Regex, ToolCalls
from .calls import NARROWED, add_calls
from .lark import Lark, as_document
from .matcher import Grammar, Vocabulary, grammar_tokenizer, in_words, mask_of, parse
from .schema_check import DEEPEST, each_below
from .schema_rewrite import SchemaReader

_THREADS = 2
_KEPT = 128
_KEPT_BYTES = 64 << 20
# Upper bounds of a grammar's memory as measured, with the states that answers add.
_BYTES = 512 << 10
_BYTES_PER_CHARACTER = 160
_BYTES_PER_REPEAT = 4096  # each counted repeat is a state
_MOST_REPEATS = 4096  # that answers reach
_COUNTED = re.compile(r'"m(?:ax|in)Length": (\d{1,9})\b|\{(?:\d+,)?(\d{1,9})\}')
_QUOTED = 100  # characters of an option
_MOST_PATTERNS = 500
_LONGEST_PATTERN = 5000
_STEPS = 12  # tokens of a rehearsal
_TRIALS = 100
_PATIENCE = 2.0  # seconds


class _Around(NamedTuple):
    reasoning: Reasoning | None
    header: str
    markers: tuple[str, ...]


class GrammarCompiler:
    """Compiles constraints for one model. Safe to call from several threads at once.

    The first call reads the vocabulary, which takes some tenths of a second.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._kept_bytes = 0

    def compile(
        self,
        constraint: Constraint | ToolCalls,
        *,
        scope: str = "",
        reasoning: Reasoning | None = None,
        header: str = "",
        markers: Sequence[str] = (),
    ) -> Grammar:
        """Compile a constraint, or reuse its grammar from an earlier call in the same scope.

        Time and memory are bounded for any constraint; other threads run meanwhile.

        Args:
            constraint: for the answer.
            scope: grammars are reused only within it, so that a call's duration tells nothing of
                other scopes.
            reasoning: thoughts before the answer are free.
            header: markup before content.
            markers: content does not begin with them, since the parser would not read content.

        Raises:
            GrammarError: the constraint is not supported; the message and the place say why.
        """
        constraint = _what_counts(constraint)
        around = _Around(reasoning, header, tuple(markers))
        key = _key(scope, constraint, around)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        grammar = self._compile(constraint, around)
        with self._lock:
            if key not in self._kept and grammar.nbytes <= _KEPT_BYTES:
                self._kept[key] = grammar
                self._kept_bytes += grammar.nbytes
            while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.nbytes
        return grammar

    def _compile(self, constraint: Constraint | ToolCalls, around: _Around) -> Grammar:
        try:
            return self._written(constraint, around)
        except GrammarError:
            if not isinstance(constraint, ToolCalls) or constraint.form not in NARROWED:
                raise
        return self._written(msgspec.structs.replace(constraint, form="generic"), around)

    def _written(self, constraint: Constraint | ToolCalls, around: _Around) -> Grammar:
        vocabulary, lark = self._read_vocabulary(), self._lark()
        calls = constraint if isinstance(constraint, ToolCalls) else None
        content = constraint.content if isinstance(constraint, ToolCalls) else constraint
        written = None
        if content is not None:
            written = f"{lark.marker(around.header)} {_content(lark, content, around.markers)}"
            if around.markers and isinstance(content, Regex):
                self._check_pattern(vocabulary, content, around.markers)
        if calls is not None:
            add_calls(lark, calls, written)
        elif written is not None:
            lark.rule("answer", written)
        lark.rule("start", _start(lark, around.reasoning, calls.starts if calls else []))
        _rehearse(vocabulary.tokenizer, lark.schemas)
        parser = parse(vocabulary.tokenizer, str(lark))
        if parser.is_error():
            raise _explain(vocabulary.tokenizer, parser.get_error(), lark.schemas)
        try:
            grammar = Grammar(parser, vocabulary, _estimate(str(lark)))
        except MatcherError as error:
            raise GrammarError(f"no answer can match it: {error}") from error
        _walk(parser.deep_copy())
        return grammar

    def _check_pattern(
        self, vocabulary: Vocabulary, content: Regex, markers: Sequence[str]
    ) -> None:
        """Refuse a pattern that matches nothing; beside calls its grammar would compile."""
        lark = self._lark()
        lark.rule("start", _content(lark, content, markers))
        parser = parse(vocabulary.tokenizer, str(lark))
        if parser.is_error():
            raise GrammarError(in_words(parser.get_error()))
        try:
            mask_of(parser, vocabulary.words)
        except MatcherError as error:
            words = "the pattern matches nothing that does not begin like a call or a thought"
            raise GrammarError(words) from error

    def _lark(self) -> Lark:
        return Lark(self._codec.special_tokens_by_name, self._codec.added_tokens)

    def _read_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                words = -(-self._codec.vocab_size // 32)
                executor = llguidance.LLExecutor(num_threads=_THREADS)
                self._vocabulary = Vocabulary(grammar_tokenizer(self._codec), executor, words)
            return self._vocabulary


def _what_counts(constraint: Constraint | ToolCalls) -> Constraint | ToolCalls:
    """Drop the parts on which a grammar does not depend: they may be megabytes."""
    if not isinstance(constraint, ToolCalls):
        return constraint
    tools = []
    for tool in constraint.tools:
        parameters = tool.parameters if tool.strict or constraint.forced else {}
        tools.append(msgspec.structs.replace(tool, description="", parameters=parameters))
    return msgspec.structs.replace(constraint, tools=tools)


def _key(scope: str, constraint: Constraint | ToolCalls, around: _Around) -> bytes:
    try:
        text = msgspec.json.encode([scope, type(constraint).__name__, constraint, around])
    except RecursionError:
        raise GrammarError(f"is nested deeper than {DEEPEST} levels") from None
    return hashlib.blake2b(text, digest_size=16).digest()


def _estimate(text: str) -> int:
    counted = {match.group(): int(match[1] or match[2]) for match in _COUNTED.finditer(text)}
    repeats = min(sum(counted.values()), _MOST_REPEATS)
    return _BYTES + len(text) * _BYTES_PER_CHARACTER + repeats * _BYTES_PER_REPEAT


def _start(lark: Lark, reasoning: Reasoning | None, without: list[str]) -> str:
    if reasoning is None:
        return "answer"
    lark.rule("GAP", r"/\n{1,2}/")
    thought = f"{lark.up_to(reasoning.end, without)} GAP?"
    if reasoning.opened:
        return f"{thought} answer"
    return f"({lark.marker(reasoning.start)} {thought})? answer"


def _content(lark: Lark, constraint: Constraint, markers: Sequence[str]) -> str:
    """Write an answer without calls. It begins with no marker; JSON never does."""
    match constraint:
        case JSONObject():
            return lark.json({"type": "object"})
        case JSONSchema(schema=schema):
            rewritten = lark.schemas.read(schema)
            if rewritten is False:
                raise GrammarError("false allows nothing")
            return lark.json(rewritten)
        case Regex(pattern=pattern):
            barred = f" & ~({lark.beginning_with(markers)})" if markers else ""
            lark.rule("ANSWER", f"{lark.pattern(pattern)}{barred}")
        case Choice(options=options):
            for option in options:
                if option.lstrip().startswith(tuple(markers)):
                    words = "begins with a marker, and would be read as a call or a thought"
                    raise GrammarError(f"the option {option[:_QUOTED]!r} {words}")
            lark.rule("ANSWER", lark.one_of(options))
    return "ANSWER"


def _rehearse(vocabulary: Any, reader: SchemaReader) -> None:
    """Try the schemas' patterns one by one: some prove too complex only when followed."""
    for number, (pattern, place) in enumerate(reader.patterns.items()):
        if number >= _MOST_PATTERNS:
            raise GrammarError(f"is one of over {_MOST_PATTERNS} patterns", place)
        if len(pattern) > _LONGEST_PATTERN:
            raise GrammarError(f"has more than {_LONGEST_PATTERN} characters", place)
        parser = _parsed(vocabulary, {"type": "string", "pattern": pattern}, reader)
        _walk(parser, place)


def _walk(parser: Any, place: str = "") -> None:
    """Follow a few tokens, always the same; raise GrammarError if that fails."""
    for step in range(_STEPS):
        if parser.is_error() or parser.is_stopped():
            break
        mask = np.frombuffer(parser.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(allowed):
            parser.consume_token(int(allowed[(3 * step + 5) * len(allowed) // 11 % len(allowed)]))
    if parser.is_error():
        raise GrammarError(in_words(parser.get_error()), place)


def _explain(vocabulary: Any, message: str, reader: SchemaReader) -> GrammarError:
    """Find the deepest part of the schemas that fails alone as the whole grammar does."""
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
            parser = _parsed(vocabulary, schema, reader)
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


def _parsed(vocabulary: Any, schema: Any, reader: SchemaReader) -> Any:
    document = as_document(schema, reader)
    return parse(vocabulary, llguidance.LLMatcher.grammar_from_json_schema(document))
