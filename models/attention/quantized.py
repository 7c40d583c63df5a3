"""Attention to quantised keys and values, which are read as they are and never unpacked.

A segment of such a layer has six tensors: for keys, and then for values, the packed numbers,
their scales and their biases. Scores and outputs are parts like any others, and merge alike.
"""

from dataclasses import dataclass

import mlx.core as mx

from ..errors import NotBatchableError
from ..kv.length_classes import LengthClasses
from ..params import KVQuantization
from .batched import Step
from .fetched import RotatedQueries
from .full import BatchedTokenLayer
from .products import Products, Queries, Segment

TENSORS = 6
"""Of a layer."""


@dataclass(frozen=True)
class QuantizedProducts:
    """The two products of attention with quantised keys and values; see `Products`."""

    quantization: KVQuantization

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """See `Products`."""
        (asked,) = queries
        return self._product(asked, segment[: TENSORS // 2], transposed=True)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return self._product(shares, segment[TENSORS // 2 :], transposed=False)

    def _product(self, left: mx.array, right: Segment, *, transposed: bool) -> mx.array:
        bits, group_size = self.quantization
        packed, scales, biases = right
        return mx.quantized_matmul(
            left, packed, scales, biases, transpose=transposed, group_size=group_size, bits=bits
        )


class BatchedQuantizedLayer(BatchedTokenLayer):
    """Full-attention rows whose keys and values are quantised as they are written.

    Args:
        index: the layer's number among those that spans hold.
        quantization: of keys and values.
    """

    _count = TENSORS

    def __init__(
        self, step: Step, own: LengthClasses, index: int, quantization: KVQuantization
    ) -> None:
        super().__init__(step, own, index, first=TENSORS * index)
        own.keys_weigh()  # half of the tensors are values', and not every other one
        self._quantization = quantization
        self._quantized = QuantizedProducts(quantization)

    def _append(self, keys: mx.array, values: mx.array) -> None:
        bits, group_size = self._quantization
        parts = [
            part
            for whole in (keys, values)
            for part in mx.quantize(whole, group_size=group_size, bits=bits)
        ]
        self._write(*parts)

    def _products(self, rotated: RotatedQueries | None, scale: float) -> Products:
        del scale
        if rotated is not None:
            raise NotBatchableError("latents are not quantised")
        return self._quantized
