"""Stored state: packed, immutable, detached from what made it.

Arrays of one shape become one array, layers first, because Metal allows 499,000 buffers in a
process. Each packed array has a buffer of its own, so its bytes are freed when it is.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Self

import mlx.core as mx

from .non_trimmable import Record
from .token_layer import Tensors

Places = tuple[tuple[tuple[int, int], ...], ...]
"""For each layer, for each of its tensors: the packed array, and the row in it."""


_numbers = count()


class Packed:
    """State in a few large arrays.

    Args:
        arrays: evaluated, each with a buffer of its own.
        places: where each layer's tensors are.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places) -> None:
        self._arrays = list(arrays)
        self._places = places

    @property
    def arrays(self) -> list[mx.array]:
        """The packed arrays."""
        return self._arrays

    @property
    def places(self) -> Places:
        """Where each layer's tensors are."""
        return self._places

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def buffers(self) -> int:
        """In how many allocations."""
        return len(self._arrays)

    def close(self) -> None:
        """Free the buffers."""
        self._arrays = []


class PackedSpan(Packed):
    """Token-addressable state of consecutive tokens, all layers. Immutable.

    Attributes:
        number: its name, never given twice in a process.
        length: how many tokens.

    Args:
        arrays: `[rows, heads, tokens, size]` each, evaluated.
        places: where each layer's tensors are.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places) -> None:
        super().__init__(arrays, places)
        self._layers: dict[int, Tensors] = {}
        self.number = next(_numbers)
        self.length = int(arrays[0].shape[-2])

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[1, heads, tokens, size]` each, as views.

        The same object at every call: sequences that lease a span know by it that they share.
        """
        if index not in self._layers:
            self._layers[index] = _views(self._arrays, self._places[index])
        return self._layers[index]

    def first(self, count: int) -> Self:
        """Keep the first tokens only, in buffers of their own."""
        kept = [mx.contiguous(array[..., :count, :]) for array in self._arrays]
        mx.eval(kept)
        self.close()
        return type(self)(kept, self._places)

    def copy(self, start: int, stop: int) -> Self:
        """Copy some of its tokens."""
        copied = [mx.contiguous(array[..., start:stop, :]) for array in self._arrays]
        mx.eval(copied)
        return type(self)(copied, self._places)

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`, each with buffers of its own."""
        left = [mx.contiguous(array[..., :at, :]) for array in self._arrays]
        right = [mx.contiguous(array[..., at:, :]) for array in self._arrays]
        mx.eval(left, right)
        self.close()
        return type(self)(left, self._places), type(self)(right, self._places)

    def merge(self, other: Self) -> Self:
        """Merge with the span that follows."""
        pairs = zip(self._arrays, other._arrays, strict=True)
        joined = [mx.concatenate([a, b], axis=-2) for a, b in pairs]
        mx.eval(joined)
        self.close()
        other.close()
        return type(self)(joined, self._places)

    def close(self) -> None:
        """Free the buffers."""
        super().close()
        self._layers = {}


class PackedCheckpoint(Packed):
    """Sliding-window and recurrent state of all layers at one offset. Immutable.

    Args:
        offset: how many tokens it has seen.
        records: what each layer is besides its arrays.
        arrays: `[rows, ...]` each, evaluated.
        places: where each layer's arrays are.
    """

    def __init__(
        self, offset: int, records: Sequence[Record], arrays: Sequence[mx.array], places: Places
    ) -> None:
        super().__init__(arrays, places)
        self._offset = offset
        self._records = list(records)

    @property
    def offset(self) -> int:
        """How many tokens it has seen."""
        return self._offset

    @property
    def records(self) -> list[Record]:
        """What each layer is besides its arrays."""
        return self._records

    def rewinds_to(self, offset: int) -> bool:
        """Whether every layer can restore this earlier offset exactly."""
        return all(record.rewinds_to(offset) for record in self._records)

    def restore_all(self, offset: int) -> list[Any]:
        """Make the live caches of all layers, at `offset`."""
        return [
            record.restore(list(_views(self._arrays, place)), offset)
            for record, place in zip(self._records, self._places, strict=True)
        ]


def pack_suffix(layers: Sequence[Tensors]) -> PackedSpan:
    """Pack the suffixes of all token-addressable layers."""
    return PackedSpan(*pack([list(tensors) for tensors in layers]))


def pack(layers: list[list[mx.array]]) -> tuple[list[mx.array], Places]:
    """Put arrays of one shape and type together, each in buffers of its own, evaluated.

    Args:
        layers: for each layer its arrays, `[1, ...]` each.
    """
    groups: dict[tuple[Any, ...], list[mx.array]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    places = []
    for arrays in layers:
        place = []
        for array in arrays:
            key = (*array.shape, array.dtype)
            group = groups.setdefault(key, [])
            place.append((numbers.setdefault(key, len(numbers)), len(group)))
            group.append(array)
        places.append(tuple(place))
    packed = [mx.contiguous(mx.concatenate(group, axis=0)) for group in groups.values()]
    mx.eval(packed)
    return packed, tuple(places)


def _views(arrays: Sequence[mx.array], place: tuple[tuple[int, int], ...]) -> Tensors:
    return tuple(arrays[number][row : row + 1] for number, row in place)
