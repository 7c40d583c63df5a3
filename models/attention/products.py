"""The two products of attention, by what a layer keeps of a token.

A segment holds a layer's tensors of some tokens, and queries what meets these.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

Segment = tuple[mx.array, ...]
"""A layer's tensors of consecutive tokens, `[1, kv_heads, tokens, size]` each."""

Queries = tuple[mx.array, ...]
"""Queries, `[..., n, size]`. MLA has two arrays: those of latents, and those of the keys' rotated
part. They stay separate: CUDA's products copy a slice of an array."""


class Products(Protocol):
    """The products of queries with keys, and of shares with values."""

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """Multiply queries with keys: `[..., n, tokens]`."""
        ...

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """Sum values by their shares `[..., n, tokens]`: `[..., n, size of a value]`."""
        ...


class Plain:
    """Keys and values."""

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """See `Products`."""
        (asked,) = queries
        return asked @ segment[0].swapaxes(-1, -2)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return shares @ segment[1]


@dataclass(frozen=True)
class Latent:
    """MLA: latents, which are keys and values at once, and the keys' rotated part.

    Attributes:
        scale: of the scores of latents. The model has scaled the queries of the rotated part.
    """

    scale: float

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """See `Products`."""
        asked, rotated_asked = queries
        latents, rotated = segment
        scores = asked @ latents.swapaxes(-1, -2)
        return mx.addmm(scores, rotated_asked, rotated.swapaxes(-1, -2), beta=self.scale)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return shares @ segment[0]


PLAIN = Plain()
