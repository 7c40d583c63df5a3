"""A layer's token-addressable state: a prefix that is only read, and a suffix that grows.

Stands where mlx-lm puts a `KVCache` (or a `QuantizedKVCache`), and answers what its models
ask of one: `offset`, `make_mask`, `update_and_fetch`, `keys_and_values`.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, create_attention_mask

from ..memory_profile import GROWTH
from ..params import KVQuantization
from .spans import SpanRun, Tensors


class LayerPrefix(Sequence[Tensors]):
    """One layer of some runs. Holds no array: each read looks up where the tokens are now.

    Args:
        runs: in order.
        index: the layer's number among those that spans hold.
    """

    def __init__(self, runs: Sequence[SpanRun], index: int) -> None:
        self._runs = runs
        self._index = index

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [run.layer(self._index) for run in self._runs[number]]
        return self._runs[number].layer(self._index)


class TokenLayerCache:
    """Prefix and suffix of one layer.

    The prefix is never written and never joined with the suffix: `update_and_fetch` joins them
    lazily, for models that need one piece. Attention that reads the segments one by one (see
    `attention.binding`) leaves that uncomputed.

    Attributes:
        prefix: segments that are read, oldest first; empty once the suffix has all tokens.
        suffix: mlx-lm's own cache, for the tokens after the prefix.
        poison_joined: joined keys and values are NaNs, which shows if the model reads them.

    Args:
        suffix: see above.
        prefix: see above.
        length: tokens of the prefix; None to count them.
    """

    def __init__(self, suffix: Any, prefix: Sequence[Tensors], length: int | None = None) -> None:
        self.suffix = suffix
        self.poison_joined = False
        self._contiguous = False  # the suffix has all tokens
        self._copied = 0  # tokens of a contiguous suffix that are leased, too
        self._fetched: Any = None
        self.set_prefix(prefix, length)

    def set_prefix(self, prefix: Sequence[Tensors], length: int | None = None) -> None:
        """Read the prefix from other segments: the same tokens, cut or merged elsewhere."""
        if length is None:
            length = sum(tensors[0].shape[-2] for tensors in prefix)
        if self._contiguous:
            self._copied = length
        else:
            self.prefix, self._prefix_length = prefix, length

    def make_contiguous(self) -> None:
        """Copy the prefix and the suffix into one new suffix, with room for more tokens.

        A suffix that has all tokens stays as it is.
        """
        self._contiguous = True
        if not self._prefix_length:
            return
        held, room = self.offset, GROWTH - self.offset % GROWTH
        parts = [*self.prefix, *([] if self.suffix.empty() else [self._all_of_suffix()])]
        joined = [
            mx.concatenate([*tensors, _room(tensors[0], room)], axis=-2)
            for tensors in zip(*parts, strict=True)
        ]
        mx.eval(joined)
        self.suffix = _like(self.suffix)
        self.suffix.keys, self.suffix.values = _pair(tuple(joined))
        self.suffix.offset = held
        self._copied, self._prefix_length, self.prefix = self._prefix_length, 0, ()
        self._fetched = None

    def drop_oldest(self, tokens: int) -> None:
        """Drop the suffix's first tokens after the prefix, which a longer prefix has.

        Call `set_prefix` next. A suffix that has all tokens keeps them.
        """
        if self._contiguous:
            return
        kept = tuple(tensor[..., tokens:, :] for tensor in self.suffix_tensors())
        self.suffix = _like(self.suffix)
        self._fetched = None
        if kept[0].shape[-2]:
            self.begin_suffix(tuple(map(mx.contiguous, kept)))

    @property
    def offset(self) -> int:
        """Tokens held: the position of the next one."""
        return self._prefix_length + int(self.suffix.offset)

    @property
    def keys(self) -> Any:
        """The suffix's keys, spare room included; some models order their work by them."""
        return self.suffix.keys

    @keys.setter
    def keys(self, value: Any) -> None:
        self.suffix.keys = value

    @property
    def values(self) -> Any:
        """The suffix's values, spare room included."""
        return self.suffix.values

    @values.setter
    def values(self, value: Any) -> None:
        self.suffix.values = value

    @property
    def state(self) -> Any:
        """The suffix's arrays, to evaluate."""
        return self.suffix.keys, self.suffix.values

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask that mlx-lm's `KVCache` would make at this offset."""
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append to the suffix; return keys and values of all tokens."""
        self._fetched = None  # a view of the suffix would make the write a copy
        self._fetched = self._whole(_flat(self.suffix.update_and_fetch(keys, values)))
        return self._fetched

    def begin_suffix(self, tensors: Tensors) -> None:
        """Make these tokens the suffix, which is empty. They are not copied."""
        self.suffix.keys, self.suffix.values = _pair(tensors)
        self.suffix.offset = tensors[0].shape[-2]

    def keys_and_values(self) -> Any:
        """Keys and values of all tokens, without writing."""
        return self._whole(None if self.suffix.empty() else self._all_of_suffix())

    def segments(self, keys: Any) -> list[Tensors] | None:
        """Prefix and suffix one by one, if `keys` is the array fetched last; else None.

        Drops the fetched arrays: the join would stay in memory, for all layers at once, and
        the next write would not be in place.
        """
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched[0] is not keys:
            return None
        return [*self.prefix, self._all_of_suffix()]

    def drop_fetched(self) -> None:
        """Drop the fetched arrays, which attention of the model's own does not."""
        self._fetched = None

    def empty(self) -> bool:
        """True if it holds no token."""
        return self.offset == 0

    def suffix_tensors(self) -> Tensors:
        """The tokens after the leased ones, without spare room."""
        return tuple(tensor[..., self._copied :, :] for tensor in self._all_of_suffix())

    @property
    def has_suffix(self) -> bool:
        """True if it holds tokens after the leased ones."""
        return bool(self.suffix.offset > self._copied)

    def _all_of_suffix(self) -> Tensors:
        return _flat(self.suffix.keys_and_values())

    def _whole(self, suffix: Tensors | None) -> Any:
        parts = self.prefix if suffix is None else [*self.prefix, suffix]
        if len(parts) == 1:
            return _pair(parts[0])
        joined = tuple(mx.concatenate(list(p), axis=-2) for p in zip(*parts, strict=True))
        if self.poison_joined:
            joined = tuple(mx.full(j.shape, float("nan")) for j in joined)
        return _pair(joined)


