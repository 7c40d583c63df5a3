"""The arithmetic of attention in parts: each part one softmax of its own, then merged.

A part is what a set of keys contributes: the values weighted by `exp(score - top)`, the
largest score `top`, and the sum `total` of these weights. Parts merge exactly (cascade
inference; Hydragen, arXiv:2402.05099; FlashAttention's rescaling, arXiv:2205.14135).

On a GPU the functions are compiled, which fuses what stands between the products. On the CPU
MLX would compile each by starting a C++ compiler, for nothing: the products take the time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx

Segment = tuple[mx.array, ...]
"""Keys and values, `[1, kv_heads, tokens, size]` each."""

F = TypeVar("F", bound=Callable[..., Any])


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


def on_gpu(function: F) -> F:
    """Compile a function where the default device is a GPU."""
    if mx.default_device().type == mx.DeviceType.gpu:
        return cast("F", mx.compile(function))
    return function


@on_gpu
def over_run(queries: mx.array, segments: Sequence[Segment]) -> Part:
    """Attend to segments that follow each other.

    Args:
        queries: `[1, kv_heads, n, size]`, scaled.
        segments: what all n look at.
    """
    scores = [queries @ segment[0].swapaxes(-1, -2) for segment in segments]
    joined = mx.concatenate(scores, axis=-1) if len(scores) > 1 else scores[0]
    joined = joined.astype(mx.float32)
    top = joined.max(axis=-1, keepdims=True)
    shares = mx.exp(joined - top)
    total = shares.sum(axis=-1, keepdims=True)
    shares = shares.astype(queries.dtype)
    done, output = 0, None
    for segment in segments:
        values = segment[1]
        length = values.shape[-2]
        product = shares[..., done : done + length] @ values
        output = product if output is None else output + product
        done += length
    return Part(cast("mx.array", output), top, total)


@on_gpu
def over_rows(queries: mx.array, keys: mx.array, values: mx.array) -> Part:
    """Attend from each row to its own keys, all of them.

    Args:
        queries: `[B, kv_heads, group, size]`, scaled.
        keys: `[B, kv_heads, columns, size]`.
        values: likewise.
    """
    return _over_rows(queries, keys, values, None)


@on_gpu
def over_masked_rows(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> Part:
    """Attend from each row to its own keys, where `mask` (`[B, 1, 1, columns]`) is true."""
    return _over_rows(queries, keys, values, mask)


def _over_rows(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> Part:
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    shares = mx.exp(scores - top)
    total = shares.sum(axis=-1, keepdims=True)
    return Part(shares.astype(queries.dtype) @ values, top, total)


@on_gpu
def merged(parts: Sequence[Part]) -> mx.array:
    """Merge parts of the same rows; every row looks at one part at least."""
    output, total, _ = _summed(parts, _top(parts))
    return output / total


@on_gpu
def merged_with_sinks(parts: Sequence[Part], sinks: mx.array) -> mx.array:
    """Merge parts, and logits `[1, kv_heads, group, 1]` that take weight and give nothing."""
    output, total, top = _summed(parts, mx.maximum(_top(parts), sinks))
    return output / (total + mx.exp(sinks - top))


def _top(parts: Sequence[Part]) -> mx.array:
    top = parts[0].top
    for part in parts[1:]:
        top = mx.maximum(top, part.top)
    return top


def _summed(parts: Sequence[Part], top: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    outputs, totals = [], []
    for part in parts:
        weight = mx.exp(part.top - top)
        outputs.append(weight * part.output)
        totals.append(weight * part.total)
    return sum(outputs[1:], outputs[0]), sum(totals[1:], totals[0]), top
