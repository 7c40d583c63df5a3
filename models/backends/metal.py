"""The base: MLX's operations alone. It is what a Mac runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations, gated_delta

from ..runtime import launch
from . import Backend, Limits, Softmax
from .output_rows import OutputRows
from .prepare import prepare

# Launches take the time: they take most of a chunk of 512 tokens, too.
LIMITS = Limits(
    fp32=False,
    overlaps=True,
    warms_up=True,
    host_reads=True,
    prefill_chunk=2048,
    max_stall=0.2,
    freed_bytes=1 << 30,
    contiguous=True,
)


@dataclass(frozen=True)
class Metal(Backend):
    """MLX's own kernels."""

    limits: Limits = LIMITS

    def prepare(self, model: Any) -> OutputRows:
        """See `Backend`."""
        return prepare(model, self)

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
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def softmaxes(self, scores: Sequence[mx.array]) -> list[Softmax]:
        """See `Backend`."""
        return [
            Softmax(
                mx.softmax(array, axis=-1, precise=True),
                mx.logsumexp(array.astype(mx.float32), axis=-1, keepdims=True),
            )
            for array in scores
        ]

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        """See `Backend`."""
        result: mx.array = activations.swiglu(gate, x)
        return result

    def gated_delta(self, q: mx.array, *others: Any, **options: Any) -> tuple[mx.array, mx.array]:
        """See `Backend`."""
        if self.launches_layers and q.shape[1] > 1:
            launch(q)  # with all that is before it, as a layer that attends does
        return self._delta_rule(q, *others, **options)

    def _delta_rule(self, q: mx.array, *others: Any, **options: Any) -> tuple[mx.array, mx.array]:
        result: tuple[mx.array, mx.array] = gated_delta.gated_delta_update(q, *others, **options)
        return result

    def convolution(self, layer: Any) -> type | None:
        """See `Backend`."""
        del layer
        return None


METAL = Metal()
