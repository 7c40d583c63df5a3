"""A layer's token-addressable state: a leased trunk that is only read, and a tail of its own.

Stands where mlx-lm puts a `KVCache` (or a `QuantizedKVCache`), and answers what its models
ask of one: `offset`, `make_mask`, `update_and_fetch`, `keys_and_values`.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, create_attention_mask

Tensors = tuple[mx.array, ...]
"""One segment of one layer: `(keys, values)`, each `[1, heads, tokens, size]`, or the six
arrays of a quantised pair."""


_ROOM = 256  # tokens by which mlx-lm's caches grow


class TrunkState:
    """Trunk and tail of one layer.

    The trunk is never written and never joined with the tail: what `update_and_fetch`
    returns is joined lazily, for models that need it in one piece. Attention that reads the
    segments one by one (see `attention`) leaves that join uncomputed.

    Attributes:
        trunk: leased segments, oldest first; empty once they were joined.
        tail: mlx-lm's own cache, for the tokens after the trunk.
        withholds: give out NaNs in the place of what is joined, which shows who reads it.
    """

    def __init__(self, tail: Any, trunk: Sequence[Tensors]) -> None:
        self.tail = tail
        self._joined = 0  # tokens of the tail that are a copy of the trunk
        self._fetched: Any = None
        self.withholds = False
        self.set_trunk(trunk)

    def set_trunk(self, trunk: Sequence[Tensors]) -> None:
        """Read the trunk from other segments: the same tokens, cut or joined elsewhere."""
        if self._joined:
            return  # it is read from the copy
        self.trunk = list(trunk)
        self._trunk_length = sum(segment[0].shape[-2] for segment in trunk)

    def join(self) -> None:
        """Copy the trunk into the tail, so that a step reads keys that lie in one piece."""
        if not self.trunk:
            return
        parts = self.trunk if self.tail.empty() else [*self.trunk, self.tail_tensors()]
        held = self.offset
        room = _ROOM - held % _ROOM
        joined = tuple(
            mx.concatenate([*p, _room(p[0], room)], -2) for p in zip(*parts, strict=True)
        )
        self.tail = _like(self.tail)
        self.tail.keys, self.tail.values = _pair(joined)
        self.tail.offset = held
        self._joined, self._trunk_length, self.trunk = self._trunk_length, 0, []
        self._fetched = None

    def drop_tail(self) -> None:
        """Start a new tail; the trunk must hold the old one's tokens by now."""
        self.tail = _like(self.tail)
        self._joined = 0
        self._fetched = None

    @property
    def offset(self) -> int:
        """Tokens held: the position of the next one."""
        return self._trunk_length + int(self.tail.offset)

    @property
    def keys(self) -> Any:
        """The tail's keys, spare room included; some models order their work by them."""
        return self.tail.keys

    @keys.setter
    def keys(self, value: Any) -> None:
        self.tail.keys = value

    @property
    def values(self) -> Any:
        """The tail's values, spare room included."""
        return self.tail.values

    @values.setter
    def values(self, value: Any) -> None:
        self.tail.values = value

    @property
    def state(self) -> Any:
        """The tail's arrays, to evaluate."""
        return self.tail.keys, self.tail.values

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask that mlx-lm's `KVCache` would make at this offset."""
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append to the tail; return keys and values of all tokens."""
        self._fetched = None  # a view of the tail that lives on would make the write a copy
        self._fetched = self._whole(_flat(self.tail.update_and_fetch(keys, values)))
        return self._fetched

    def keys_and_values(self) -> Any:
        """Keys and values of all tokens, without writing."""
        return self._whole(None if self.tail.empty() else self._held())

    def segments(self, keys: Any) -> list[Tensors] | None:
        """Trunk and tail one by one, if `keys` is what was fetched last; else None.

        Lets go of what was fetched: the join would stay in memory, for all layers at once, and
        the next write would not be in place.
        """
        fetched = self.let_go()
        if fetched is None or fetched[0] is not keys:
            return None
        return [*self.trunk, self._held()]

    def let_go(self) -> Any:
        """Forget what was fetched last, and return it."""
        fetched, self._fetched = self._fetched, None
        return fetched

    def empty(self) -> bool:
        """Whether it holds no token."""
        return self.offset == 0

    def tail_tensors(self) -> Tensors:
        """The tail's tokens after the trunk, and nothing of its spare room."""
        return tuple(tensor[..., self._joined :, :] for tensor in self._held())

    @property
    def has_tail(self) -> bool:
        """Whether it holds tokens after the trunk."""
        return bool(self.tail.offset > self._joined)

    def _held(self) -> Tensors:
        return _flat(self.tail.keys_and_values())

    def _whole(self, tail: Tensors | None) -> Any:
        parts = self.trunk if tail is None else [*self.trunk, tail]
        if len(parts) == 1:
            return _pair(parts[0])
        joined = tuple(mx.concatenate(list(p), axis=-2) for p in zip(*parts, strict=True))
        return _pair(
            tuple(mx.full(j.shape, float("nan")) for j in joined) if self.withholds else joined
        )


class QuantizedTrunkState(TrunkState):
    """The same for a quantised layer; mlx-lm picks its attention by the attribute `bits`."""

    @property
    def bits(self) -> int:
        """Bits of one quantised value."""
        return int(self.tail.bits)

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return int(self.tail.group_size)

    def segments(self, keys: Any) -> None:
        """Nothing: quantised segments are read in one piece."""
        del keys
        self.let_go()


def trunk_state(like: Any, trunk: Sequence[Tensors]) -> TrunkState:
    """Make the state of one layer, with an empty tail, in the place of mlx-lm's `like`."""
    kind = QuantizedTrunkState if type(like) is QuantizedKVCache else TrunkState
    return kind(_like(like), trunk)


def _like(cache: Any) -> Any:
    """An empty cache of the same kind."""
    if type(cache) is QuantizedKVCache:
        return QuantizedKVCache(group_size=cache.group_size, bits=cache.bits)
    return KVCache()


def _room(like: mx.array, tokens: int) -> mx.array:
    shape = (*like.shape[:-2], tokens, like.shape[-1])
    return mx.zeros(shape, like.dtype)


def _pair(tensors: Tensors) -> Any:
    """What mlx-lm's caches return: two arrays, or two triples of a quantised layer."""
    half = len(tensors) // 2
    return tensors if half == 1 else (tensors[:half], tensors[half:])


def _flat(pair: Any) -> Tensors:
    keys, values = pair
    if isinstance(keys, mx.array):
        return keys, values
    return (*keys, *values)