class QuantizedTokenLayerCache(TokenLayerCache):
    """The same for a quantised layer; mlx-lm picks its attention by the attribute `bits`."""

    @property
    def quantization(self) -> KVQuantization:
        """Of keys and values."""
        return KVQuantization(self.bits, self.group_size)

    @property
    def bits(self) -> int:
        """Bits of one quantised value."""
        return int(self.suffix.bits)

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return int(self.suffix.group_size)


def token_layer_cache(
    like: Any, prefix: Sequence[Tensors], length: int | None = None
) -> TokenLayerCache:
    """Make the state of one layer, with an empty suffix, in the place of mlx-lm's `like`."""
    kind = QuantizedTokenLayerCache if type(like) is QuantizedKVCache else TokenLayerCache
    return kind(_like(like), prefix, length)


def _like(cache: Any) -> Any:
    """An empty cache of the same kind."""
    if type(cache) is QuantizedKVCache:
        return QuantizedKVCache(group_size=cache.group_size, bits=cache.bits)
    return KVCache()


def _room(like: mx.array, tokens: int) -> mx.array:
    return mx.zeros((*like.shape[:-2], tokens, like.shape[-1]), like.dtype)


def _pair(tensors: Tensors) -> Any:
    """Keys and values as mlx-lm's caches return them: two arrays, or two quantised triples."""
    half = len(tensors) // 2
    return tensors if half == 1 else (tensors[:half], tensors[half:])


def _flat(pair: Any) -> Tensors:
    keys, values = pair
    if isinstance(keys, mx.array):
        return keys, values
    return (*keys, *values)
