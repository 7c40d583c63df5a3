"""Compiled grammars, and the masks of tokens that they allow.

llguidance parses and computes masks, without Python's lock and within bounds of its own. umbel uses
nothing else of it.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import llguidance
import numpy as np
from tokenizers import Tokenizer

from ...errors import GrammarError, MatcherError
from ...params import Mask
from ..codec import TextCodec

_MARK = b"\xff"  # llguidance's own, for special tokens; no UTF-8 has this byte
_LIMITS = llguidance.LLParserLimits(
    # An object with n optional properties has rows of 4 n items.
    max_items_in_row=5_000,
    max_lexer_states=100_000,
    verbose_errors=False,
)
_QUOTED = re.compile(r"\d+ \| ")  # a line of umbel's own grammar
_WORDS = (
    ("oneOf constraints", "is supported only where no value can match two of its options"),
    ("Unsatisfiable schema", "no value can match it"),
    ("NoExtensionBias", "no value can match it"),
    ("min/maxProperties only", "minProperties and maxProperties need all properties required"),
    ("circular references", "refers to itself with other keywords beside $ref"),
    *(
        (fragment, "is too complex")
        for fragment in (
            "schema too large", "fuel exhausted", "too many", "recursion limit",
            "stack level exceeded", "Current row has", "panic",
        )
    ),
    ("can't determine if", "it cannot be told that the patterns exclude each other"),
    ("are not disjoint", "the patterns do not exclude each other, which is not supported"),
    ("look-around", "look-around is not supported"),
    ("lookarounds", "anchors and word boundaries inside a pattern are not supported"),
    ("backreferences", "back-references are not supported"),
    ("multipleOf", "the multiple has too many digits"),
    ("Failed to generate regex", "the bounds are too large"),
)  # fmt: skip


def parse(tokenizer: Any, grammar: str) -> Any:
    """Compile a grammar with llguidance; the parser may be in error."""
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def in_words(message: str) -> str:
    """Explain a message of llguidance; an unknown one is shortened."""
    for fragment, words in _WORDS:
        if fragment in message:
            return words
    message = message.partition("<non-verbose/>")[0].split("failed to compile JSON schema: ")[-1]
    lines = [line.strip() for line in message.splitlines()]
    quoted = next((i for i, line in enumerate(lines) if _QUOTED.match(line)), len(lines))
    return " ".join(filter(None, lines[:quoted]))[:300] or "the grammar cannot be followed"


class Vocabulary(NamedTuple):
    """llguidance's tokenizer of a model, threads, and the 32-bit words of a mask."""

    tokenizer: Any
    executor: Any
    words: int


class Matcher:
    """Follows one answer. For one thread at a time; other threads run meanwhile."""

    def __init__(self, parser: Any, vocabulary: Vocabulary, first: Mask) -> None:
        self._parser = parser
        self._vocabulary = vocabulary
        self._first: Mask | None = first
        # llguidance releases Python's lock only if it follows two tokens at once: this parser is in
        # error from the beginning, so that it takes no time.
        self._other = llguidance.LLMatcher(vocabulary.tokenizer, "", log_level=0)

    def consume(self, token: int) -> None:
        """Take the answer's next token, not its end; raise MatcherError if that fails."""
        self._first = None
        both = [(self._parser, token), (self._other, token)]
        if not self._vocabulary.executor.consume_token_par(both)[0]:
            raise MatcherError(in_words(self._parser.get_error()))

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows only end-of-text next."""
        return bool(self._parser.is_stopped())

    def mask(self) -> Mask:
        """Compute the tokens allowed next, ends included; raise MatcherError if too complex."""
        if self._first is not None:
            return self._first
        return mask_of(self._parser, self._vocabulary.words)


class Grammar:
    """A compiled constraint. Immutable; safe to use from any thread. `nbytes` is an estimate."""

    def __init__(self, parser: Any, vocabulary: Vocabulary, nbytes: int) -> None:
        self._parser = parser
        self._vocabulary = vocabulary
        self._first = mask_of(parser.deep_copy(), vocabulary.words)
        self.nbytes = nbytes + self._first.nbytes

    def matcher(self) -> Matcher:
        """Start an answer."""
        return Matcher(self._parser.deep_copy(), self._vocabulary, self._first)


def mask_of(parser: Any, words: int) -> Mask:
    """Compute the next mask; raise MatcherError if that fails or no token is allowed."""
    mask = np.zeros(words, np.uint32)
    parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if parser.is_error():  # then the mask allows only the end
        raise MatcherError(in_words(parser.get_error()))
    return mask


def grammar_tokenizer(codec: TextCodec) -> Any:
    """Build llguidance's tokenizer for a model.

    Special tokens are the codec's and those that end answers; a grammar matches their numbers. All
    others, added ones included, match by their text. llguidance would take each added token of
    tokenizer.json for a special one; published ones include `<tool_call>` and line breaks.

    Raises:
        GrammarError: the tokenizer is not supported.
    """
    try:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(codec)),
            n_vocab=codec.vocab_size,
            eos_token=sorted(codec.eos_ids),
        )
    except Exception as error:  # it may raise anything, a panic too
        words = f"this model's tokenizer cannot be held to a grammar: {error}"
        raise GrammarError(words) from error


class _Tokens:
    """Tokenizer for llguidance, which encodes text that a grammar forces."""

    bos_token_id = None

    def __init__(self, codec: TextCodec) -> None:
        self.eos_token_id = min(codec.eos_ids)
        self.special_token_ids = sorted(codec.special_tokens | codec.eos_ids)
        self.tokens = [_written(codec, token) for token in range(codec.vocab_size)]
        self._tokenizer = Tokenizer.from_str(codec.to_json(without_prefix=True))
        self._tokenizer.encode_special_tokens = True  # so that their names are text

    def __call__(self, text: bytes | str) -> Sequence[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = batch[0].ids
        return ids


def _written(codec: TextCodec, token: int) -> bytes:
    text, data = codec.read_token(token, first=False)
    data = text.encode() if data is None else data
    return b"" if data.startswith(_MARK) else data
