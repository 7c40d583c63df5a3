"""The CPU: fp32, attention block by block, softmax and SiLU through NumPy.

MLX's exponential on x86 is scalar: about 20 ns an element, so that a prompt of 540 tokens spends
half its prefill in it, and SiLU a third of the rest. NumPy's is vectorised, ten times faster. So
scores and gates in fp32 are evaluated, and then changed in MLX's own buffer through a NumPy view.
Attention is cut into blocks: MLX's own computes the half of the scores that a causal mask drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from . import Limits
from .base import Backend, Softmax

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 128
"""Queries at a time: scores stay in the processor's cache, and little is masked."""

# Products take all the time: OpenBLAS multiplies 8 rows in less time than 6, and 16 in less than
# 12. Beside streams 28 tokens of SmolLM2 took 180 ms on two cores.
LIMITS = Limits(
    fp32=True,
    overlaps=False,
    warms_up=False,
    host_reads=True,
    prefill_chunk=512,
    max_stall=0.4,
    freed_bytes=0,
    row_multiple=8,
)


@dataclass(frozen=True)
class Cpu(Backend):
    """Exponentials by NumPy, where they are many and in fp32. Nothing starts a C++ compiler.

    Attributes:
        host_gates: gates of a layer from which SiLU's exponentials are NumPy's. To wait for a few
            thousand, those of two tokens of SmolLM2, takes longer than MLX's exponential does.
    """

    limits: Limits = LIMITS
    block: int | None = BLOCK
    compiles: bool = False
    host_gates: int = 4096

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
        if queries.dtype != mx.float32:
            return super().attend(queries, keys, values, scale, mask, sinks)
        batch, heads, count, size = queries.shape
        kv_heads, held = keys.shape[1], keys.shape[2]
        grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads, count, size)
        if sinks is not None:
            sinks = sinks.reshape(1, kv_heads, -1, 1, 1)
        outputs = []
        for start in range(0, count, BLOCK):
            end = min(start + BLOCK, count)
            seen = held - count + end if isinstance(mask, str) else held
            block = grouped[:, :, :, start:end].reshape(batch, kv_heads, -1, size)
            scores = block @ keys[:, :, :seen].swapaxes(-1, -2)
            scores = scores.reshape(batch, kv_heads, -1, end - start, seen)
            scores = _masked(scores, mask, start, end)
            outputs.append(self._weighted(scores, values[:, :, :seen], sinks))
            if count > BLOCK:
                mx.eval(outputs[-1])  # frees the block's scores before the next one's are made
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3)
        return joined.reshape(batch, heads, count, -1)

    def _weighted(self, scores: mx.array, values: mx.array, sinks: mx.array | None) -> mx.array:
        batch, kv_heads, group, count, _ = scores.shape
        ((shares, lse),) = self.softmaxes([scores])
        shares = shares.reshape(batch, kv_heads, group * count, -1)
        output = (shares @ values).reshape(batch, kv_heads, group, count, -1)
        return output if sinks is None else output * mx.sigmoid(lse - sinks)

    def softmaxes(self, scores: Sequence[mx.array]) -> list[Softmax]:
        """See `Backend`."""
        if not all(array.dtype == mx.float32 for array in scores):
            return super().softmaxes(scores)
        mx.eval(list(scores))
        return [_softmax(array) for array in scores]

    def swiglu(self, gate: mx.array, x: mx.array) -> mx.array:
        """See `Backend`."""
        if gate.dtype != mx.float32:
            return super().swiglu(gate, x)
        if gate.size < self.host_gates:
            return gate * mx.sigmoid(gate) * x
        divisor = -gate  # of its own memory: others may hold the gate
        mx.eval(divisor, x)
        view = np.array(divisor, copy=False)
        with np.errstate(over="ignore"):  # a number divided by infinity is 0, as SiLU is there
            np.exp(view, out=view)
        view += 1
        return gate / divisor * x


CPU = Cpu()


def _masked(scores: mx.array, mask: mx.array | str | None, start: int, end: int) -> mx.array:
    if mask is None:
        return scores
    if isinstance(mask, str):
        return _looking_back(scores)
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask[..., start:end, :]
    while mask.ndim < 4:  # noqa: PLR2004  (batch, heads, queries, keys)
        mask = mask[None]
    heads = mask.shape[1]
    by_group = (scores.shape[1], scores.shape[2]) if heads > 1 else (1, 1)
    mask = mask.reshape(mask.shape[0], *by_group, *mask.shape[2:])
    return mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask


def _looking_back(scores: mx.array) -> mx.array:
    """Mask, in place, the tokens after each query's own."""
    mx.eval(scores)
    count = scores.shape[-2]
    view: NDArray[np.float32] = np.array(scores, copy=False)
    view[..., -count:] += _ahead(count)
    return scores


@lru_cache(maxsize=8)
def _ahead(count: int) -> "NDArray[np.float32]":
    """The causal mask of `count` tokens over themselves, to add; all layers use it."""
    return np.triu(np.full((count, count), -np.inf, np.float32), 1)


def _softmax(scores: mx.array) -> Softmax:
    """Turn scores into shares in place."""
    view: NDArray[np.float32] = np.array(scores, copy=False)
    top = view.max(axis=-1, keepdims=True)
    view -= top
    np.exp(view, out=view)
    total = view.sum(axis=-1, keepdims=True)
    view /= total
    return Softmax(scores, mx.array(top + np.log(total)))
