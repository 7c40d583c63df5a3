"""A stack's state while a sequence runs.

Every cache class of mlx-lm falls under one of two kinds. `KVCache` and `QuantizedKVCache` are
token-addressable and live as `TrunkState`s; `RotatingKVCache`, `ArraysCache` and
`ChunkedKVCache` restore as a whole only (`ChunkedKVCache` says that it can be trimmed, but its
front is gone). A `CacheList` is the sum of its parts. Anything else is refused at load.

A state is in one of two forms: caches of its own, which prefill and lone decoding use, or a
row of a batch (see `rows`). It changes over without copying what it leases.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

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
from .spans import PackedSpan, WholeCheckpoint, pack, pack_tail
from .trunk import Tensors, TrunkState, trunk_state
from .whole import capture

_ADDRESSABLE = (KVCache, QuantizedKVCache)
_WHOLE = (RotatingKVCache, ArraysCache, ChunkedKVCache)


class Held(NamedTuple):
    """What something takes in memory.

    Attributes:
        nbytes: its bytes.
        buffers: its allocations.
    """

    nbytes: int
    buffers: int


class Seat(Protocol):
    """A row of a batch, as its state sees it; `rows.Row` is the real one."""

    def tail(self, count: int) -> list[Tensors]:
        """Copy the newest tokens, for each token-addressable layer."""
        ...

    def wholes(self) -> list[Any]:
        """Copy the whole-state layers into caches of mlx-lm's."""
        ...

    def changed(self) -> None:
        """Hear that the leased spans were cut or joined elsewhere."""
        ...

    def sealed(self) -> None:
        """Hear that the newest tokens are part of the trunk now."""
        ...

    def leave(self) -> None:
        """Give the row back."""
        ...


class LiveStates:
    """The state of one running sequence.

    Attributes:
        caches: what the model is called with, one entry a layer; empty while it has a seat.
        seat: its row of a batch, or None.
        spans: what it leases: the state of its first tokens.
        steps_alone: decode steps since it last left a batch.
    """

    def __init__(
        self, stack: "LayerStack", offset: int, spans: Sequence[PackedSpan], caches: list[Any]
    ) -> None:
        self.seat: Seat | None = None
        self.spans = list(spans)
        self.steps_alone = 0
        self._stack = stack
        self._offset = offset
        self._own: list[PackedSpan] = []
        self.caches: list[Any] = []
        self._with_trunks: list[Any] = []  # the same, also while they are in one piece
        self._set_caches(caches)

    @property
    def offset(self) -> int:
        """How many tokens it has seen."""
        return self._offset

    @property
    def trunk(self) -> list[PackedSpan]:
        """All that is read and no longer written: leased spans, and sealed ones of its own."""
        return [*self.spans, *self._own]

    @property
    def tail_length(self) -> int:
        """Tokens after the trunk, whose state still grows."""
        if not self._stack.has_spans:
            return 0
        return self._offset - sum(span.length for span in self.trunk)

    def advanced(self, tokens: int) -> None:
        """Count tokens that the model was just called with."""
        self._offset += tokens
        for leaf in self.addressable:
            leaf.let_go()  # where attention is the model's own, nobody else did

    def detach(self) -> None:
        """Have recurrent layers keep their state only.

        It is the end of what they were computed on, and a slice keeps the whole chunk.
        """
        for leaf in self.wholes:
            if isinstance(leaf, ArraysCache):
                leaf.cache = [None if a is None else mx.contiguous(a) for a in leaf.cache]

    def arrays(self) -> list[Any]:
        """Every array of its own caches, to evaluate."""
        return [cache.state for cache in self.caches]

    @property
    def full(self) -> bool:
        """Whether its own caches grow with the next token."""
        return any(
            leaf.tail.keys is None or leaf.tail.offset >= _rows_of(leaf.tail.keys)
            for leaf in self.addressable[:1]
        )

    @property
    def rings_change(self) -> bool:
        """Whether sliding layers of its own get other arrays with the next token.

        A ring that is as long as its window is written in place.
        """
        return any(
            isinstance(leaf, ChunkedKVCache)
            or leaf.keys is None
            or _rows_of(leaf.keys) > leaf.max_size
            or leaf.offset >= _rows_of(leaf.keys) < leaf.max_size
            for leaf in self.wholes
            if not isinstance(leaf, ArraysCache)
        )

    def held(self) -> Held:
        """What it has of its own, outside of its seat."""
        arrays = flat_arrays(self.arrays())
        return Held(
            sum(array.nbytes for array in arrays) + sum(span.nbytes for span in self._own),
            len(arrays) + sum(span.buffers for span in self._own),
        )

    def set_trunk(self, spans: Sequence[PackedSpan]) -> None:
        """Lease other spans: the same tokens, cut or joined elsewhere."""
        self.spans = list(spans)
        self._read_trunk()

    def drop_tail(self, spans: Sequence[PackedSpan]) -> None:
        """Start new tails after the old ones were sealed and are part of `spans`."""
        self._own = []
        self.spans = list(spans)
        self._start_tails()

    def tail(self) -> list[Tensors]:
        """The tails' tokens, for each token-addressable layer."""
        if self.seat is not None:
            return self.seat.tail(self.tail_length)
        return [leaf.tail_tensors() for leaf in self.addressable if leaf.has_tail]

    def capture(self) -> WholeCheckpoint:
        """Copy the whole-state leaves at the present offset."""
        wholes = self.wholes if self.seat is None else self.seat.wholes()
        captured = [capture(leaf, self._offset) for leaf in wholes]
        arrays, places = pack([tensors for _, tensors in captured])
        return WholeCheckpoint(self._offset, [record for record, _ in captured], arrays, places)

    def seal_tail(self) -> None:
        """Pack the tails' tokens, and read them as part of the trunk from now on.

        Small neighbours are joined: sizes grow geometrically, so a token is copied
        O(log n) times, and a trunk stays a few spans.
        """
        if not self.tail_length:
            return
        self._own.append(pack_tail(self.tail()))
        while len(self._own) > 1 and self._worth_joining(*self._own[-2:]):
            last = self._own.pop()
            self._own[-1] = self._own[-1].merge(last)
        if self.seat is not None:
            self.seat.sealed()
        self._start_tails()

    def _worth_joining(self, before: PackedSpan, last: PackedSpan) -> bool:
        grows = before.length <= 2 * last.length
        return grows and before.length + last.length <= self._stack.longest

    def keep_tail_short(self) -> None:
        """Seal the tail once it is as long as a copy may be: packing it must fit at any time."""
        if self.tail_length >= self._stack.longest:
            self.seal_tail()

    def seal_parts(self) -> list[PackedSpan]:
        """Pack all that it does not lease, in order; none where there is nothing.

        Sealed spans of its own change hands: follow it with `drop_tail`, or use it no more.
        """
        parts = [*self._own, pack_tail(self.tail())] if self.tail_length else self._own
        self._own = []
        return parts

    def seal(self) -> PackedSpan | None:
        """The same in one piece, which copies all of it."""
        parts = self.seal_parts()
        if not parts:
            return None
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.merge(part)
        return whole

    @property
    def joined(self) -> bool:
        """Whether its keys lie in one piece, in a copy of its own."""
        return self.caches is not self._with_trunks

    def join(self) -> None:
        """Copy the trunk, so that a step reads keys that lie in one piece.

        The model is then called with mlx-lm's own caches, which hold all of it.
        """
        if self.joined:
            return
        for leaf in self.addressable:
            leaf.join()
        self.caches = [_in_one_piece(cache) for cache in self._with_trunks]

    def stand_up(self) -> None:
        """Go back from a row of a batch to caches of its own."""
        if self.seat is None:
            return
        self.seal_tail()
        wholes = self.seat.wholes()
        self.close()
        self._set_caches(self._stack.caches(self.trunk, wholes))

    def sit_down(self, seat: Seat) -> None:
        """Live in a row of a batch, which has copied what is its own."""
        self.seat = seat
        self.steps_alone = 0
        self._set_caches([])

    def close(self) -> None:
        """Give a seat back. The state is of no more use. Idempotent."""
        if self.seat is not None:
            self.seat.leave()
            self.seat = None

    def _set_caches(self, caches: list[Any]) -> None:
        leaves = list(leaves_of(caches))
        self.caches = self._with_trunks = caches
        self.addressable: list[TrunkState] = [
            leaf for leaf in leaves if isinstance(leaf, TrunkState)
        ]
        self.wholes: list[Any] = [leaf for leaf in leaves if not isinstance(leaf, TrunkState)]

    def _start_tails(self) -> None:
        for leaf in self.addressable:
            leaf.drop_tail()
        self.caches = self._with_trunks
        self._read_trunk()

    def _read_trunk(self) -> None:
        trunk = self.trunk
        for index, leaf in enumerate(self.addressable):
            leaf.set_trunk([span.layer(index) for span in trunk])
        if self.seat is not None:
            self.seat.changed()


