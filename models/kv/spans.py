"""Spans: the keys and values of consecutive tokens, as views of storages.

Invariants:

1. A storage holds consecutive tokens of all layers. Nothing writes to it.
2. A span is a view of one storage, and keeps it in memory. Views of a storage do not overlap.
3. Cutting a span copies nothing: both parts are views of the same storage.
4. A storage that has tokens without an open view is trimmed: the viewed ones are copied into
   storages of their own, and the old bytes are freed.
5. A run is read, and keeps nothing in memory. It follows its tokens into another storage.

Tensors of one shape are packed into a few arrays, layers first: Metal allows a process 499,000
buffers.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Self
from weakref import WeakSet, WeakValueDictionary

import mlx.core as mx

Tensors = tuple[mx.array, ...]
"""Consecutive tokens of one layer: `(keys, values)`, each `[1, heads, tokens, size]`, or the six
arrays of a quantised pair."""

TokenParts = Sequence[mx.array]
"""One of these tensors, as parts that follow each other."""

Places = tuple[tuple[tuple[int, int], ...], ...]
"""For each layer, for each of its tensors: the packed array, and the row in it."""

_PARTS = 8
"""Arrays that the tensors of one shape become in a span, at most. Files on disk have as many, and
spans are joined array by array."""


class Storage:
    """State of consecutive tokens, all layers, in a few arrays.

    References to views and runs are weak: they hold the storage.

    Attributes:
        length: number of tokens.
        places: of each layer's tensors.
        loan: set by the cache while another thread reads the arrays, which stay in memory then.

    Args:
        arrays: `[rows, heads, tokens, size]` each, evaluated, each with a buffer of its own.
        places: see above.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places) -> None:
        self._arrays = list(arrays)
        self._views: WeakSet[PackedSpan] = WeakSet()
        self._runs: WeakValueDictionary[tuple[int, int], SpanRun] = WeakValueDictionary()
        self._first: int | None = None  # start of the first view, once computed
        self.length = int(arrays[0].shape[-2])
        self.places = places
        self.loan: Any = None

    # -- the arrays --------------------------------------------------------------------

    def tensors(self, index: int, start: int, stop: int) -> Tensors:
        """One layer's tensors of tokens `[start, stop)`, `[1, heads, tokens, size]`, not copied.

        Raises:
            ValueError: the storage was freed.
        """
        if not self._arrays:
            raise ValueError("the state that is read was freed")
        return tuple(
            self._arrays[number][row : row + 1, :, start:stop] for number, row in self.places[index]
        )

    def arrays(self, start: int, stop: int) -> list[mx.array]:
        """The packed arrays of tokens `[start, stop)`; slices, unless that is the whole storage."""
        whole = stop - start == self.length
        return [array if whole else array[..., start:stop, :] for array in self._arrays]

    def free(self) -> None:
        """Drop the arrays. No view may be open."""
        self._arrays = []
        for run in self._runs.values():
            run.drop_slices()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return sum(array.nbytes for array in self._arrays) // self.length

    @property
    def buffers(self) -> int:
        """Number of allocations."""
        return len(self._arrays)

    # -- views and runs ----------------------------------------------------------------

    def add(self, view: "PackedSpan") -> None:
        """Register an open view."""
        self._views.add(view)
        self._first = None

    def remove(self, view: "PackedSpan") -> None:
        """Unregister a closed view. Its tokens stay in memory until `trim`."""
        self._views.discard(view)
        self._first = None

    @property
    def views(self) -> "list[PackedSpan]":
        """The open views, in order."""
        return sorted(self._views, key=lambda view: view.start)

    @property
    def first(self) -> int:
        """Start of the first view, which counts the buffers."""
        if self._first is None:
            self._first = min((view.start for view in self._views), default=0)
        return self._first

    def run(self, start: int, stop: int) -> "SpanRun":
        """The run of tokens `[start, stop)`: one object as long as anything refers to it."""
        run = self._runs.get((start, stop))
        return SpanRun(self, start, stop) if run is None else run

    def watch(self, run: "SpanRun") -> None:
        """Register a run, which then moves with its tokens."""
        self._runs[run.start, run.stop] = run

    def trim(self) -> None:
        """Free tokens without a view: copy the rest, adjacent views into one storage."""
        kept: list[list[PackedSpan]] = []
        for view in self.views:
            if kept and kept[-1][-1].stop == view.start:
                kept[-1].append(view)
            else:
                kept.append([view])
        if [(views[0].start, views[-1].stop) for views in kept] == [(0, self.length)]:
            return
        copies = [copied(self, views[0].start, views[-1].stop) for views in kept]
        for views, storage in zip(kept, copies, strict=True):
            start, stop = views[0].start, views[-1].stop
            read = [run for run in self._runs.values() if start <= run.start <= run.stop <= stop]
            for view in views:
                view.move(storage, view.start - start)
            for run in read:
                run.move(storage, run.start - start)
        self.free()


