"""The few tokens of prefixes that each row reads by itself, beside what is one product for many.

See `kv/alignment.py` for what these are; `decode_kernel` and `latent_kernel` read them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kv.span_run import SpanRun
from .products import Segment

MOST = 4
"""Runs that a step's rows read so: they are arguments of a kernel, which has as many."""


class Few(NamedTuple):
    """Few tokens that rows share with others.

    Attributes:
        segments: keys and values of each run, `[1, kv_heads, tokens, size]`; `MOST` at most.
        lengths: `[rows, MOST]`, the tokens that each row reads of each run.
    """

    segments: Sequence[Segment]
    lengths: mx.array


class Tails:
    """Runs of few tokens, and which rows read them.

    Args:
        rows: of the batch.
    """

    def __init__(self, rows: int = 0) -> None:
        self._runs: list[SpanRun] = []
        self._lengths = np.zeros((rows, MOST), np.int32)
        self._array: mx.array | None = None

    def take(self, runs: Sequence[SpanRun], slots: Sequence[int]) -> bool:
        """Have some rows read these runs, too; False where there is no place for them."""
        first = len(self._runs)
        if first + len(runs) > MOST:
            return False
        for number, run in enumerate(runs, first):
            self._lengths[list(slots), number] = run.length
        self._runs += runs
        self._array = None
        return True

    @property
    def runs(self) -> Sequence[SpanRun]:
        """All of them."""
        return self._runs

    def standing(self, runs: Sequence[SpanRun], lengths: mx.array) -> "Tails":
        """The same with other runs and lengths, which stand for these while a step is traced."""
        other = Tails()
        other._runs, other._array = list(runs), lengths
        return other

    @property
    def lengths(self) -> mx.array:
        """`[rows, MOST]` tokens that each row reads of each run; made when it is asked for."""
        if self._array is None:
            self._array = mx.array(self._lengths)
        return self._array

    def segments(self, index: int) -> list[Segment]:
        """The runs' tensors of a layer, by its number among those that spans hold."""
        return [run.layer(index) for run in self._runs]
