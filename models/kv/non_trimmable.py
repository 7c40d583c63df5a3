"""Layer caches that restore only as a whole: rings, recurrent arrays, chunks.

A record holds what a layer is besides its arrays. `capture` takes both from a live cache of
mlx-lm's, `restore` makes a live one of them that continues bit by bit as the first would.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

Captured = tuple["Record", list[mx.array]]


@dataclass(frozen=True)
class Ring:
    """A `RotatingKVCache`: keys and values of the last `max_size` tokens.

    Attributes:
        index: where the next token is written; the ring is in order while it has not wrapped.
    """

    offset: int
    keep: int
    max_size: int
    index: int

    def rewinds_to(self, offset: int) -> bool:
        """Whether no token before `offset` has been overwritten."""
        return offset <= self.offset <= self.max_size

    def restore(self, arrays: list[mx.array], offset: int) -> Any:
        """Make the live ring; a rewound one loses the tokens after `offset`."""
        ring = RotatingKVCache(self.max_size, self.keep)
        if offset < self.offset:
            arrays = [array[..., :offset, :] for array in arrays]
        ring.keys, ring.values = arrays if offset else (None, None)
        ring.offset = offset
        ring._idx = min(offset, self.index) if offset < self.offset else self.index  # noqa: SLF001
        return ring


@dataclass(frozen=True)
class Recurrent:
    """An `ArraysCache`: convolution and recurrent states, in the types the model keeps.

    Attributes:
        present: which of its slots hold an array.
    """

    offset: int
    present: tuple[bool, ...]

    def rewinds_to(self, offset: int) -> bool:
        """A recurrent state has all its tokens in it."""
        return offset == self.offset

    def restore(self, arrays: list[mx.array], offset: int) -> Any:
        """Make the live cache."""
        del offset
        cache = ArraysCache(len(self.present))
        remaining = iter(arrays)
        cache.cache = [next(remaining) if there else None for there in self.present]
        return cache


@dataclass(frozen=True)
class Chunk:
    """A `ChunkedKVCache`: keys and values since the start of the attention chunk."""

    offset: int
    chunk_size: int
    start: int

    def rewinds_to(self, offset: int) -> bool:
        """What is before the chunk is gone, so earlier offsets are not restored."""
        return offset == self.offset

    def restore(self, arrays: list[mx.array], offset: int) -> Any:
        """Make the live cache."""
        cache = ChunkedKVCache(self.chunk_size)
        cache.keys, cache.values = arrays
        cache.offset, cache.start_position = offset, self.start
        return cache


Record = Ring | Recurrent | Chunk


def capture(cache: Any, offset: int) -> Captured:
    """Take a layer's record and the part of its arrays that means something.

    The arrays are still the live ones, or views of them.

    Args:
        cache: one of mlx-lm's caches.
        offset: how many tokens the sequence has seen; recurrent caches do not count them.
    """
    if type(cache) is RotatingKVCache:
        return _capture_ring(cache)
    if type(cache) is ArraysCache:
        slots = list(cache.cache)
        present = tuple(slot is not None for slot in slots)
        return Recurrent(offset, present), [slot for slot in slots if slot is not None]
    if type(cache) is ChunkedKVCache:
        # What the model would drop when it is called next is left out, of the checkpoint only.
        stop = cache.offset - cache.start_position
        start = max(0, stop - cache.chunk_size)
        arrays = [array[..., start:stop, :] for array in (cache.keys, cache.values)]
        return Chunk(cache.offset, cache.chunk_size, cache.start_position + start), arrays
    raise TypeError(f"{type(cache).__name__} is not restored as a whole")


def _capture_ring(ring: Any) -> tuple[Ring, list[mx.array]]:
    """Leave out what the ring itself would drop at its next write, and keep the rest's order.

    After a prefill chunk the buffer holds up to a chunk more than the window.
    """
    arrays, index = [ring.keys, ring.values], ring._idx  # noqa: SLF001
    rows = arrays[0].shape[-2]
    if rows > ring.max_size:
        cut = rows - ring.max_size
        arrays = [
            mx.concatenate([a[..., : ring.keep, :], a[..., cut + ring.keep :, :]], axis=-2)
            for a in arrays
        ]
        index = ring.max_size
    elif ring.offset < rows:
        arrays = [array[..., : ring.offset, :] for array in arrays]
    return Ring(ring.offset, ring.keep, ring.max_size, index), arrays


def in_order(cache: Any) -> list[mx.array]:
    """A live window's keys and values, as many as it needs to go on, oldest first."""
    return _chunk_in_order(cache) if isinstance(cache, ChunkedKVCache) else _ring_in_order(cache)


def _ring_in_order(ring: Any) -> list[mx.array]:
    record, arrays = _capture_ring(ring)
    index = record.index
    return [mx.concatenate([a[..., index:, :], a[..., :index, :]], axis=2) for a in arrays]


def _chunk_in_order(cache: Any) -> list[mx.array]:
    """What there is since the last token's chunk began."""
    stop = cache.offset - cache.start_position
    count = (cache.offset - 1) % cache.chunk_size + 1
    return [array[..., stop - count : stop, :] for array in (cache.keys, cache.values)]


def make_chunk(size: int, offset: int, arrays: list[mx.array]) -> Any:
    """Make a live cache of its keys and values in order, up to the last token's."""
    return Chunk(offset, size, offset - arrays[0].shape[-2]).restore(arrays, offset)


def make_ring(window: int, offset: int, arrays: list[mx.array]) -> Any:
    """Make a live ring of its keys and values in order, oldest first."""
    held = arrays[0].shape[-2]
    return Ring(offset, 0, window, held).restore(arrays, offset)
