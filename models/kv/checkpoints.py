"""Checkpoints: layers that restore only as a whole, which are rings, recurrent arrays and chunks.

A record holds a layer's properties besides its arrays. `capture` takes both from a live cache of
mlx-lm's, `restore` makes a live cache that continues bit by bit as the first would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from .spans import Places, pack


@dataclass(frozen=True)
class Ring:
    """A `RotatingKVCache`: keys and values of the last `max_size` tokens.

    Attributes:
        index: position of the next write; the ring is in order while it has not wrapped.
    """

    offset: int
    keep: int
    max_size: int
    index: int

    def rewinds_to(self, offset: int) -> bool:
        """True if no token before `offset` has been overwritten."""
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
        present: True for each of its slots that holds an array.
    """

    offset: int
    present: tuple[bool, ...]

    def rewinds_to(self, offset: int) -> bool:
        """True for the offset itself: a recurrent state has all its tokens in it."""
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
        """True for the offset itself: tokens before the chunk are gone."""
        return offset == self.offset

    def restore(self, arrays: list[mx.array], offset: int) -> Any:
        """Make the live cache."""
        cache = ChunkedKVCache(self.chunk_size)
        cache.keys, cache.values = arrays
        cache.offset, cache.start_position = offset, self.start
        return cache


Record = Ring | Recurrent | Chunk


class PackedCheckpoint:
    """Sliding-window and recurrent state of all layers at one offset. Immutable.

    Attributes:
        offset: number of tokens before it.
        records: of each layer.
        arrays: `[rows, ...]` each, evaluated, each with a buffer of its own.
        places: of each layer's arrays.
    """

    def __init__(
        self, offset: int, records: Sequence[Record], arrays: Sequence[mx.array], places: Places
    ) -> None:
        self.offset = offset
        self.records = list(records)
        self.arrays = list(arrays)
        self.places = places

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def buffers(self) -> int:
        """Number of allocations."""
        return len(self.arrays)

    def close(self) -> None:
        """Free the buffers."""
        self.arrays = []

    def rewinds_to(self, offset: int) -> bool:
        """True if every layer can restore this earlier offset exactly."""
        return all(record.rewinds_to(offset) for record in self.records)

    def restore_all(self, offset: int) -> list[Any]:
        """Make mlx-lm's caches of all layers, at `offset`."""
        return [
            record.restore([self.arrays[n][row : row + 1] for n, row in place], offset)
            for record, place in zip(self.records, self.places, strict=True)
        ]


def checkpoint_of(offset: int, layers: Sequence[Any]) -> PackedCheckpoint:
    """Copy live layer caches of mlx-lm's, which have seen `offset` tokens."""
    captured = [capture(layer, offset) for layer in layers]
    arrays, places = pack([[(array,) for array in arrays] for _, arrays in captured])
    return PackedCheckpoint(offset, [record for record, _ in captured], arrays, places)


def capture(cache: Any, offset: int) -> tuple[Record, list[mx.array]]:
    """A live layer's record, and the part of its arrays that is in use, not copied.

    Args:
        cache: one of mlx-lm's caches.
        offset: tokens that the sequence has seen; recurrent caches do not count them.
    """
    if type(cache) is RotatingKVCache:
        return _capture_ring(cache)
    if type(cache) is ArraysCache:
        slots = list(cache.cache)
        present = tuple(slot is not None for slot in slots)
        return Recurrent(offset, present), [slot for slot in slots if slot is not None]
    if type(cache) is ChunkedKVCache:
        # Without the tokens that the model drops at its next call.
        stop = cache.offset - cache.start_position
        start = max(0, stop - cache.chunk_size)
        arrays = [array[..., start:stop, :] for array in (cache.keys, cache.values)]
        return Chunk(cache.offset, cache.chunk_size, cache.start_position + start), arrays
    raise TypeError(f"{type(cache).__name__} is not restored as a whole")


def _capture_ring(ring: Any) -> tuple[Ring, list[mx.array]]:
    """Leave out the tokens that the ring drops at its next write, and keep the others' order.

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
    """A live window's keys and values that it needs to continue, oldest first."""
    if isinstance(cache, ChunkedKVCache):
        stop = cache.offset - cache.start_position
        count = (cache.offset - 1) % cache.chunk_size + 1  # since the last token's chunk began
        return [array[..., stop - count : stop, :] for array in (cache.keys, cache.values)]
    record, arrays = _capture_ring(cache)
    index = record.index
    return [mx.concatenate([a[..., index:, :], a[..., :index, :]], axis=2) for a in arrays]


def live_window(size: int, offset: int, arrays: list[mx.array], *, chunked: bool) -> Any:
    """Make a live cache of a window's keys and values in order, up to the last token's.

    Args:
        size: tokens of the window or chunk.
        offset: tokens that the sequence has seen.
        arrays: keys and values.
        chunked: the window is emptied when a chunk begins.
    """
    held = arrays[0].shape[-2]
    record = Chunk(offset, size, offset - held) if chunked else Ring(offset, 0, size, held)
    return record.restore(arrays, offset)
