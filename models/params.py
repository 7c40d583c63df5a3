"""What requests and settings ask of a model: plain data, free of mlx."""

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
        seed: with the position, the whole source of randomness: the same seed gives the
            same tokens alone or in a crowd.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probabilities reach this sum; 1 is off.
        top_k: keep this many of the likeliest tokens; 0 is off.
        min_p: drop tokens less likely than this share of the likeliest one; 0 is off.
        repetition_penalty: divides the logits of tokens of prompt and answer; 1 is off.
        presence_penalty: taken once from the logit of each token of the answer.
        frequency_penalty: taken once for each time the token stands in the answer.
        logit_bias: token id to what is added to its logit.
        top_logprobs: how many of the likeliest tokens are told, with their log-probabilities,
            beside that of the chosen one; None tells neither, and costs nothing.
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
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Row:
    """What sampling needs to know of one request at one step.

    Attributes:
        params: the request's parameters.
        prompt: its prompt tokens, read by the repetition penalty only.
        output: its tokens so far; their number is the position of the draw.
        mask: no other tokens are chosen; None allows all.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    mask: "Mask | None" = field(default=None, compare=False)


class Matcher(Protocol):
    """Follows one answer through a grammar, as `models.text.grammar.matcher.Matcher` does."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end can follow."""
        ...

    def consume(self, token: int) -> None:
        """Take the answer's next token; raises where it is not allowed."""
        ...

    def mask(self) -> Mask:
        """Find the tokens that may follow. May run on any thread, beside no other call."""
        ...


class Grammar(Protocol):
    """What an answer is held to; `models.text.grammar.matcher.Grammar` is the real one."""

    def matcher(self) -> Matcher:
        """Begin an answer."""
        ...


class LogProbs(NamedTuple):
    """What the model itself gave a token, before temperature and penalties.

    Attributes:
        chosen: log-probability of the token that was chosen.
        top: the likeliest tokens with theirs, likeliest first.
    """

    chosen: float
    top: list[tuple[int, float]]


class Token(NamedTuple):
    """A chosen token; `logprobs` if they were asked for."""

    id: int
    logprobs: LogProbs | None = None
