"""The results of a step: logits, the tokens sampled from them, and names for such tokens."""

from collections.abc import Sequence
from typing import NamedTuple, Self, cast

import mlx.core as mx

from .params import LogProbs, Token
from .runtime import launch


class ForwardOutput:
    """Logits after one token of each of some sequences.

    Attributes:
        logits: `[sequences, V]`, not yet evaluated; None where all failed.
        errors: what the model raised in calls of some of the sequences, by their place. Their
            rows of `logits` mean nothing.
    """

    def __init__(self, logits: mx.array | None, errors: dict[int, BaseException]) -> None:
        self.logits = logits
        self.errors = errors


class SamplerOutput:
    """Tokens that were chosen, and may still be computed.

    Attributes:
        tokens: `[rows]` ids.
        errors: what single rows' sampling raised, by their number; their tokens mean nothing.
    """

    def __init__(
        self,
        tokens: mx.array,
        errors: dict[int, BaseException],
        logprobs: dict[int, tuple[mx.array, mx.array, mx.array]],
    ) -> None:
        self.tokens = tokens
        self.errors = errors
        self._logprobs = logprobs
        launch(tokens, list(logprobs.values()))

    @classmethod
    def empty(cls) -> Self:
        """No rows were sampled."""
        return cls(mx.zeros(0, mx.uint32), {}, {})

    def read(self) -> list[Token]:
        """Wait for the tokens."""
        ids = cast("list[int]", self.tokens.tolist())
        return [Token(token, self._logprobs_of(row)) for row, token in enumerate(ids)]

    def pending(self, place: int) -> "PendingToken":
        """Name a token, which may still be computed."""
        return PendingToken(self, place)

    def _logprobs_of(self, row: int) -> LogProbs | None:
        if row not in self._logprobs:
            return None
        chosen, tokens, values = (array.tolist() for array in self._logprobs[row])
        return LogProbs(cast("float", chosen), list(zip(tokens, values, strict=True)))  # type: ignore[arg-type]


class PendingToken(NamedTuple):
    """A token that was sampled and may still be computed.

    Attributes:
        output: what it is part of.
        place: its number there.
    """

    output: SamplerOutput
    place: int


NextToken = int | PendingToken


def stacked(parts: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """Join the logits of calls. A call that failed gets other rows, as many as it has."""
    done = next((part for part in parts if part is not None), None)
    if done is None or len(parts) == 1:
        return done
    return mx.concatenate(
        [
            mx.broadcast_to(done[:1], (count, *done.shape[1:])) if part is None else part
            for part, count in zip(parts, rows, strict=True)
        ]
    )


def gather(tokens: Sequence[NextToken]) -> mx.array:
    """Put tokens in one array, `[B]`, without waiting for those that are computed.

    Raises:
        ValueError: they come from several outputs.
    """
    pending = [token for token in tokens if isinstance(token, PendingToken)]
    if not pending:
        return mx.array(list(tokens), mx.uint32)  # as outputs are
    output = pending[0].output
    if any(token.output is not output for token in pending):
        raise ValueError("a step's tokens come from one output")
    known = [token for token in tokens if not isinstance(token, PendingToken)]
    size, found = len(output.tokens), 0
    source = []
    for token in tokens:
        if isinstance(token, PendingToken):
            source.append(token.place)
        else:
            source.append(size + found)
            found += 1
    joined = output.tokens
    if known:
        joined = mx.concatenate([joined, mx.array(known, joined.dtype)])
    return joined if source == list(range(len(joined))) else joined[mx.array(source)]
