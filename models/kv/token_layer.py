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

Tensors = tuple[mx.array, ...]
"""One segment of one layer: `(keys, values)`, each `[1, heads, tokens, size]`, or the six
arrays of a quantised pair."""

TokenParts = Sequence[mx.array]
"""One of these tensors, as parts that follow each other."""


class TokenLayerCache:
    """Prefix and suffix of one layer.

    The prefix is never written and never joined with the suffix: what `update_and_fetch`
    returns is joined lazily, for models that need it in one piece. Attention that reads the
    segments one by one (see `attention.binding`) leaves that uncomputed.

    Attributes:
        prefix: segments that are read, oldest first; empty once the suffix has all tokens.
        suffix: mlx-lm's own cache, for the tokens after the prefix.
        withholds: give out NaNs in the place of what is joined, which shows who reads it.
    """

    def __init__(self, suffix: Any, prefix: Sequence[Tensors], length: int | None = None) -> None:
        self.suffix = suffix
        self._contiguous = False  # the suffix has all tokens
        self._copied = 0  # those of them that are leased, too
        self._fetched: Any = None
        self.withholds = False
        self.set_prefix(prefix, length)

    def set_prefix(self, prefix: Sequence[Tensors], length: int | None = None) -> None:
        """Read the prefix from other segments: the same tokens, cut or merged elsewhere.

        Args:
            prefix: the segments.
            length: their tokens; counted where it is not known. To count them looks at each.
        """
        if self._contiguous:  # it is read from the copy
            self._copied = sum(x[0].shape[-2] for x in prefix) if length is None else length
            return
        self.prefix = prefix  # and no array of it: spans may move
        self._prefix_length = sum(x[0].shape[-2] for x in prefix) if length is None else length

    def make_contiguous(self) -> None:
        """Copy the prefix and the suffix into one new suffix, with room for more tokens.

        A suffix that has all tokens stays as it is.
        """
        self._contiguous = True
        if not self._prefix_length:
            return
        held, room = self.offset, GROWTH - self.offset % GROWTH
        parts = [*self.prefix, *([] if self.suffix.empty() else [self.all_held()])]
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

    def forget(self, tokens: int) -> None:
        """Drop the suffix's oldest tokens after the prefix: a longer prefix has them.

        Call `set_prefix` next. A suffix that has all tokens keeps them.
        """
        if self._contiguous:
            return
        kept = tuple(tensor[..., tokens:, :] for tensor in self.suffix_tensors())
        self.restart_suffix()
        if kept[0].shape[-2]:
            self.begin_suffix(tuple(map(mx.contiguous, kept)))

    def restart_suffix(self) -> None:
        """Start a new suffix; the prefix must hold the old one's tokens by now."""
        self.suffix = _like(self.suffix)
        self._copied, self._contiguous = 0, False
        self._fetched = None

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
        self._fetched = None  # a view of the suffix that lives on would make the write a copy
        self._fetched = self._whole(_flat(self.suffix.update_and_fetch(keys, values)))
        return self._fetched

    def append(self, tensors: Tensors) -> None:
        """Append to the suffix of a layer that is not quantised, and fetch nothing.

        Args:
            tensors: keys and values of the tokens. The first of a suffix are not copied.
        """
        self._fetched = None  # as above
        if self.suffix.empty():
            self.begin_suffix(tensors)
        else:
            self.suffix.update_and_fetch(*tensors)

    def begin_suffix(self, tensors: Tensors) -> None:
        """Have these tokens as the suffix, which is empty. They are not copied, nor fetched."""
        self.suffix.keys, self.suffix.values = _pair(tensors)
        self.suffix.offset = tensors[0].shape[-2]

    def keys_and_values(self) -> Any:
        """Keys and values of all tokens, without writing."""
        return self._whole(None if self.suffix.empty() else self.all_held())

    def segments(self, keys: Any) -> list[Tensors] | None:
        """Prefix and suffix one by one, if `keys` is what was fetched last; else None.

        Lets go of what was fetched: the join would stay in memory, for all layers at once, and
        the next write would not be in place.
        """
        fetched = self.let_go()
        if fetched is None or fetched[0] is not keys:
            return None
        return [*self.prefix, self.all_held()]

    def let_go(self) -> Any:
        """Forget what was fetched last, and return it."""
        fetched, self._fetched = self._fetched, None
        return fetched

    def empty(self) -> bool:
        """Whether it holds no token."""
        return self.offset == 0

    def suffix_tensors(self) -> Tensors:
        """The suffix's tokens after the prefix, and nothing of its spare room."""
        return tuple(tensor[..., self._copied :, :] for tensor in self.all_held())

    @property
    def has_suffix(self) -> bool:
        """Whether it holds tokens after the prefix."""
        return bool(self.suffix.offset > self._copied)

    def all_held(self) -> Tensors:
        """All tokens of the suffix, a copy of the prefix included."""
        return _flat(self.suffix.keys_and_values())

    def _whole(self, suffix: Tensors | None) -> Any:
        parts = self.prefix if suffix is None else [*self.prefix, suffix]
        if len(parts) == 1:
            return _pair(parts[0])
        joined = tuple(mx.concatenate(list(p), axis=-2) for p in zip(*parts, strict=True))
        return _pair(
            tuple(mx.full(j.shape, float("nan")) for j in joined) if self.withholds else joined
        )


class QuantizedTokenLayerCache(TokenLayerCache):
    """The same for a quantised layer; mlx-lm picks its attention by the attribute `bits`."""

    @property
    def quantization(self) -> KVQuantization:
        """How keys and values are quantised."""
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


def in_one(parts: TokenParts) -> mx.array:
    """A tensor whose parts lie apart; a copy, where there are several."""
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)


def beginning(parts: TokenParts, tokens: int) -> TokenParts:
    """The first tokens of a tensor whose parts lie apart, without a copy."""
    found, left = [], tokens
    for part in parts:
        if left > 0:
            found.append(part[..., :left, :])
        left -= part.shape[-2]
    return found


def in_parts(layers: Sequence[Tensors]) -> list[list[TokenParts]]:
    """The tensors of layers, of which each lies in one piece, as parts."""
    return [[(tensor,) for tensor in tensors] for tensors in layers]