def copied(storage: Storage, start: int, stop: int) -> Storage:
    """Copy tokens `[start, stop)` of a storage into a new one."""
    arrays = [mx.contiguous(array) for array in storage.arrays(start, stop)]
    mx.eval(arrays)
    return Storage(arrays, storage.places)


class PackedSpan:
    """State of consecutive tokens, all layers: an open view of a storage.

    The tokens stay the same. The storage may change when other views of it are closed.

    Attributes:
        start: its first token in the storage.
        length: number of tokens.

    Args:
        storage: with the tokens.
        start: see above.
        length: see above; None for all that follow.
    """

    def __init__(self, storage: Storage, start: int = 0, length: int | None = None) -> None:
        self._storage: Storage | None = storage
        self.start = start
        self.length = storage.length - start if length is None else length
        storage.add(self)

    @property
    def storage(self) -> Storage:
        """The storage that it views.

        Raises:
            ValueError: the span was closed, cut or merged.
        """
        if self._storage is None:
            raise ValueError("a span was used after it was given away")
        return self._storage

    @property
    def stop(self) -> int:
        """One after its last token in the storage."""
        return self.start + self.length

    @property
    def arrays(self) -> list[mx.array]:
        """The packed arrays; slices, unless the span is the whole storage."""
        return self.storage.arrays(self.start, self.stop)

    @property
    def places(self) -> Places:
        """The place of each layer's tensors in `arrays`."""
        return self.storage.places

    @property
    def nbytes(self) -> int:
        """Bytes of its tokens; 0 once it is closed."""
        return 0 if self._storage is None else self._storage.token_bytes * self.length

    @property
    def buffers(self) -> int:
        """The storage's allocations if this is its first view, else 0."""
        storage = self._storage
        return storage.buffers if storage is not None and storage.first == self.start else 0

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, without a copy."""
        return self.storage.tensors(index, self.start, self.stop)

    def adjoins(self, other: Self) -> bool:
        """True if `other` follows in the same storage."""
        return self.storage is other.storage and self.stop == other.start

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`, without a copy. The span itself is closed."""
        storage = self._leave()
        left = type(self)(storage, self.start, at)
        return left, type(self)(storage, self.start + at, self.length - at)

    def merge(self, other: Self) -> Self:
        """Become one with the span that follows; a copy, unless it adjoins. Closes both."""
        if not self.adjoins(other):
            self.join([other])
        storage = self._leave()
        other._leave()
        return type(self)(storage, self.start, self.length + other.length)

    def join(self, following: Sequence[Self]) -> None:
        """Move into one new storage with the spans that follow.

        Other views of the old storages are copied into storages of their own.
        """
        spans = [self, *following]
        packed = zip(*[span.arrays for span in spans], strict=True)
        # `concatenate` of one slice is that slice, and keeps its whole array.
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
        """View the same tokens in another storage, from `start`."""
        self._leave()
        self._storage, self.start = storage, start
        storage.add(self)

    def close(self, *, trim: bool = True) -> None:
        """Close the view. Idempotent.

        Args:
            trim: free its bytes at once. Other views of the storage are copied for that.
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


class SpanRun:
    """Consecutive tokens of one storage, read as one segment.

    Attributes:
        storage: with the tokens.
        start: its first token there.
        length: number of tokens.
    """

    def __init__(self, storage: Storage, start: int, stop: int) -> None:
        self.length = stop - start
        self._layers: dict[int, Tensors] = {}
        self.move(storage, start)

    @property
    def stop(self) -> int:
        """One after the last token."""
        return self.start + self.length

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, not copied: the same object until the tokens move.

        Raises:
            ValueError: the storage was freed.
        """
        if index not in self._layers:
            self._layers[index] = self.storage.tensors(index, self.start, self.stop)
        return self._layers[index]

    def between(self, start: int, stop: int) -> "SpanRun":
        """The run of its tokens `[start, stop)`."""
        return self.storage.run(self.start + start, self.start + stop)

    def move(self, storage: Storage, start: int) -> None:
        """Read the same tokens in another storage, from `start`."""
        self.drop_slices()
        self.storage, self.start = storage, start
        storage.watch(self)

    def drop_slices(self) -> None:
        """Drop all references to arrays until the next read."""
        self._layers = {}


