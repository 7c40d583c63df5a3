"""What a sequence brings into its row of a batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..moves import Enter
from .sequence_cache import SequenceCache
from .spans import runs_of


class Entering(NamedTuple):
    """A sequence that gets a row.

    Attributes:
        slot: of the row.
        reused: somebody else had it before.
        suffix: for the tensors of each token-addressable layer in turn, their parts, oldest
            first; none where it has no tokens of its own.
        layers: its non-trimmable layer caches, mlx-lm's.
    """

    slot: int
    reused: bool
    suffix: Sequence[Sequence[mx.array]]
    layers: Sequence[Any]


def entering(move: Enter, cache: SequenceCache) -> Entering:
    """Find what a planned move puts into a row."""
    copied = runs_of(cache.prefix[len(cache.prefix) - move.spans :])
    suffix = cache.suffix()
    tensors: list[tuple[mx.array, ...]] = []
    for index in range(len(cache.token_layers) if move.tokens else 0):
        parts = [run.layer(index) for run in copied] + suffix[index : index + 1]
        tensors += zip(*parts, strict=True)
    return Entering(move.slot, move.reused, tensors, cache.non_trimmable)
