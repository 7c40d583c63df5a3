"""Attention in parts: one softmax for each set of keys, then a merge.

A part has the output of a set of keys, and the log of the sum of the exponentials of its scores.
Parts merge exactly (cascade inference; Hydragen, arXiv:2402.05099).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ..backends.base import Backend, Softmax
from ..params import KVQuantization

Segment = tuple[mx.array, ...]
"""A layer's tensors of consecutive tokens, `[1, kv_heads, tokens, size]` each: keys and values;
MLA's latents and the keys' rotated part; or, where these are quantised, the packed numbers, scales
and biases of keys, then those of values."""

Queries = tuple[mx.array, ...]
"""Queries, `[..., n, size]`. MLA has two arrays: those of latents, and those of the keys' rotated
part. They stay separate: CUDA's products copy a slice of an array."""


class Products:
    """The two products of attention. These are for plain keys and values."""

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """Multiply queries with keys: `[..., n, tokens]`."""
        (of_keys,) = queries
        return of_keys @ segment[0].swapaxes(-1, -2)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """Sum values by their shares `[..., n, tokens]`: `[..., n, size of a value]`."""
        return shares @ segment[1]


PLAIN = Products()


@dataclass(frozen=True)
class Latent(Products):
    """MLA: latents, which are keys and values at once, and the keys' rotated part.

    Attributes:
        scale: of the scores of latents. The model has scaled the queries of the rotated part.
    """

    scale: float

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """See `Products`."""
        of_latents, of_rotated = queries
        latents, rotated = segment
        scores = of_latents @ latents.swapaxes(-1, -2)
        return mx.addmm(scores, of_rotated, rotated.swapaxes(-1, -2), beta=self.scale)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return shares @ segment[0]


@dataclass(frozen=True)
class Quantized(Products):
    """Quantised keys and values, which are never unpacked."""

    quantization: KVQuantization

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """See `Products`."""
        (of_keys,) = queries
        return self._product(of_keys, segment[:3], transposed=True)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return self._product(shares, segment[3:], transposed=False)

    def _product(self, left: mx.array, right: Segment, *, transposed: bool) -> mx.array:
        bits, group_size = self.quantization
        packed, scales, biases = right
        return mx.quantized_matmul(
            left, packed, scales, biases, transpose=transposed, group_size=group_size, bits=bits
        )


class Part(NamedTuple):
    """One part's attention, for rows of queries.

    Attributes:
        output: `[..., n, size]`.
        lse: `[..., n, 1]`, in fp32; -inf for a row that does not read this part.
    """

    output: mx.array
    lse: mx.array


def scores_of(
    queries: Queries, segments: Sequence[Segment], products: Products = PLAIN
) -> mx.array:
    """Multiply queries with the keys of consecutive segments: `[..., n, tokens]`."""
    scores = [products.scores(queries, segment) for segment in segments]
    return scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)


def part_of(softmax: Softmax, segments: Sequence[Segment], products: Products = PLAIN) -> Part:
    """Sum the values of consecutive segments by their shares."""
    shares, lse = softmax
    done, sums = 0, []
    for segment in segments:
        length = segment[1].shape[-2]
        part = shares if len(segments) == 1 else shares[..., done : done + length]
        sums.append(products.weighed(part, segment))
        done += length
    return Part(sum(sums[1:], sums[0]), lse)


def of_rows(queries: Queries, members: mx.array | None) -> Queries:
    """Take the queries `[rows, ...]` of some rows; None takes all."""
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
    """Give each row its part of what was computed `together`.

    Args:
        part: of all members.
        members: as in `together`.
        shape: of all rows' queries. Other rows get a weight of 0.
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


def merge(parts: Sequence[Part], sinks: mx.array | None, device: Backend) -> mx.array:
    """Merge parts of the same rows; every row reads one part at least.

    Args:
        parts: `[B, kv_heads, group, ...]` each.
        sinks: `[heads]` logits that take weight and add no value, or None.
        device: says if this is compiled into one kernel.

    Returns:
        `[B, kv_heads, group, size]`.
    """
    if sinks is None:
        if len(parts) == 1:
            return parts[0].output
        return _merged_in_one(parts) if device.compiles else _merged(parts)
    _, kv_heads, group, _ = parts[0].lse.shape
    sinks = sinks.reshape(1, kv_heads, group, 1).astype(mx.float32)
    return _merged_in_one(parts, sinks) if device.compiles else _merged(parts, sinks)


def _merged(parts: Sequence[Part], sinks: mx.array | None = None) -> mx.array:
    top = parts[0].lse
    for part in parts[1:]:
        top = mx.maximum(top, part.lse)
    if sinks is not None:
        top = mx.maximum(top, sinks)
    weights = [mx.exp(part.lse - top) for part in parts]
    outputs = [weight * part.output for weight, part in zip(weights, parts, strict=True)]
    total = sum(weights[1:], weights[0])
    if sinks is not None:
        total = total + mx.exp(sinks - top)
    return (sum(outputs[1:], outputs[0]) / total).astype(parts[0].output.dtype)


_merged_in_one = mx.compile(_merged)
