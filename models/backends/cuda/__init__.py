"""CUDA: kernels of umbel's, attention plans of few shapes, launches layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ...attention import softmax_kernel
from .. import Limits, Softmax
from ..metal import LIMITS as METALS
from ..metal import Metal
from .gated_delta import update
from .planned import LARGEST, attend_causally
from .short_convolution import ShortConvolution, computes

LIMITS = replace(METALS, host_reads=False, freed_bytes=8 << 30)


@dataclass(frozen=True)
class Cuda(Metal):
    """MLX's kernels, but where these are many launches, or planned for each shape."""

    limits: Limits = LIMITS
    attention_kernels: bool = True
    length_multiple: int = 8
    launches_layers: bool = True

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """See `Backend`."""
        _, _, count, size = queries.shape
        if isinstance(mask, str) and count > 1 and size <= LARGEST:
            return attend_causally(queries, keys, values, scale, sinks)
        return super().attend(queries, keys, values, scale, mask, sinks)

    def softmaxes(self, scores: Sequence[mx.array], *, scale: float = 1.0) -> list[Softmax]:
        """See `Backend`."""
        if not all(array.dtype in softmax_kernel.TYPES for array in scores):
            return super().softmaxes(scores, scale=scale)
        return [Softmax(*softmax_kernel.softmax(array, scale)) for array in scores]

    def _delta_rule(self, q: mx.array, *others: Any, **options: Any) -> tuple[mx.array, mx.array]:
        return update(q, *others, **options)

    def convolution(self, layer: Any) -> type | None:
        """See `Backend`."""
        return ShortConvolution if computes(layer) else None


CUDA = Cuda()