class LayerStack:
    """What a model's layers keep, and how to make it live.

    Attributes:
        longest: tokens up to which a sequence's own segments are joined: what is joined is
            copied.

    Args:
        model: mlx-lm's model.

    Raises:
        UnsupportedCacheError: a layer keeps its state in a class that is not known here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.longest = 1 << 62
        leaves = list(leaves_of(make_prompt_cache(model)))
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
        wholes = None if checkpoint is None else checkpoint.restore_all(offset)
        return LiveStates(self, offset, spans, self.caches(spans, wholes))

    def caches(self, trunk: Sequence[PackedSpan], wholes: Sequence[Any] | None) -> list[Any]:
        """Make what the model is called with.

        Args:
            trunk: what the token-addressable layers read.
            wholes: the other layers' caches in order; None starts them from nothing.
        """
        # No closure that calls itself: that is a cycle, and would keep what is restored.
        spans, rest = count(), None if wholes is None else iter(wholes)
        return [_revived(cache, trunk, spans, rest) for cache in make_prompt_cache(self._model)]


def _revived(
    cache: Any, trunk: Sequence[PackedSpan], numbers: Iterator[int], wholes: Iterator[Any] | None
) -> Any:
    """Put what is restored in the place of one of mlx-lm's caches."""
    if type(cache) is CacheList:
        return CacheList(*[_revived(part, trunk, numbers, wholes) for part in cache.caches])
    if type(cache) in _ADDRESSABLE:
        number = next(numbers)
        return trunk_state(cache, [span.layer(number) for span in trunk])
    return cache if wholes is None else next(wholes)


def _rows_of(keys: Any) -> int:
    array = keys if isinstance(keys, mx.array) else keys[0]  # a quantised layer has three
    return int(array.shape[-2])


def _in_one_piece(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*[_in_one_piece(part) for part in cache.caches])
    return cache.tail if isinstance(cache, TrunkState) else cache


def flat_arrays(nested: Any) -> list[mx.array]:
    """The arrays of a nested structure; what is no array is left out."""
    if isinstance(nested, mx.array):
        return [nested]
    if isinstance(nested, (list, tuple)):
        return [array for part in nested for array in flat_arrays(part)]
    return []


def leaves_of(caches: Iterable[Any]) -> Iterator[Any]:
    """Every cache that is not a list of caches, in the model's order."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from leaves_of(cache.caches)
        else:
            yield cache
