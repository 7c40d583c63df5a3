"""The layers of a prefill of several prompts: rows of different lengths, padded to the longest.

The model's products are computed for all rows together. Each row attends by itself, to its own
tokens only, and writes to the caches of its own sequence: no padding gets there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from ..kv.recurrent import SeparateRecurrentLayer
from ..kv.sequence_cache import layer_caches_of
from ..kv.token_layer import TokenLayerCache
from .batched import NotBatchableError
from .separate import layers_of

Attend = Callable[..., mx.array]
"""mlx-lm's `scaled_dot_product_attention`, or what is bound in its place."""


class RowMasks(NamedTuple):
    """What stands for a mask of all rows: mlx-lm's mask of each."""

    masks: tuple[Any, ...]


class RowKeys(mx.array):
    """A call's keys, which know where each row's are.

    They are what the model holds of all rows' keys and values in one piece: these are freed with
    the last of its references, as if it had been called with one row.

    Args:
        keys: `[rows, kv_heads, tokens, size]`, padded.
        rows: each row's cache, what it returned, and how many tokens of the call are the row's.
    """

    def __init__(self, keys: mx.array, rows: Sequence[tuple[Any, Any, int]]) -> None:
        super().__init__(keys)
        self._rows = rows

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, attend: Attend
    ) -> mx.array:
        """Compute every row's attention to its own tokens.

        Args:
            queries: `[rows, heads, tokens, size]`, padded.
            scale: of the scores.
            mask: what a `PaddedLayer` made.
            sinks: `[heads]`, or None.
            attend: computes one row's.

        Returns:
            `[rows, heads, tokens, size of a value]`, with zeros behind a row's own tokens.

        Raises:
            NotBatchableError: the model changed the mask.
        """
        if not isinstance(mask, RowMasks):
            raise NotBatchableError("the model brings a mask of its own for prompts of a batch")
        outputs = []
        for row, ((cache, fetched, tokens), own) in enumerate(
            zip(self._rows, mask.masks, strict=True)
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


class PaddedLayer:
    """One layer of several sequences, which each keep a cache of mlx-lm's kind.

    Args:
        caches: theirs.
        lengths: tokens of each in this call.
    """

    def __init__(self, caches: Sequence[Any], *, lengths: Sequence[int]) -> None:
        self._caches = caches
        self._lengths = lengths

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return mx.array([int(cache.offset) for cache in self._caches])

    def make_mask(self, tokens: int, **options: Any) -> RowMasks:
        """The mask that mlx-lm would make for each row."""
        del tokens
        rows = zip(self._caches, self._lengths, strict=True)
        return RowMasks(tuple(cache.make_mask(length, **options) for cache, length in rows))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowKeys, mx.array]:
        """Append each row's own tokens to its cache."""
        rows = []
        for row, (cache, length) in enumerate(zip(self._caches, self._lengths, strict=True)):
            part = slice(row, row + 1), slice(None), slice(0, length)
            fetched = cache.update_and_fetch(keys[part], values[part])
            if isinstance(cache, TokenLayerCache):
                cache.let_go()  # it is freed layer by layer, with what is returned here
            rows.append((cache, fetched, length))
        return RowKeys(keys, rows), values

    def keys_and_values(self) -> tuple[RowKeys, mx.array]:
        """What stands for all that the caches hold, for layers that have none of their own."""
        rows = [
            (cache, cache.keys_and_values(), length)
            for cache, length in zip(self._caches, self._lengths, strict=True)
        ]
        nothing = mx.zeros((len(rows), 1, 1, 1))
        return RowKeys(nothing, rows), nothing


def padded(caches: Sequence[list[Any]], lengths: Sequence[int]) -> list[Any]:
    """View the caches of several sequences as those of one call.

    Args:
        caches: for each row what the model would be called with.
        lengths: tokens of each row in this call.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """
    if any(type(cache) is ChunkedKVCache for cache in layer_caches_of(caches[0])):
        raise NotBatchableError("prompts of layers that attend in chunks are computed one by one")
    differ = lengths if len(set(lengths)) > 1 else None
    return layers_of(
        caches,
        partial(PaddedLayer, lengths=lengths),
        partial(SeparateRecurrentLayer, lengths=differ),
    )
