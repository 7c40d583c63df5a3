"""Compiled grammars, and the masks of tokens that they allow an answer.

llguidance does the work: it computes masks without Python's lock and within bounds of its own.
"""

from typing import Any, NamedTuple

import llguidance
import numpy as np

from ..errors import MatcherError
from ..params import Mask
from .grammar_faults import in_words


class Vocabulary(NamedTuple):
    """A model's tokens, for all its grammars.

    Attributes:
        tokenizer: llguidance's.
        executor: llguidance's; its threads follow answers.
        words: of a mask.
    """

    tokenizer: Any
    executor: Any
    words: int


class Matcher:
    """Follows one answer. For one thread at a time; other threads run meanwhile."""

    def __init__(self, parser: Any, vocabulary: Vocabulary, first: Mask) -> None:
        self._parser = parser
        self._vocabulary = vocabulary
        self._first: Mask | None = first
        # Following a token keeps Python's lock, but for two that are followed at once: this one
        # is in error from the beginning, so that it takes no time.
        self._other = llguidance.LLMatcher(vocabulary.tokenizer, "", log_level=0)

    def consume(self, token: int) -> None:
        """Take the answer's next token; not the one that ends it.

        Raises:
            MatcherError: the token was not allowed, or the grammar is too complex to go on.
        """
        self._first = None
        both = [(self._parser, token), (self._other, token)]
        if not self._vocabulary.executor.consume_token_par(both)[0]:
            raise MatcherError(in_words(self._parser.get_error()))

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        return bool(self._parser.is_stopped())

    def mask(self) -> Mask:
        """Find the tokens that may follow.

        Tokens that end answers are among them where the answer may end.

        Raises:
            MatcherError: the grammar is too complex to go on.
        """
        if self._first is not None:
            return self._first
        return mask_of(self._parser, self._vocabulary.words)


class Grammar:
    """A compiled constraint. Immutable; safe to use from any thread.

    Attributes:
        nbytes: about what it takes.
    """

    def __init__(self, parser: Any, vocabulary: Vocabulary, nbytes: int) -> None:
        self._parser = parser
        self._vocabulary = vocabulary
        self._first = mask_of(parser.deep_copy(), vocabulary.words)
        self.nbytes = nbytes + self._first.nbytes

    def matcher(self) -> Matcher:
        """Begin an answer."""
        return Matcher(self._parser.deep_copy(), self._vocabulary, self._first)


def mask_of(parser: Any, words: int) -> Mask:
    """Compute the mask of a parser's next position; see `Matcher.mask`.

    Raises:
        MatcherError: it cannot be computed, or nothing may follow.
    """
    mask = np.zeros(words, np.uint32)
    parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if parser.is_error():  # the mask allows the end then, as if the answer were complete
        raise MatcherError(in_words(parser.get_error()))
    return mask
