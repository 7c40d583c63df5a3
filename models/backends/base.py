"""The base of all backends: MLX's operations alone. It is what a Mac runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import activations, gated_delta

from ..runtime import launch
from . import Limits

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


class Softmax(NamedTuple):
    """Softmax of scores, over their last axis, that can be merged with others.

    Attributes:
        shares: `[..., n]`, which sum to 1, in the scores' type.
        lse: `[..., 1]`, the log of the sum of the scores' exponentials, in fp32.
    """

    shares: mx.array
    lse: mx.array


@dataclass(frozen=True)
class Backend:
    """The operations of a path. A value, so that tests can run every path on a CPU.

    Attributes:
        limits: the properties that scheduler and daemon know.
        block: tokens of a prompt that attend at a time; None where attention is one kernel.
        compiles: small functions are compiled into one kernel.
        length_multiple: of tokens for which products are fast; see `batch_cache.aligned`.
        launches_layers: prompts and decode steps are launched layer by layer. MLX makes CUDA graphs
            of so many operations, a hundred on Hopper, and a graph that is new takes it 2 to 10 ms:
            so cut, all layers of a kind are one graph.
    """

    limits: Limits = LIMITS
    block: int | None = None
    compiles: bool = True
    length_multiple: int = 1
    launches_layers: bool = False

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend to keys that lie in one piece.

        Args:
            queries: `[B, heads, T, size]`.
            keys: `[B, kv_heads, N, size]`. With a causal mask the last T are the queries' own.
            values: likewise.
            scale: of the scores.
            mask: None, "causal", or an array that broadcasts to `[B, heads, T, N]`: true where a
                query may look, or a number to add to the score.
            sinks: `[heads]`, or None.

        Returns:
            `[B, heads, T, size of a value]`.
        """
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def softmaxes(self, scores: Sequence[mx.array]) -> list[Softmax]:
        """Compute several softmaxes. The scores are overwritten: only the caller may hold them.

        Args:
            scores: `[..., n]` each; each row has one that is not -inf.
        """
        return [
            Softmax(
                mx.softmax(array, axis=-1, precise=True),
                mx.logsumexp(array.astype(mx.float32), axis=-1, keepdims=True),
            )
            for array in scores
        ]

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        """Multiply `silu(gate)` and `x`, which have one shape."""
        result: mx.array = activations.swiglu(gate, x)
        return result

    def gated_delta(self, q: mx.array, *others: Any, **options: Any) -> tuple[mx.array, mx.array]:
        """Compute the gated delta rule, with the signature of mlx-lm's `gated_delta_update`."""
        if self.launches_layers and q.shape[1] > 1:
            launch(q)  # with all that is before it, as a layer that attends does
        return self._delta_rule(q, *others, **options)

    def _delta_rule(self, q: mx.array, *others: Any, **options: Any) -> tuple[mx.array, mx.array]:
        result: tuple[mx.array, mx.array] = gated_delta.gated_delta_update(q, *others, **options)
        return result

    def convolution(self, layer: Any) -> type | None:
        """The class that computes a convolution in the place of its own; None to leave it."""
        del layer
        return None


METAL = Backend()
