"""Attention over segments that lie apart: a prefix that is only read, and a suffix.

`backends.prepare` puts it in the place of mlx-lm's `scaled_dot_product_attention`. It takes over
where rows of a batch attend, and where one token attends without a mask and its layer has a prefix.
All else goes on to the backend, with keys and values in one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from ..backends.base import Backend
from ..errors import NotBatchableError
from ..kv.spans import Tensors
from ..kv.token_layer import QuantizedTokenLayerCache, TokenLayerCache
from ..runtime import launch
from .layers import BatchedLayer, Keys, RotatedQueries
from .parts import PLAIN, Products, Quantized, merge, part_of, scores_of

_fused = base.scaled_dot_product_attention


@dataclass(frozen=True)
class Attention:
    """Attention of a prepared model, in the place of mlx-lm's function.

    Attributes:
        backend: how it is computed.
    """

    backend: Backend

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute attention with mlx-lm's signature.

        Args:
            queries: `[rows, heads, tokens, size]`; several rows where sequences decode in one call.
            keys: `[rows, kv_heads, tokens, size]`, as the layer's state returned them or as a
                model of MLA made them of that.
            values: likewise.
            cache: the layer's state.
            scale: of the scores.
            mask: None, "causal", or an array.
            sinks: `[heads]` logits that take attention from every token, or None.

        Returns:
            `[rows, heads, tokens, size of a value]`.

        Raises:
            NotBatchableError: the model passes rows of a batch a mask that these have not made.
        """
        if self.backend.launches_layers and queries.shape[2] > 1:
            launch(queries)  # with all that is before it
        layer = keys.layer if isinstance(keys, Keys) else cache
        if isinstance(layer, BatchedLayer):
            if layer.masks_itself:
                mask = None
            if not isinstance(mask, RotatedQueries | None):
                raise NotBatchableError(
                    "the model brings a mask, and rows of a batch are attended to without one"
                )
            return layer.attend(queries, keys, scale, sinks, mask)
        if isinstance(cache, TokenLayerCache):
            segments = cache.segments(keys)  # in any case: it drops what it fetched
            if segments is not None and cache.prefix and mask is None and queries.shape[2] == 1:
                products = PLAIN
                if isinstance(cache, QuantizedTokenLayerCache):
                    products = Quantized(cache.quantization)
                return over_segments(queries, segments, scale, sinks, self.backend, products)
        if isinstance(keys, mx.array):
            return self.backend.attend(queries, keys, values, scale, mask, sinks)
        result: mx.array = _fused(queries, keys, values, cache, scale, mask, sinks)
        return result


def over_segments(
    queries: mx.array,
    segments: Sequence[Tensors],
    scale: float,
    sinks: mx.array | None,
    backend: Backend,
    products: Products = PLAIN,
) -> mx.array:
    """Attend from one token to several segments, with one softmax over all of them.

    The scores of a token are small, so they are joined; keys and values are read where they lie.

    Args:
        queries: `[1, heads, 1, size]`.
        segments: tensors that `products` reads, of `[1, kv_heads, tokens, size]` each.
        scale: of the scores.
        sinks: `[heads]`, or None.
        backend: how it is computed.
        products: of queries and keys, shares and values.
    """
    batch, heads, _, size = queries.shape
    kv_heads = segments[0][0].shape[1]
    grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads, size)
    (softmax,) = backend.softmaxes([scores_of((grouped,), segments, products)])
    output = merge([part_of(softmax, segments, products)], sinks, backend)
    return output.astype(queries.dtype).reshape(batch, heads, 1, -1)
