"""The layers of an exact batch: rows that share the model's products and nothing else.

Each row attends on its own to keys in one piece, so that its results depend neither on the other
rows nor on how its state is cut into segments. Unused rows keep the number of rows, and so the
shape of every product, the same.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, QuantizedKVCache

from ..backends import Backend
from ..kv.recurrent import SeparateRecurrentLayer
from ..kv.sequence_cache import layer_caches_of
from .batched import BatchedLayer
from .fetched import RotatedQueries


class SeparateLayer(BatchedLayer):
    """Attention of rows that each keep a cache of mlx-lm's, or None for a row not in use."""

    def __init__(self, rows: Sequence[Any], backend: Backend) -> None:
        self._rows = rows
        self._backend = backend
        self._held: list[tuple[mx.array, mx.array]] = []

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return mx.array([0 if row is None else int(row.offset) for row in self._rows])

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._held = [
            (keys[i : i + 1], values[i : i + 1])
            if row is None
            else row.update_and_fetch(keys[i : i + 1], values[i : i + 1])
            for i, row in enumerate(self._rows)
        ]

    def _sees_all(self, window_size: int | None) -> bool:
        return all(
            row is None or row.make_mask(1, return_array=False, window_size=window_size) is None
            for row in self._rows
        )

    def _attend(
        self,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None,
    ) -> mx.array:
        outputs = [
            self._attend_quantized(row, queries[i : i + 1], held, scale, sinks)
            if isinstance(row, QuantizedKVCache)
            else self._attend_one(queries[i : i + 1], held, scale, sinks, rotated and rotated.of(i))
            for i, (row, held) in enumerate(zip(self._rows, self._held, strict=True))
        ]
        return mx.concatenate(outputs, axis=0)

    @staticmethod
    def _attend_quantized(
        row: QuantizedKVCache, queries: mx.array, held: Any, scale: float, sinks: mx.array | None
    ) -> mx.array:
        output: mx.array = base.scaled_dot_product_attention(
            queries, *held, cache=row, scale=scale, mask=None, sinks=sinks
        )
        return output

    def _attend_one(
        self,
        queries: mx.array,
        held: tuple[mx.array, mx.array],
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None,
    ) -> mx.array:
        keys, values = held
        if rotated is None:
            return self._backend.attend(queries, keys, values, scale, None, sinks)
        mask = rotated.queries @ values.swapaxes(-1, -2)
        return self._backend.attend(queries, keys, keys, scale, mask, sinks)


def can_separate(caches: Sequence[Any]) -> bool:
    """True if these layers, a sequence's, can be rows that attend each by itself."""
    return not any(type(layer) is ChunkedKVCache for layer in layer_caches_of(caches))


def separate(rows: Sequence[list[Any] | None], backend: Backend) -> list[Any]:
    """View the caches of several sequences as those of one batch.

    Args:
        rows: for each row what the model would be called with, or None.
        backend: how attention is computed.
    """
    used = next(row for row in rows if row is not None)
    return [_layer([row and row[index] for row in rows], backend) for index in range(len(used))]


def _layer(caches: list[Any], backend: Backend) -> Any:
    used = next(cache for cache in caches if cache is not None)
    if type(used) is not CacheList:
        recurrent = type(used) is ArraysCache
        return SeparateRecurrentLayer(caches) if recurrent else SeparateLayer(caches, backend)
    parts = range(len(used.caches))
    return CacheList(*[_layer([c and c.caches[i] for c in caches], backend) for i in parts])
