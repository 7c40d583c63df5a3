"""A stack's state: live while a sequence runs, packed while it is stored.

Every cache class of mlx-lm falls under one of two kinds. `KVCache` and `QuantizedKVCache` are
token-addressable and live as `TrunkState`s; `RotatingKVCache`, `ArraysCache` and
`ChunkedKVCache` restore as a whole only (`ChunkedKVCache` says that it can be trimmed, but its
front is gone). A `CacheList` is the sum of its parts. Anything else is refused at load.

Stored state is packed: arrays of one shape become one array, layers first, because Metal
allows 499,000 buffers in a process. Each packed array has a buffer of its own, so its bytes
are freed when it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from .errors import UnsupportedCacheError
from .trunk import Tensors, TrunkState, trunk_state
from .whole import Record, capture

_ADDRESSABLE = (KVCache, QuantizedKVCache)
_WHOLE = (RotatingKVCache, ArraysCache, ChunkedKVCache)

Places = tuple[tuple[tuple[int, int], ...], ...]
"""For each layer, for each of its tensors: the packed array, and the row in it."""


class PackedSpan:
    """Token-addressable state of consecutive tokens, all layers. Immutable.

    Args:
        arrays: `[rows, heads, tokens, size]` each, evaluated.
        places: where each layer's tensors are.
    """

    def __init__(self, arrays: Sequence[mx.array], places: Places) -> None:
        self._arrays = list(arrays)
        self._places = places
        self._layers: dict[int, Tensors] = {}

    @property
    def length(self) -> int:
        """How many tokens."""
        return int(self._arrays[0].shape[-2])

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(array.nbytes for array in self._arrays)

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[1, heads, tokens, size]` each, as views.

        The same object at every call: sequences that lease a span know by it that they share.
        """
        if index not in self._layers:
            self._layers[index] = _views(self._arrays, self._places[index])
        return self._layers[index]

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`, each with buffers of its own."""
        left = [mx.contiguous(array[..., :at, :]) for array in self._arrays]
        right = [mx.contiguous(array[..., at:, :]) for array in self._arrays]
        mx.eval(left, right)
        self.close()
        return type(self)(left, self._places), type(self)(right, self._places)

    def merge(self, other: Self) -> Self:
        """Join with the span that follows."""
        pairs = zip(self._arrays, other._arrays, strict=True)
        joined = [mx.concatenate([a, b], axis=-2) for a, b in pairs]
        mx.eval(joined)
        self.close()
        other.close()
        return type(self)(joined, self._places)

    def close(self) -> None:
        """Free the buffers."""
        self._arrays = []
        self._layers = {}


class WholeCheckpoint:
    """Sliding-window and recurrent state of all layers at one offset. Immutable.

    Args:
        offset: how many tokens it has seen.
        records: what each leaf is besides its arrays.
        arrays: `[rows, ...]` each, evaluated.
        places: where each leaf's arrays are.
    """

    def __init__(
        self, offset: int, records: Sequence[Record], arrays: Sequence[mx.array], places: Places
    ) -> None:
        self._offset = offset
        self._records = list(records)
        self._arrays = list(arrays)
        self._places = places

    @property
    def offset(self) -> int:
        """How many tokens it has seen."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(array.nbytes for array in self._arrays)

    def rewinds_to(self, offset: int) -> bool:
        """Whether every leaf can restore this earlier offset exactly."""
        return all(record.rewinds_to(offset) for record in self._records)

    def restore(self, index: int, offset: int) -> Any:
        """Make the live cache of one leaf, at `offset`."""
        arrays = list(_views(self._arrays, self._places[index]))
        return self._records[index].restore(arrays, offset)

    def close(self) -> None:
        """Free the buffers."""
        self._arrays = []


class LiveStates:
    """The state of one running sequence.

    Attributes:
        caches: what the model is called with, one entry a layer.
    """

    def __init__(self, caches: list[Any], offset: int) -> None:
        self.caches = caches
        self._offset = offset
        leaves = list(_leaves(caches))
        self._addressable = [leaf for leaf in leaves if isinstance(leaf, TrunkState)]
        self._whole = [leaf for leaf in leaves if not isinstance(leaf, TrunkState)]

    @property
    def offset(self) -> int:
        """How many tokens it has seen."""
        return self._offset

    def advanced(self, tokens: int) -> None:
        """Count tokens that the model was just called with."""
        self._offset += tokens

    def arrays(self) -> list[Any]:
        """Every array of the state, to evaluate."""
        return [cache.state for cache in self.caches]

    def set_trunk(self, spans: Sequence[PackedSpan]) -> None:
        """Read the trunk from these spans: the same tokens, cut or joined elsewhere."""
        for index, leaf in enumerate(self._addressable):
            leaf.set_trunk([span.layer(index) for span in spans])

    def drop_tail(self, spans: Sequence[PackedSpan]) -> None:
        """Start new tails after the old ones were sealed and are part of `spans`."""
        for leaf in self._addressable:
            leaf.drop_tail()
        self.set_trunk(spans)

    def capture(self) -> WholeCheckpoint:
        """Copy the whole-state leaves at the present offset."""
        captured = [capture(leaf, self._offset) for leaf in self._whole]
        arrays, places = _pack([tensors for _, tensors in captured])
        return WholeCheckpoint(self._offset, [record for record, _ in captured], arrays, places)

    def seal(self) -> PackedSpan | None:
        """Pack the tails' tokens; None where there are none."""
        held = [leaf for leaf in self._addressable if not leaf.tail.empty()]
        if not held:
            return None
        return PackedSpan(*_pack([list(leaf.tail_tensors()) for leaf in held]))


class LayerStack:
    """What a model's layers keep, and how to make it live.

    Args:
        model: mlx-lm's model.

    Raises:
        UnsupportedCacheError: a layer keeps its state in a class that is not known here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        leaves = list(_leaves(make_prompt_cache(model)))
        unknown = [leaf for leaf in leaves if type(leaf) not in _ADDRESSABLE + _WHOLE]
        if unknown:
            name = type(unknown[0]).__name__
            raise UnsupportedCacheError(f"the model keeps state in {name}, which umbel cannot save")
        self.has_spans = any(type(leaf) in _ADDRESSABLE for leaf in leaves)
        self.has_checkpoints = any(type(leaf) in _WHOLE for leaf in leaves)

    def open(
        self,
        offset: int = 0,
        spans: Sequence[PackedSpan] = (),
        checkpoint: WholeCheckpoint | None = None,
    ) -> LiveStates:
        """Make the live state of a sequence that resumes at `offset`.

        Nothing is copied: spans are read where they lie.

        Args:
            offset: tokens already computed; 0 starts from nothing.
            spans: the state of all of them, in order, if the stack is token-addressable.
            checkpoint: whole state that restores `offset`, if the stack has such.
        """
        fresh = make_prompt_cache(self._model)
        addressable = whole = 0

        def revive(cache: Any) -> Any:
            nonlocal addressable, whole
            if type(cache) is CacheList:
                return CacheList(*[revive(part) for part in cache.caches])
            if type(cache) in _ADDRESSABLE:
                addressable += 1
                return trunk_state(cache, [span.layer(addressable - 1) for span in spans])
            whole += 1
            return cache if checkpoint is None else checkpoint.restore(whole - 1, offset)

        return LiveStates([revive(cache) for cache in fresh], offset)


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _leaves(cache.caches)
        else:
            yield cache


def _pack(leaves: list[list[mx.array]]) -> tuple[list[mx.array], Places]:
    """Join arrays of one shape and type, each in buffers of its own, evaluated.

    Args:
        leaves: for each leaf its arrays, `[1, ...]` each.
    """
    groups: dict[tuple[Any, ...], list[mx.array]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    places = []
    for arrays in leaves:
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
