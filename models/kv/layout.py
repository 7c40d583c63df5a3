"""The kinds of state of a model's layers, and live state for its sequences.

Every cache class of mlx-lm falls under one of two kinds. `KVCache` and `QuantizedKVCache` are
token-addressable and live as `TokenLayerCache`s; `RotatingKVCache`, `ArraysCache` and
`ChunkedKVCache` restore as a whole only (`ChunkedKVCache` says that it can be trimmed, but its
front is gone). A `CacheList` is the sum of its parts. Anything else is refused at load.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..errors import UnsupportedCacheError
from ..params import KVQuantization
from .checkpoints import PackedCheckpoint
from .sequence_cache import SequenceCache, layer_caches_of
from .spans import PackedSpan, SpanRun, runs_of
from .token_layer import LayerPrefix, token_layer_cache

_ADDRESSABLE = (KVCache, QuantizedKVCache)
_WHOLE = (RotatingKVCache, ArraysCache, ChunkedKVCache)


class CacheLayout:
    """The kinds of state of a model's layers.

    Attributes:
        has_spans: some layers are token-addressable.
        has_checkpoints: some are not.
        has_recurrences: some are recurrent.

    Args:
        model: mlx-lm's model.
        quantization: of keys and values, if they are quantised.

    Raises:
        UnsupportedCacheError: a layer keeps its state in an unknown class, or in one that cannot be
            quantised.
    """

    def __init__(self, model: Any, quantization: KVQuantization | None = None) -> None:
        self._model = model
        self._quantization = quantization
        self._numbers = count()
        leaves = list(layer_caches_of(self._empty()))
        unknown = [layer for layer in leaves if type(layer) not in _ADDRESSABLE + _WHOLE]
        if unknown:
            name = type(unknown[0]).__name__
            raise UnsupportedCacheError(f"the model keeps state in {name}, which umbel cannot save")
        self.has_spans = any(type(layer) in _ADDRESSABLE for layer in leaves)
        self.has_checkpoints = any(type(layer) in _WHOLE for layer in leaves)
        self.has_recurrences = any(type(layer) is ArraysCache for layer in leaves)

    def open(
        self,
        offset: int = 0,
        spans: Sequence[PackedSpan] = (),
        checkpoint: PackedCheckpoint | None = None,
    ) -> SequenceCache:
        """Make the state of a sequence that resumes at `offset`.

        Nothing is copied: spans are read where they lie.

        Args:
            offset: tokens already computed; 0 starts from nothing.
            spans: the state of all of them, in order, if layers are token-addressable.
            checkpoint: of the other layers, if there are any.
        """
        restored = None if checkpoint is None else checkpoint.restore_all(offset)
        layers = self.layers(spans, restored)
        return SequenceCache(next(self._numbers), offset, spans, layers)

    def layers(
        self, prefix: Sequence[PackedSpan], non_trimmable: Sequence[Any] | None
    ) -> list[Any]:
        """Make the model's argument for a sequence.

        Args:
            prefix: spans that the token-addressable layers read.
            non_trimmable: the other layers' caches in order; None starts them from nothing.
        """
        # No closure that calls itself: that is a cycle, and would keep the restored state.
        spans, rest = count(), None if non_trimmable is None else iter(non_trimmable)
        runs = runs_of(prefix)
        return [_live(cache, runs, spans, rest) for cache in self._empty()]

    def _empty(self) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self._model)
        if self._quantization is None:
            return caches
        others = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
        if others:
            raise UnsupportedCacheError(
                f"the model keeps state in {' and '.join(others)}, and only keys and values in a "
                "KVCache can be quantised: serve it without kv_bits"
            )
        bits, group_size = self._quantization
        return [QuantizedKVCache(group_size=group_size, bits=bits) for _ in caches]


def _live(
    cache: Any, prefix: Sequence[SpanRun], numbers: Iterator[int], restored: Iterator[Any] | None
) -> Any:
    """Put restored state in the place of one of mlx-lm's caches."""
    if type(cache) is CacheList:
        return CacheList(*[_live(part, prefix, numbers, restored) for part in cache.caches])

    if type(cache) in _ADDRESSABLE:
        length = sum(run.length for run in prefix)
        return token_layer_cache(cache, LayerPrefix(prefix, next(numbers)), length)
    return cache if restored is None else next(restored)
