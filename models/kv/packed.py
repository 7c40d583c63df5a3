"""Stored state: packed, immutable, detached from what made it.

Arrays of one shape become a few arrays, layers first, because Metal allows 499,000 buffers in a
process. Spans are views of such arrays (see `storage`); a checkpoint has arrays of its own.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from .non_trimmable import Record
from .span_run import SpanRun
from .storage import Places, Storage, copied
from .token_layer import Tensors, TokenParts, in_one

_PARTS = 8
"""Arrays that the tensors of one shape become in a span, at most. Files on disk have as many: spans
that are joined have their tensors in the same arrays."""


class PackedSpan:
    """Token-addressable state of consecutive tokens, all layers: a view of a storage.

    What it holds does not change; where it lies does, as others close their views of the storage.

    Attributes:
        length: how many tokens.

    Args:
        storage: where they are.
        start: the first of them there.
        length: as above; all that follow, if it is None.
    """

    def __init__(self, storage: Storage, start: int = 0, length: int | None = None) -> None:
        self._storage: Storage | None = storage
        self._start = start
        self.length = storage.length - start if length is None else length
        storage.add(self)

    @property
    def storage(self) -> Storage:
        """Where it lies.

        Raises:
            ValueError: it was closed, cut or merged.
        """
        if self._storage is None:
            raise ValueError("a span was used after it was given away")
        return self._storage

    @property
    def start(self) -> int:
        """Where it begins in its storage."""
        return self._start

    @property
    def stop(self) -> int:
        """Where it ends in its storage."""
        return self._start + self.length

    @property
    def arrays(self) -> list[mx.array]:
        """The packed arrays; slices, where it is a part of its storage."""
        return self.storage.arrays(self.start, self.stop)

    @property
    def places(self) -> Places:
        """Where each layer's tensors are."""
        return self.storage.places

    @property
    def nbytes(self) -> int:
        """What it takes in memory: its share of the storage."""
        return 0 if self._storage is None else self._storage.token_bytes * self.length

    @property
    def buffers(self) -> int:
        """In how many allocations: the storage's, counted by its first view."""
        storage = self._storage
        return storage.buffers if storage is not None and storage.first == self._start else 0

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[1, heads, tokens, size]` each, without a copy."""
        return self.storage.tensors(index, self.start, self.stop)

    def adjoins(self, other: Self) -> bool:
        """Whether another span is what follows in the same storage."""
        return self.storage is other.storage and self.stop == other.start

    def copy(self, start: int, stop: int) -> Self:
        """Copy some of its tokens."""
        return type(self)(copied(self.storage, self.start + start, self.start + stop))

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`: views of the same storage."""
        storage = self._leave()
        left = type(self)(storage, self.start, at)
        return left, type(self)(storage, self.start + at, self.length - at)

    def merge(self, other: Self) -> Self:
        """Become one with the span that follows; a copy, unless that adjoins."""
        if not self.adjoins(other):
            self.join([other])
        storage = self._leave()
        other._leave()
        return type(self)(storage, self.start, self.length + other.length)

    def join(self, following: Sequence[Self]) -> None:
        """Lie in one new storage with the spans that follow. What others view is copied, too."""
        spans = [self, *following]
        packed = zip(*[span.arrays for span in spans], strict=True)
        # To put one slice together is to have a slice, which keeps all that it is of.
        arrays = [mx.contiguous(mx.concatenate(list(parts), axis=-2)) for parts in packed]
        mx.eval(arrays)
        storage, start = Storage(arrays, self.places), 0
        left = {id(span.storage): span.storage for span in spans}
        for span in spans:
            span.move(storage, start)
            start += span.length
        for old in left.values():
            old.trim()

    def move(self, storage: Storage, start: int) -> None:
        """Have the same tokens in another storage from now on."""
        self._leave()
        self._storage, self._start = storage, start
        storage.add(self)

    def close(self, *, trim: bool = True) -> None:
        """Give it back. Idempotent.

        Args:
            trim: free its bytes at once: what others view of the storage is copied.
        """
        if self._storage is not None:
            storage = self._leave()
            if trim:
                storage.trim()

    def _leave(self) -> Storage:
        storage = self.storage
        storage.remove(self)
        self._storage = None
        return storage


def runs_of(spans: Sequence[PackedSpan]) -> list[SpanRun]:
    """Find which of some consecutive spans are neighbours in one storage: they are read as one."""
    runs: list[list[PackedSpan]] = []
    for span in spans:
        if runs and runs[-1][-1].adjoins(span):
            runs[-1].append(span)
        else:
            runs.append([span])
    return [spans[0].storage.run(spans[0].start, spans[-1].stop) for spans in runs]


class LayerPrefix(Sequence[Tensors]):
    """One layer of some runs. Holds no array itself: it is looked up where the spans lie now.

    Args:
        runs: in order.
        index: the layer's number among those that spans hold.
    """

    def __init__(self, runs: Sequence[SpanRun], index: int) -> None:
        self._runs = runs
        self._index = index

    def __len__(self) -> int:
        """How many segments there are."""
        return len(self._runs)

    def __getitem__(self, number: Any) -> Any:
        """One segment, or those of a slice."""
        if isinstance(number, slice):
            return [run.layer(self._index) for run in self._runs[number]]
        return self._runs[number].layer(self._index)


class PackedCheckpoint:
    """Sliding-window and recurrent state of all layers at one offset. Immutable.

    Args:
        offset: how many tokens it has seen.
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
        """What it takes in memory."""
        return sum(array.nbytes for array in self._arrays)

    @property
    def buffers(self) -> int:
        """In how many allocations."""
        return len(self._arrays)

    def close(self) -> None:
        """Free the buffers."""
        self._arrays = []

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


def pack_suffix(layers: Sequence[Sequence[TokenParts]]) -> PackedSpan:
    """Pack the suffixes of all token-addressable layers.

    Args:
        layers: for each layer its tensors.
    """
    groups, places = _grouped(layers, _PARTS)
    packed = _concatenated(groups)
    mx.eval(packed)
    return PackedSpan(Storage(packed, places))


def pack(layers: list[list[mx.array]]) -> tuple[list[mx.array], Places]:
    """Put arrays of one shape and type together, in a buffer of their own, evaluated.

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
    """Say which tensors become one array, those of one shape `most` arrays, and where each is."""
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
