"""CUDA: kernels of umbel's, attention plans of few shapes, launches layer by layer."""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .. import Limits
from ..base import LIMITS, Backend
from .gated_delta import update
from .planned import LARGEST, attend_causally
from .short_convolution import ShortConvolution, computes

_LIMITS = replace(LIMITS, host_reads=False, freed_bytes=8 << 30)


@dataclass(frozen=True)
class Cuda(Backend):
    """MLX's kernels, except where these are many launches, or planned for each shape."""

    limits: Limits = _LIMITS
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

    def _delta_rule(self, q: mx.array, *others: Any, **options: Any) -> tuple[mx.array, mx.array]:
        return update(q, *others, **options)

    def convolution(self, layer: Any) -> type | None:
        """See `Backend`."""
        return ShortConvolution if computes(layer) else None


CUDA = Cuda()
