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
    """What all rows read.

    Attributes:
        sources: where; MAX_SOURCES of `split_kernel`, some perhaps more than once.
        table: as in `split_kernel.attend`.
    """

    sources: Sequence[Source]
    table: mx.array

    def segments(self, index: int) -> list[Segment]:
        """A layer's tensors of all sources, as `split_kernel.attend` takes them."""
        return [source.start_of(index) for source in self.sources]


def splits_of(private: Mapping[int, Sequence[Source]], rows: int, layers: int) -> Splits | None:
    """Share what rows read among blocks.

    Args:
        private: what each row reads, by its slot.
        rows: of the batch.
        layers: how many layers the sources hold.

    Returns:
        None where there is nothing to read, or the kernel does not read it.
    """
    sources = [source for read in private.values() for source in read]
    if not 0 < len(sources) <= split_kernel.MAX_SOURCES:
        return None
    if not all(split_kernel.reads(sources[0].start_of(index)) for index in range(layers)):
        return None
    kv_heads = sources[0].start_of(0)[0].shape[1]
    lengths = {slot: [source.length for source in read] for slot, read in private.items()}
    each = _tokens_of_a_block([sum(read) for read in lengths.values()], kv_heads)
    blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    number = 0
    for slot, read in lengths.items():
        for source, tokens in enumerate(read, number):
            for begin in range(0, tokens, each):
                blocks[slot].append((source, begin, min(each, tokens - begin)))
        number += len(read)
    table = np.zeros((rows, bucket(max(map(len, blocks))), 3), np.int32)
    for entries, row in zip(table, blocks, strict=True):
        entries[: len(row)] = np.array(row, np.int32).reshape(-1, 3)
    more = [sources[0]] * (split_kernel.MAX_SOURCES - len(sources))
    return Splits([*sources, *more], mx.array(table))


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
