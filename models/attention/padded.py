"""The layers of a prefill of several prompts: rows of different lengths, padded to one length.

The model's products are computed for all rows together. Each row looks at its own tokens only, and
writes to the caches of its own sequence: no padding gets there.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import NotBatchableError
from ..kv.token_layer import TokenLayerCache
from ..load.device import DevicePolicy
from .fetched import Attend, CallKeys
from .joint import Prompts, attend_jointly, own_tensors, shared_segments
from .products import Segment


class RowMasks(NamedTuple):
    """What stands for a mask of all rows: mlx-lm's mask of each."""

    masks: tuple[Any, ...]

    @property
    def plain(self) -> bool:
        """Whether each row looks at all that comes before."""
        return all(mask is None or isinstance(mask, str) for mask in self.masks)


class PaddedKeys(CallKeys):
    """A call's keys, padded, which know where each row's are: all that its cache returned."""

    _layer: "PaddedLayer"

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, attend: Attend
    ) -> mx.array:
        """Compute every row's attention to its own tokens; see `CallKeys.attend`."""
        if not isinstance(mask, RowMasks):
            raise NotBatchableError("the model brings a mask of its own for prompts of a batch")
        outputs = []
        for row, (cache, fetched, tokens, own) in enumerate(
            zip(self._layer.caches, self._fetched, self._layer.lengths, mask.masks, strict=True)
        ):
            output = attend(
                queries[row : row + 1, :, :tokens],
                *fetched,
                cache=cache,
                scale=scale,
                mask=own,
                sinks=sinks,
            )
            missing = queries.shape[2] - tokens
            outputs.append(mx.pad(output, [(0, 0), (0, 0), (0, missing), (0, 0)]))
        return mx.concatenate(outputs, axis=0)


class JointKeys(PaddedKeys):
    """The same where what rows share is read once for all of them.

    Args:
        keys: as above.
        layer: as above.
        own: keys and values that each row reads alone, those of the call included.
    """

    def __init__(self, keys: mx.array, layer: "JointLayer", own: tuple[mx.array, ...]) -> None:
        super().__init__(keys, layer, ())
        self._joint = layer
        self._own = own

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, attend: Attend
    ) -> mx.array:
        """See `PaddedKeys.attend`."""
        if isinstance(mask, RowMasks) and mask.plain:
            return self._joint.attend(self._own, queries, scale, sinks)
        self._fetched = [cache.keys_and_values() for cache in self._layer.caches]
        return super().attend(queries, scale, mask, sinks, attend)


class PromptsLayer:
    """One layer of several sequences, which each keep a cache of mlx-lm's kind.

    Attributes:
        caches: theirs.
        lengths: tokens of each in this call.
    """

    def __init__(self, caches: Sequence[Any], lengths: Sequence[int]) -> None:
        self.caches = caches
        self.lengths = lengths

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return mx.array([int(cache.offset) for cache in self.caches])

    def by_row(self, first: mx.array, second: mx.array) -> Iterator[tuple[Any, Segment]]:
        """Pair each row's cache with its own tokens, without padding.

        Args:
            first: of the two tensors that the model stores, `[rows, heads, tokens, size]`.
            second: the other one.

        Yields:
            The cache, and both tensors of that row, `[1, heads, tokens of the row, size]`.
        """
        for row, (cache, length) in enumerate(zip(self.caches, self.lengths, strict=True)):
            part = slice(row, row + 1), slice(None), slice(0, length)
            yield cache, (first[part], second[part])


class PaddedLayer(PromptsLayer):
    """One whose rows attend to what their own caches return."""

    def make_mask(self, tokens: int, **options: Any) -> RowMasks:
        """The mask that mlx-lm would make for each row."""
        del tokens
        rows = zip(self.caches, self.lengths, strict=True)
        return RowMasks(tuple(cache.make_mask(length, **options) for cache, length in rows))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PaddedKeys, mx.array]:
        """Append each row's own tokens to its cache."""
        fetched = []
        for cache, new in self.by_row(keys, values):
            fetched.append(cache.update_and_fetch(*new))
            if isinstance(cache, TokenLayerCache):
                cache.let_go()  # it is freed layer by layer, with what is returned here
        return PaddedKeys(keys, self, fetched), values

    def keys_and_values(self) -> tuple[PaddedKeys, mx.array]:
        """What stands for all that the caches hold, for layers that have none of their own."""
        nothing = mx.zeros((len(self.caches), 1, 1, 1))
        return PaddedKeys(nothing, self, [c.keys_and_values() for c in self.caches]), nothing


class SharingLayer(PromptsLayer):
    """One that is token-addressable: what rows share is read once.

    Args:
        caches: of the rows.
        lengths: tokens of each in this call.
        prompts: what they share.
        index: of the layer, among those that spans hold.
        device: how attention is computed.
    """

    def __init__(
        self,
        caches: Sequence[TokenLayerCache],
        lengths: Sequence[int],
        prompts: Prompts,
        index: int,
        device: DevicePolicy,
    ) -> None:
        super().__init__(caches, lengths)
        self._prompts = prompts
        self._index = index
        self._device = device

    def append(self, first: mx.array, second: mx.array) -> Segment:
        """Append each row's own tokens to its cache; see `by_row`.

        Returns:
            What each row reads by itself: a suffix that grew is read as it is now, so that each
            layer's is made when that layer is computed, and not all of them at the end.
        """
        for cache, new in self.by_row(first, second):
            cache.append(new)
        return own_tensors(self._prompts, self._index, (first, second))


class JointLayer(SharingLayer, PaddedLayer):
    """One whose rows attend together to what they share."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PaddedKeys, mx.array]:
        """Append each row's own tokens to its cache, and join nothing that rows share."""
        return JointKeys(keys, self, self.append(keys, values)), values

    def attend(
        self,
        own: tuple[mx.array, ...],
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `joint.attend_jointly`."""
        shared = shared_segments(self._prompts, self._index)
        return attend_jointly(self._prompts, shared, own, queries * scale, sinks, self._device)
