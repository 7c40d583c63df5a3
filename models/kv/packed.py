"""Packing: the tensors of all layers in a few arrays, for spans and checkpoints.

Arrays of one shape become a few arrays, layers first, because Metal allows 499,000 buffers in a
process.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .non_trimmable import Record
from .spans import PackedSpan, Places, Storage
from .token_layer import Tensors, TokenParts, in_one

_PARTS = 8
"""Arrays that the tensors of one shape become in a span, at most. Files on disk have as many, and
spans are joined array by array."""


class PackedCheckpoint:
    """Sliding-window and recurrent state of all layers at one offset. Immutable.

    Args:
        offset: number of tokens before it.
        records: what each layer is besides its arrays.
        arrays: `[rows, ...]` each, evaluated, each with a buffer of its own.
        places: where each layer's arrays are.
    """

    def __init__(
        self, offset: int, records: Sequence[Record], arrays: Sequence[mx.array], places: Places
    ) -> None:
        self._arrays = list(arrays)
        self._places = places
        self._offset = offset
        self._records = list(records)

    @property
    def arrays(self) -> list[mx.array]:
        """The packed arrays."""
        return self._arrays

    @property
    def places(self) -> Places:
        """Where each layer's arrays are."""
        return self._places

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def buffers(self) -> int:
        """Number of allocations."""
        return len(self._arrays)

    def close(self) -> None:
        """Free the buffers."""
        self._arrays = []

    @property
    def offset(self) -> int:
        """Number of tokens before it."""
        return self._offset

    @property
    def records(self) -> list[Record]:
        """What each layer is besides its arrays."""
        return self._records

    def rewinds_to(self, offset: int) -> bool:
        """True if every layer can restore this earlier offset exactly."""
        return all(record.rewinds_to(offset) for record in self._records)

    def restore_all(self, offset: int) -> list[Any]:
        """Make mlx-lm's caches of all layers, at `offset`."""
        return [
            record.restore(list(_views(self._arrays, place)), offset)
            for record, place in zip(self._records, self._places, strict=True)
        ]


def pack_suffix(layers: Sequence[Sequence[TokenParts]]) -> PackedSpan:
    """Copy the tensors of all token-addressable layers, `layers[i]` of layer i, into a new span."""
    groups, places = _grouped(layers, _PARTS)
    packed = _concatenated(groups)
    mx.eval(packed)
    return PackedSpan(Storage(packed, places))


def pack(layers: list[list[mx.array]]) -> tuple[list[mx.array], Places]:
    """Concatenate arrays of one shape and type, each result in a buffer of its own, evaluated.

    Args:
        layers: for each layer its arrays, `[1, ...]` each.
    """
    groups, places = _grouped([[(array,) for array in arrays] for arrays in layers], 1)
    packed = _concatenated(groups)
    mx.eval(packed)
    return packed, places


_Groups = list[list[TokenParts]]
"""Tensors that become one array each."""


def _grouped(layers: Sequence[Sequence[TokenParts]], most: int) -> tuple[_Groups, Places]:
    """Assign each tensor to an array; tensors of one shape become at most `most` arrays."""
    forms = [[_form(tensor) for tensor in tensors] for tensors in layers]
    alike = Counter(form for each in forms for form in each)
    seen = Counter[tuple[Any, ...]]()
    groups: dict[tuple[Any, ...], list[TokenParts]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    places = []
    for tensors, each in zip(layers, forms, strict=True):
        place = []
        for tensor, form in zip(tensors, each, strict=True):
            key = (*form, seen[form] * most // alike[form])
            seen[form] += 1
            group = groups.setdefault(key, [])
            place.append((numbers.setdefault(key, len(numbers)), len(group)))
            group.append(tensor)
        places.append(tuple(place))
    return [*groups.values()], tuple(places)


def _concatenated(groups: _Groups) -> list[mx.array]:
    return [mx.contiguous(mx.concatenate([*map(in_one, g)], axis=0)) for g in groups]


def _form(parts: TokenParts) -> tuple[Any, ...]:
    return (*[part.shape for part in parts], parts[0].dtype)


def _views(arrays: Sequence[mx.array], place: tuple[tuple[int, int], ...]) -> Tensors:
    return tuple(arrays[number][row : row + 1] for number, row in place)
