"""What the next step computes: a pure function of the running sequences."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from .sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """One step's work: a decode for each of `decode`, and at most one prefill chunk.

    Attributes:
        prefill: the sequence whose prompt advances.
        end: the offset its prompt is prefilled up to, exclusive.
        decode: the sequences that get a token each.
    """

    prefill: Sequence | None
    end: int
    decode: tuple[Sequence, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.prefill is None and not self.decode


def plan(running: Items[Sequence], prefill_chunk: int) -> Batch:
    """Choose the next step's work.

    Prefill chunks end on multiples of `prefill_chunk`, whatever was cached, so that the
    same prompt is always computed in the same chunks; they also end on the sequence's chunk
    boundaries and where another request parts from it that waits, and the last one before the
    last prompt token.
    """
    prefill = _shortest_prompt(running)
    decode = tuple(s for s in running if not s.num_left_to_prefill and s.wants_more)
    if prefill is None:
        return Batch(None, 0, decode)
    start = prefill.num_computed_tokens
    grid = (start // prefill_chunk + 1) * prefill_chunk
    stops = (
        offset for offset in (*prefill.chunk_boundaries, prefill.num_awaited) if offset > start
    )
    return Batch(prefill, min(grid, len(prefill.tokens) - 1, *stops), decode)


def _shortest_prompt(running: Items[Sequence]) -> Sequence | None:
    """Choose whose prompt advances: shortest remaining work first, with ageing.

    A prompt counts as shorter by every token that was computed for later ones. One with n tokens
    left is therefore passed over for n tokens at most by requests that come later.
    Where another request waits for its beginning, what is left is what that one waits for.
    """
    prompts = (s for s in running if s.num_left_to_prefill)
    return min(prompts, key=lambda s: s.num_left_to_share - s.num_passed_over, default=None)


class StallBound:
    """Sizes prefill chunks so that sequences that decode do not wait for long.

    A chunk takes a time of its own, to read the weights, and more for each token; both are
    fitted to the chunks that ran, newer ones counting more. A chunk's own time is why halving
    one does not halve its time, and why short chunks are a bad bargain.

    Args:
        seconds: the longest that one chunk may take.
    """

    _LEAST = 16  # smaller chunks cost more in overhead than they save in waiting
    _UNTRIED = 64  # tokens, before the first measurement
    _SURE = 0.8  # of the bound: chunks take longer than estimated about as often as shorter
    _FORGET = 0.8  # what a measurement still counts when the next one comes

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, t, n * n, n * t

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk how long chunks take."""
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(  # type: ignore[assignment]
            self._FORGET * old + more for old, more in zip(self._sums, new, strict=True)
        )

    def expected(self, tokens: int) -> float | None:
        """Estimate how many seconds a chunk takes; None before any was measured."""
        count, n, t, nn, nt = self._sums
        if not count:
            return None
        spread = count * nn - n * n
        each = (count * nt - n * t) / spread if spread > 1e-9 * nn else t / n
        each = min(max(each, 0.0), t / n)  # neither part of the time is negative
        return (t - each * n) / count + each * tokens

    def chunk(self, limit: int) -> int:
        """Halve `limit` until a chunk of it takes no longer than it may.

        Halves keep to the absolute grid: their boundaries are the whole chunk's boundaries, and
        some between.
        """
        chunk = limit
        while chunk // 2 >= self._LEAST and not self._fits(chunk):
            chunk //= 2
        return chunk

    def _fits(self, chunk: int) -> bool:
        expected, least = self.expected(chunk), self.expected(self._LEAST)
        if expected is None or least is None:
            return chunk <= self._UNTRIED
        bound = self._SURE * self._seconds
        # Where no chunk fits, cutting saves the streams little and costs the prompt much.
        return expected <= (bound if least <= bound else 2 * least)
