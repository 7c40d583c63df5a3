"""What a model is called with in a batch: a layer of rows in the place of each layer cache."""

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from ..attention.batched import BatchedWindowLayer, RowsLayer, Step
from ..attention.chunked import BatchedChunkLayer
from ..attention.full import BatchedTokenLayer
from ..attention.gathered import GatheredTokenLayer, Gathering
from ..attention.quantized import TENSORS, BatchedQuantizedLayer
from ..errors import NotBatchableError
from ..params import KVQuantization
from .length_classes import LengthClasses
from .recurrent import BatchedRecurrentLayer
from .ring_buffer import RingBuffer
from .token_layer import QuantizedTokenLayerCache, TokenLayerCache


class BatchLayers:
    """A batch's layers, and the buffers that they read.

    Attributes:
        layers: what the model is called with.
        own: the rows' tokens of layers that keep all.
        token_layers: those layers.
        windows: the buffers of layers with a window, by its length.
        chunked: lengths of those windows that are emptied when a chunk begins.
        non_trimmable: where each layer that is not token-addressable has its rows, in order: a
            window's buffer with the number of its first tensor, or recurrent states.

    Args:
        like: layer caches of any sequence of the model.
        step: what all layers know of the step that runs.
        mask_axes: where the model attends by itself, the axes of its masks; see `gathered`. 0
            where it leaves that to the layers.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """

    def __init__(self, like: Sequence[Any], step: Step, *, mask_axes: int) -> None:
        self._step = step
        self.own = LengthClasses(scores_masked=True)
        self.token_layers: list[RowsLayer] = []
        self.windows: dict[int, RingBuffer] = {}
        self.chunked: set[int] = set()
        self.non_trimmable: list[tuple[RingBuffer, int] | BatchedRecurrentLayer] = []
        self._gathering = Gathering(step, self.own, mask_axes) if mask_axes else None
        self.layers = [self._layer(cache) for cache in like]

    def _layer(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*[self._layer(part) for part in cache.caches])
        if type(cache) is TokenLayerCache:
            return self._token_layer()
        if type(cache) is QuantizedTokenLayerCache:
            return self._quantized_layer(cache.quantization)
        if type(cache) is RotatingKVCache and not cache.keep:
            if cache.max_size in self.chunked:
                raise NotBatchableError("windows and chunks of one length")
            buffer, first = self._window(cache.max_size)
            return BatchedWindowLayer(self._step, buffer, first, cache.max_size)
        if type(cache) is ChunkedKVCache:
            self.chunked.add(cache.chunk_size)
            return BatchedChunkLayer(self._step, *self._window(cache.chunk_size))
        if type(cache) is ArraysCache:
            arrays = BatchedRecurrentLayer(len(cache.cache))
            self.non_trimmable.append(arrays)
            return arrays
        raise NotBatchableError(
            f"a layer keeps its state in a {type(cache).__name__}, which has no rows"
        )

    def _window(self, length: int) -> tuple[RingBuffer, int]:
        buffer = self.windows.setdefault(length, RingBuffer(length))
        place = buffer, buffer.reserve(2)
        self.non_trimmable.append(place)
        return place

    def _token_layer(self) -> RowsLayer:
        first, index = self.own.reserve(2), len(self.token_layers)
        layer: RowsLayer
        if self._gathering is None:
            layer = BatchedTokenLayer(self._step, self.own, index, first=first)
        else:
            layer = GatheredTokenLayer(self._step, self.own, first, self._gathering, index)
        self.token_layers.append(layer)
        return layer

    def _quantized_layer(self, quantization: KVQuantization) -> RowsLayer:
        if self._gathering is not None:
            raise NotBatchableError("the model attends by itself, and its keys are quantised")
        self.own.reserve(TENSORS)
        index = len(self.token_layers)
        layer = BatchedQuantizedLayer(self._step, self.own, index, quantization)
        self.token_layers.append(layer)
        return layer