def runs_of(spans: Sequence[PackedSpan]) -> list[SpanRun]:
    """Join consecutive spans that are adjacent in one storage into runs."""
    runs: list[list[PackedSpan]] = []
    for span in spans:
        if runs and runs[-1][-1].adjoins(span):
            runs[-1].append(span)
        else:
            runs.append([span])
    return [spans[0].storage.run(spans[0].start, spans[-1].stop) for spans in runs]


def runs_between(spans: Sequence[PackedSpan], start: int, stop: int) -> list[SpanRun]:
    """The runs of tokens `[start, stop)` of consecutive spans, of which the first begins at 0."""
    found, begin = [], 0
    for run in runs_of(spans):
        first, last = max(start - begin, 0), min(stop - begin, run.length)
        if first < last:
            found.append(run.between(first, last))
        begin += run.length
    return found


# -- packing -----------------------------------------------------------------------------


def in_one(parts: TokenParts) -> mx.array:
    """A tensor in one piece; a copy, if it has several parts."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)


def pack_suffix(layers: Sequence[Sequence[TokenParts]]) -> PackedSpan:
    """Copy the tensors of all token-addressable layers, `layers[i]` of layer i, into a new span."""
    return PackedSpan(Storage(*pack(layers, _PARTS)))


def pack(layers: Sequence[Sequence[TokenParts]], most: int = 1) -> tuple[list[mx.array], Places]:
    """Concatenate tensors of one shape and type along their first axis, and evaluate that.

    Args:
        layers: for each layer its tensors, `[1, ...]` each.
        most: arrays that tensors of one shape become at most, each with a buffer of its own.
    """
    forms = [
        [(*[part.shape for part in parts], parts[0].dtype) for parts in each] for each in layers
    ]
    alike = Counter(form for each in forms for form in each)
    seen = Counter[Any]()
    groups: dict[Any, list[TokenParts]] = {}
    numbers: dict[Any, int] = {}
    places = []
    for tensors, each in zip(layers, forms, strict=True):
        place = []
        for tensor, form in zip(tensors, each, strict=True):
            key = (form, seen[form] * most // alike[form])
            seen[form] += 1
            group = groups.setdefault(key, [])
            place.append((numbers.setdefault(key, len(numbers)), len(group)))
            group.append(tensor)
        places.append(tuple(place))
    packed = [mx.contiguous(mx.concatenate([*map(in_one, g)], axis=0)) for g in groups.values()]
    mx.eval(packed)
    return packed, tuple(places)
