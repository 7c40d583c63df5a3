"""How what rows alone lease is read by `split_kernel`: from where, and by how many blocks.

All of it is arguments of one kernel, whose number and shapes do not depend on who comes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ..kv.buckets import bucket
from . import split_kernel
from .products import Segment

_BLOCKS = 1024
"""Of a layer, about: an H100 computes some 260 at a time, and the last round is seldom full."""
_LEAST, _LONGEST = 256, 4096
"""Tokens that a block reads at most: what it does besides is nothing beside so many."""
_SPLITS = 64
"""Of a row, at most, while their blocks may still be longer: all of them are merged by one."""


class Source(Protocol):
    """Where keys lie: a run of spans, or a stack."""

    def start_of(self, index: int) -> Segment:
        """The first token of one layer's tensors, `[1, kv_heads, 1, size]` each.

        Their strides say where the other tokens are, so that arrays of one shape stand for
        histories of any length.
        """
        ...


class Reading(NamedTuple):
    """What a row reads of a source.

    Attributes:
        slot: of the row.
        source: its number.
        row: of the source.
        tokens: how many, from the first one on.
    """

    slot: int
    source: int
    row: int
    tokens: int


class Splits(NamedTuple):
    """What all rows read.

    Attributes:
        sources: where; MOST of `split_kernel`, some perhaps more than once.
        table: as in `split_kernel.attend`.
    """

    sources: Sequence[Source]
    table: mx.array

    def segments(self, index: int) -> list[Segment]:
        """A layer's tensors of all sources, as `split_kernel.attend` takes them."""
        return [source.start_of(index) for source in self.sources]


def splits_of(
    sources: Sequence[Source], readings: Sequence[Reading], rows: int, layers: int
) -> Splits | None:
    """Share what rows read among blocks.

    Args:
        sources: from which.
        readings: of each row, oldest first.
        rows: of the batch.
        layers: how many layers the sources hold.

    Returns:
        None where there is nothing to read, or the kernel does not read it.
    """
    if not readings or len(sources) > split_kernel.MOST:
        return None
    if not all(split_kernel.reads(sources[0].start_of(index)) for index in range(layers)):
        return None
    kv_heads = sources[0].start_of(0)[0].shape[1]
    each = _tokens_of_a_block(readings, kv_heads)
    blocks: list[list[tuple[int, int, int, int]]] = [[] for _ in range(rows)]
    for slot, source, row, tokens in readings:
        for begin in range(0, tokens, each):
            blocks[slot].append((source, row, begin, min(each, tokens - begin)))
    table = np.zeros((rows, bucket(max(map(len, blocks))), 4), np.int32)
    for entries, read in zip(table, blocks, strict=True):
        entries[: len(read)] = np.array(read, np.int32).reshape(-1, 4)
    more = [sources[0]] * (split_kernel.MOST - len(sources))
    return Splits([*sources, *more], mx.array(table))


def _tokens_of_a_block(readings: Sequence[Reading], kv_heads: int) -> int:
    """A power of two: what it is for does not change with each who comes."""
    by_slot = Counter[int]()
    for reading in readings:
        by_slot[reading.slot] += reading.tokens
    tokens, longest = by_slot.total(), max(by_slot.values())
    each = _LEAST
    while each < _LONGEST and (each * _BLOCKS < tokens * kv_heads or each * _SPLITS < longest):
        each *= 2
    return each
