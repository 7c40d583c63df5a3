"""The arithmetic of attention in parts: each part one softmax of its own, then merged.

A part is what a set of keys contributes: the values weighted by `exp(score - top)`, the
largest score `top`, and the sum `total` of these weights. Parts merge exactly (cascade
inference; Hydragen, arXiv:2402.05099; FlashAttention's rescaling, arXiv:2205.14135).
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .softmax import Weights, on_gpu

Segment = tuple[mx.array, ...]
"""Keys and values, `[1, kv_heads, tokens, size]` each."""


class Part(NamedTuple):
    """One part's share of attention, for rows of queries.

    Attributes:
        output: `[..., n, size]`, weighted by `exp(score - top)`.
        top: `[..., n, 1]`, the largest score; -inf for a row that does not look here.
        total: `[..., n, 1]`, the sum of the weights.
    """

    output: mx.array
    top: mx.array
    total: mx.array


def scores_of(queries: mx.array, segments: Sequence[Segment]) -> mx.array:
    """Multiply queries `[..., n, size]`, scaled, with the keys of segments in a row."""
    scores = [queries @ segment[0].swapaxes(-1, -2) for segment in segments]
    return scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)


def part_of(weights: Weights, segments: Sequence[Segment]) -> Part:
    """Weigh the values of segments in a row."""
    dtype = segments[0][1].dtype
    done, products = 0, []
    for segment in segments:
        length = segment[1].shape[-2]
        shares = weights.shares[..., done : done + length] if len(segments) > 1 else weights.shares
        products.append(shares.astype(dtype) @ segment[1])
        done += length
    return Part(sum(products[1:], products[0]), weights.top, weights.total)


def merge(parts: Sequence[Part], sinks: mx.array | None) -> mx.array:
    """Merge parts of the same rows; every row looks at one part at least.

    Args:
        parts: `[B, kv_heads, group, ...]` each.
        sinks: `[heads]` logits that take weight and give nothing, or None.

    Returns:
        `[B, kv_heads, group, size]`, in fp32.
    """
    if sinks is None:
        return _merged(parts)
    _, kv_heads, group, _ = parts[0].top.shape
    return _merged_with_sinks(parts, sinks.reshape(1, kv_heads, group, 1).astype(mx.float32))


@on_gpu
def _merged(parts: Sequence[Part]) -> mx.array:
    output, total, _ = _summed(parts, _top(parts))
    return output / total


@on_gpu
def _merged_with_sinks(parts: Sequence[Part], sinks: mx.array) -> mx.array:
    output, total, top = _summed(parts, mx.maximum(_top(parts), sinks))
    return output / (total + mx.exp(sinks - top))


def _top(parts: Sequence[Part]) -> mx.array:
    top = parts[0].top
    for part in parts[1:]:
        top = mx.maximum(top, part.top)
    return top


def _summed(parts: Sequence[Part], top: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    if len(parts) == 1 and top is parts[0].top:
        return parts[0].output, parts[0].total, top
    outputs, totals = [], []
    for part in parts:
        weight = mx.exp(part.top - top)
        outputs.append(weight * part.output)
        totals.append(weight * part.total)
    return sum(outputs[1:], outputs[0]), sum(totals[1:], totals[0]), top
