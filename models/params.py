"""Parameters of requests and settings for a model: plain data, free of mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np

Mask: TypeAlias = "np.ndarray[Any, np.dtype[np.uint32]]"
"""Tokens that may be chosen: `[ceil(V / 32)]` words, a token's bit is 1 << token % 32."""


class KVQuantization(NamedTuple):
    """How keys and values are quantised.

    Attributes:
        bits: of a number.
        group_size: numbers that share a scale and a bias.
    """

    bits: int
    group_size: int


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling parameters, already validated.

    Attributes:
        seed: with the position, the only source of randomness: the same seed gives the same tokens
            alone or in a batch.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probabilities reach this sum; 1 is off.
        top_k: keep this many of the likeliest tokens; 0 is off.
        min_p: drop tokens less likely than this share of the likeliest one; 0 is off.
        repetition_penalty: divides the logits of tokens of prompt and answer; 1 is off.
        presence_penalty: taken once from the logit of each token of the answer.
        frequency_penalty: taken once for each time the token stands in the answer.
        logit_bias: a number for a token's id, which is added to its logit.
        top_logprobs: number of the likeliest tokens whose log-probabilities are returned, beside
            that of the chosen one; None returns none, and costs nothing.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    top_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Row:
    """One request's input of sampling at one step.

    Attributes:
        params: of the request.
        prompt: its prompt tokens, read by the repetition penalty only.
        output: its tokens so far; their number is the position of the draw.
        mask: of the tokens that may be chosen; None allows all.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    mask: "Mask | None" = field(default=None, compare=False)


class Matcher(Protocol):
    """Follows one answer through a grammar, as `models.text.grammar.matcher.Matcher` does."""

    @property
    def is_complete(self) -> bool:
        """True if only end-of-text may follow."""
        ...

    def consume(self, token: int) -> None:
        """Take the answer's next token; raise a MatcherError if it is not allowed."""
        ...

    def mask(self) -> Mask:
        """Find the tokens that may follow. May run on any thread, beside no other call."""
        ...


class Grammar(Protocol):
    """A compiled grammar, as `models.text.grammar.matcher.Grammar` is."""

    def matcher(self) -> Matcher:
        """Begin an answer."""
        ...


class LogProbs(NamedTuple):
    """Log-probabilities before temperature and penalties.

    Attributes:
        chosen: of the chosen token.
        top: the likeliest tokens with theirs, likeliest first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Token(NamedTuple):
    """A chosen token; `logprobs` if they were asked for."""

    id: int
    logprobs: LogProbs | None = None
