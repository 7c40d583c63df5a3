"""The two products of attention, by what a layer keeps of a token.

Queries are `[..., n, size]` and scaled; a segment holds a layer's tensors of some tokens.
"""

from typing import Protocol

import mlx.core as mx

Segment = tuple[mx.array, ...]
"""A layer's tensors of consecutive tokens, `[1, kv_heads, tokens, size]` each."""


class Products(Protocol):
    """How queries meet keys, and shares meet values."""

    def scores(self, queries: mx.array, segment: Segment) -> mx.array:
        """Multiply queries with keys: `[..., n, tokens]`."""
        ...

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """Sum values by their shares `[..., n, tokens]`: `[..., n, size of a value]`."""
        ...


class Plain:
    """Keys and values."""

    def scores(self, queries: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return queries @ segment[0].swapaxes(-1, -2)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return shares @ segment[1]


class Latent:
    """MLA: latents, which are keys and values at once, and the keys' rotated part.

    Queries are those of both parts in a row, the latent's first.
    """

    def scores(self, queries: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        latents, rotated = segment
        size = latents.shape[-1]
        scores = queries[..., :size] @ latents.swapaxes(-1, -2)
        return scores + queries[..., size:] @ rotated.swapaxes(-1, -2)

    def weighed(self, shares: mx.array, segment: Segment) -> mx.array:
        """See `Products`."""
        return shares @ segment[0]


PLAIN = Plain()
LATENT = Latent()
