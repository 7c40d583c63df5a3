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
    same prompt is always computed in the same pieces; they also end on the sequence's
    borders, and the last one before the last prompt token.
    """
    prefill = next((s for s in running if s.num_left_to_prefill), None)
    decode = tuple(s for s in running if not s.num_left_to_prefill and s.wants_more)
    if prefill is None:
        return Batch(None, 0, decode)
    start = prefill.num_computed_tokens
    grid = (start // prefill_chunk + 1) * prefill_chunk
    border = next((offset for offset in prefill.borders if offset > start), grid)
    return Batch(prefill, min(grid, border, prefill.num_prompt_tokens - 1), decode)


class StallBound:
    """Sizes prefill chunks so that sequences that decode do not wait for long.

    Args:
        seconds: the longest that one chunk may take.
    """

    _LEAST = 16  # smaller pieces cost more in overhead than they save in waiting
    _WEIGHT = 0.3  # of the newest measurement

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._each: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk how long a token of prefill takes."""
        each = seconds / tokens
        old = each if self._each is None else self._each
        self._each = old + self._WEIGHT * (each - old)

    def chunk(self, limit: int) -> int:
        """Halve `limit` until a chunk of it takes no longer than it may.

        Halves keep to the absolute grid: their borders are the whole chunk's borders, and
        some between.
        """
        chunk = limit
        while self._each and chunk * self._each > self._seconds and chunk // 2 >= self._LEAST:
            chunk //= 2
        return chunk
