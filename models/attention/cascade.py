"""The arithmetic of attention in parts: each part one softmax of its own, then merged.

A part is what a set of keys contributes on its own: its output, and the log of the sum of the
exponentials of its scores. Parts merge exactly (cascade inference; Hydragen, arXiv:2402.05099).
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..backends import Backend, Softmax
from .products import PLAIN, Products, Queries, Segment


class Part(NamedTuple):
    """One part's attention, for rows of queries.

    Attributes:
        output: `[..., n, size]`.
        lse: `[..., n, 1]`, in fp32; -inf for a row that does not look here.
    """

    output: mx.array
    lse: mx.array


def scores_of(
    queries: Queries, segments: Sequence[Segment], products: Products = PLAIN
) -> mx.array:
    """Multiply queries with the keys of segments in a row: `[..., n, tokens]`."""
    scores = [products.scores(queries, segment) for segment in segments]
    return scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)


def of_rows(queries: Queries, members: mx.array | None) -> Queries:
    """Take the queries of some rows.

    Args:
        queries: `[rows, ...]`.
        members: numbers of the rows; None for all.
    """
    return queries if members is None else tuple(each[members] for each in queries)


def together(queries: Queries, members: mx.array | None) -> Queries:
    """Put the queries of some rows side by side, as if they were one sequence.

    Args:
        queries: `[rows, kv_heads, n, size]`.
        members: numbers of the rows; None for all.

    Returns:
        `[1, kv_heads, members * n, size]`.
    """
    return tuple(
        each.transpose(1, 0, 2, 3).reshape(1, each.shape[1], -1, each.shape[3])
        for each in of_rows(queries, members)
    )


def spread(part: Part, members: mx.array | None, shape: tuple[int, ...]) -> Part:
    """Give rows back what was computed for them `together`.

    Args:
        part: of all of them.
        members: as before.
        shape: of all rows' queries. Rows that are no members have looked at nothing.
    """
    rows, kv_heads, count, _ = shape
    back = Part(*[x.reshape(kv_heads, -1, count, x.shape[-1]).swapaxes(0, 1) for x in part])
    if members is None:
        return back
    scattered = []
    for x, fill in zip(back, (0.0, -mx.inf), strict=True):
        empty = mx.full((rows, *x.shape[1:]), fill, x.dtype)
        empty[members] = x
        scattered.append(empty)
    return Part(*scattered)


def part_of(softmax: Softmax, segments: Sequence[Segment], products: Products = PLAIN) -> Part:
    """Weigh the values of segments in a row."""
    shares, lse = softmax
    done, sums = 0, []
    for segment in segments:
        length = segment[1].shape[-2]
        part = shares if len(segments) == 1 else shares[..., done : done + length]
        sums.append(products.weighed(part, segment))
        done += length
    return Part(sum(sums[1:], sums[0]), lse)


def merge(parts: Sequence[Part], sinks: mx.array | None, device: Backend) -> mx.array:
    """Merge parts of the same rows; every row looks at one part at least.

    Args:
        parts: `[B, kv_heads, group, ...]` each.
        sinks: `[heads]` logits that take weight and give nothing, or None.
        device: says whether this is compiled into one kernel.

    Returns:
        `[B, kv_heads, group, size]`.
    """
    if sinks is None:
        if len(parts) == 1:
            return parts[0].output
        return _merged_in_one(parts) if device.compiles else _merged(parts)
    _, kv_heads, group, _ = parts[0].lse.shape
    sinks = sinks.reshape(1, kv_heads, group, 1).astype(mx.float32)
    if device.compiles:
        return _merged_with_sinks_in_one(parts, sinks)
    return _merged_with_sinks(parts, sinks)


def _merged(parts: Sequence[Part]) -> mx.array:
    output, total, _ = _summed(parts, _top(parts))
    return (output / total).astype(parts[0].output.dtype)


def _merged_with_sinks(parts: Sequence[Part], sinks: mx.array) -> mx.array:
    output, total, top = _summed(parts, mx.maximum(_top(parts), sinks))
    return (output / (total + mx.exp(sinks - top))).astype(parts[0].output.dtype)


def _top(parts: Sequence[Part]) -> mx.array:
    top = parts[0].lse
    for part in parts[1:]:
        top = mx.maximum(top, part.lse)
    return top


def _summed(parts: Sequence[Part], top: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    weights = [mx.exp(part.lse - top) for part in parts]
    outputs = [weight * part.output for weight, part in zip(weights, parts, strict=True)]
    return sum(outputs[1:], outputs[0]), sum(weights[1:], weights[0]), top


_merged_in_one = mx.compile(_merged)
_merged_with_sinks_in_one = mx.compile(_merged_with_sinks)
