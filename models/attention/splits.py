"""How what rows alone lease is read by `split_kernel`: from where, and by how many blocks.

All of it is arguments of one kernel, whose number and shapes do not depend on who comes.
"""

from collections.abc import Mapping, Sequence
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
    """Consecutive tokens that one row reads: a run of spans.

    Attributes:
        length: how many.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)

    def start_of(self, index: int) -> Segment:
        """The first token of one layer's tensors, `[1, kv_heads, 1, size]` each.

        Their strides say where the other tokens are, so that arrays of one shape stand for
        histories of any length.
        """
        ...


class Splits(NamedTuple):
    """Private tokens of all rows, as one call of `split_kernel` reads them.

    Attributes:
        sources: `MAX_SOURCES` of `split_kernel`, filled up with the first one.
        table: as in `split_kernel.attend`.
    """

    sources: Sequence[Source]
    table: mx.array

    def segments(self, index: int) -> list[Segment]:
        """A layer's tensors of all sources, as `split_kernel.attend` takes them."""
        return [source.start_of(index) for source in self.sources]


def splits_of(private: Mapping[int, Sequence[Source]], rows: int, layers: int) -> list[Splits]:
    """Divide the private tokens of all rows among blocks of as many calls as there must be.

    Args:
        private: sources of each row, by its slot.
        rows: of the batch.
        layers: number of layers in a source.

    Returns:
        One entry for each call of the kernel, which reads at most `MAX_SOURCES`; none if rows have
        no private tokens, or the kernel cannot read them.
    """
    sources = [(slot, source) for slot, read in private.items() for source in read]
    if not sources:
        return []
    if not all(split_kernel.reads(sources[0][1].start_of(index)) for index in range(layers)):
        return []
    kv_heads = sources[0][1].start_of(0)[0].shape[1]
    each = _tokens_of_a_block(
        [sum(source.length for source in read) for read in private.values()], kv_heads
    )
    most = split_kernel.MAX_SOURCES
    return [
        _splits(sources[start : start + most], rows, each) for start in range(0, len(sources), most)
    ]


def attend(
    calls: Sequence[Splits], index: int, queries: mx.array, scale: float
) -> tuple[mx.array, mx.array] | None:
    """Attend to the private tokens of all rows in one layer.

    Args:
        calls: from `splits_of`.
        index: number of the layer.
        queries: as in `split_kernel.attend`.
        scale: of the scores.

    Returns:
        Outputs and logs of sums of all blocks, as `split_kernel.attend` returns them; None if
        there are no calls.
    """
    found = [
        split_kernel.attend(queries, call.segments(index), call.table, scale) for call in calls
    ]
    if len(found) <= 1:
        return found[0] if found else None
    outputs, sums = ([results[n] for results in found] for n in range(2))
    return mx.concatenate(outputs, axis=1), mx.concatenate(sums, axis=1)


def _splits(sources: Sequence[tuple[int, Source]], rows: int, each: int) -> Splits:
    """Divide the tokens of one call's sources among blocks of `each` tokens."""
    blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    for number, (slot, source) in enumerate(sources):
        for begin in range(0, source.length, each):
            blocks[slot].append((number, begin, min(each, source.length - begin)))
    table = np.zeros((rows, bucket(max(map(len, blocks))), 3), np.int32)
    for entries, row in zip(table, blocks, strict=True):
        entries[: len(row)] = np.array(row, np.int32).reshape(-1, 3)
    read = [source for _, source in sources]
    more = [read[0]] * (split_kernel.MAX_SOURCES - len(read))
    return Splits([*read, *more], mx.array(table))


def _tokens_of_a_block(tokens: Sequence[int], kv_heads: int) -> int:
    """A power of two, so that it seldom changes as sequences come and go.

    Args:
        tokens: that each row reads.
        kv_heads: of the keys.
    """
    each = _LEAST
    while each < _LONGEST and (
        each * _BLOCKS < sum(tokens) * kv_heads or each * _SPLITS < max(tokens)
    ):
        each *= 2
    return each
