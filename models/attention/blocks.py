"""Attention to keys that lie in one piece.

Where MLX's kernels are not used, block by block: on the CPU they have a slow softmax (see
`softmax`), and compute the half of the scores that a causal mask throws away.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..load.device import DevicePolicy
from .planned import LARGEST, attend_causally
from .softmax import softmaxes

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 128
"""Queries at a time: scores stay in the processor's cache, and little is masked."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
    device: DevicePolicy,
) -> mx.array:
    """Compute attention: by MLX's fused kernel, or block by block in fp32.

    Args:
        queries: `[B, heads, T, size]`.
        keys: `[B, kv_heads, N, size]`.
        values: likewise.
        scale: of the scores.
        mask: None, "causal", or an array that broadcasts to `[B, heads, T, N]`: true where a
            query may look, or what is added to the scores.
        sinks: `[heads]`, or None.
        device: says which.

    Returns:
        `[B, heads, T, size of a value]`.
    """
    _, _, count, size = queries.shape
    if device.plans_attention and isinstance(mask, str) and count > 1 and size <= LARGEST:
        return attend_causally(queries, keys, values, scale, sinks)
    if device.fused or queries.dtype != mx.float32:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )
    batch, heads = queries.shape[:2]
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
        outputs.append(_weighted(scores, values[:, :, :seen], sinks, device))
        if count > BLOCK:
            mx.eval(outputs[-1])  # frees the block's scores before the next one's are made
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3)
    return joined.reshape(batch, heads, count, -1)


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
    """Mask, in place, what the last tokens must not see: whatever comes after each of them."""
    mx.eval(scores)
    count = scores.shape[-2]
    view: NDArray[np.float32] = np.array(scores, copy=False)
    view[..., -count:] += _ahead(count)
    return scores


@lru_cache(maxsize=8)
def _ahead(count: int) -> "NDArray[np.float32]":
    """What is added to the scores of `count` tokens and themselves; every layer asks for it."""
    return np.triu(np.full((count, count), -np.inf, np.float32), 1)


def _weighted(
    scores: mx.array, values: mx.array, sinks: mx.array | None, device: DevicePolicy
) -> mx.array:
    batch, kv_heads, group, count, _ = scores.shape
    ((shares, lse),) = softmaxes([scores], device)
    shares = shares.reshape(batch, kv_heads, group * count, -1)
    output = (shares @ values).reshape(batch, kv_heads, group, count, -1)
    return output if sinks is None else output * mx.sigmoid(lse - sinks)
