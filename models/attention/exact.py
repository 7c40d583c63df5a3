"""The layers of an exact batch: rows that share the model's products and nothing else.

Each row attends on its own to keys in one piece, so that its results depend neither on the other
rows nor on how its state is cut into segments. Unused rows, which are None, keep the number of
rows, and so the shape of every product, the same.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, QuantizedKVCache

from ..backends.base import Backend
from ..kv.recurrent import RecurrentRows
from ..kv.sequence_cache import layer_caches_of
from .layers import BatchedLayer, Query


class _ExactLayer(BatchedLayer):
    """Attention of rows that each keep a cache of mlx-lm's."""

    def __init__(self, rows: Sequence[Any], backend: Backend) -> None:
        self._rows = rows
        self._backend = backend
        self._held: list[tuple[mx.array, mx.array]] = []

    @property
    def offset(self) -> mx.array:
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

    def _attend(self, query: Query) -> mx.array:
        return mx.concatenate([self._attend_one(i, query) for i in range(len(self._rows))], axis=0)

    def _attend_one(self, row: int, query: Query) -> mx.array:
        _, scale, sinks, rotated = query
        queries, held = query.queries[row : row + 1], self._held[row]
        cache = self._rows[row]
        if isinstance(cache, QuantizedKVCache):
            output: mx.array = base.scaled_dot_product_attention(
                queries, *held, cache=cache, scale=scale, mask=None, sinks=sinks
            )
            return output
        keys, values = held
        if rotated is None:
            return self._backend.attend(queries, keys, values, scale, None, sinks)
        mask = rotated[row : row + 1] @ values.swapaxes(-1, -2)
        return self._backend.attend(queries, keys, keys, scale, mask, sinks)


class _ExactRecurrentLayer(RecurrentRows):
    """Recurrent layers of rows that each keep an `ArraysCache`."""

    def __init__(self, rows: Sequence[ArraysCache | None]) -> None:
        self._rows = rows

    def __getitem__(self, slot: int) -> mx.array | None:
        arrays = [None if row is None else row[slot] for row in self._rows]
        like = next((array for array in arrays if array is not None), None)
        if like is None:
            return None
        return mx.concatenate([mx.zeros_like(like) if a is None else a for a in arrays], axis=0)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        for number, row in enumerate(self._rows):
            if row is not None:
                # A copy: a slice would keep all rows in memory, also those not in use.
                row[slot] = mx.contiguous(value[number : number + 1])

    def empty(self) -> bool:
        return all(row is None or row.empty() for row in self._rows)


def can_be_exact(caches: Sequence[Any]) -> bool:
    """True if these layers, a sequence's, can be rows that attend each by itself."""
    return not any(type(layer) is ChunkedKVCache for layer in layer_caches_of(caches))


def exact_layers(rows: Sequence[list[Any] | None], backend: Backend) -> list[Any]:
    """View the caches of several sequences as those of one batch.

    Args:
        rows: for each row the model's argument for its sequence alone, or None.
        backend: how attention is computed.
    """
    used = next(row for row in rows if row is not None)
    return [_layer([row and row[index] for row in rows], backend) for index in range(len(used))]


def _layer(caches: list[Any], backend: Backend) -> Any:
    used = next(cache for cache in caches if cache is not None)
    if type(used) is not CacheList:
        recurrent = type(used) is ArraysCache
        return _ExactRecurrentLayer(caches) if recurrent else _ExactLayer(caches, backend)
    parts = range(len(used.caches))
    return CacheList(*[_layer([c and c.caches[i] for c in caches], backend) for i in parts])
