"""The two products of attention, by what a layer keeps of a token.

A segment holds a layer's tensors of some tokens, and queries what meets these.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

_SMALL, _THREADS = 1200, 1 << 18
_LEAST = 64  # keys of a piece: what a call costs is more than what it saves below

Segment = tuple[mx.array, ...]
"""A layer's tensors of consecutive tokens, `[1, kv_heads, tokens, size]` each."""

Queries = tuple[mx.array, ...]
"""What meets keys, `[..., n, size]`. In MLA it is two arrays: what meets latents, and what meets
the keys' rotated part. They stay apart: CUDA's products copy what is cut out of one."""


class Products(Protocol):
    """How queries meet keys, and shares meet values."""

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


class Pieced(Plain):
    """Keys and values of few queries on a CPU, where OpenBLAS multiplies.

    For keys as they lie it has kernels that read them twice as fast as its general one does, but
    takes these for products of at most 1,200 results. So keys are multiplied piece by piece. From
    2^18 multiplications on its general one has a thread for each core, and is not slower
    (OpenBLAS 0.3.21, `sgemm_small_kernel_permit_skylakex.c` and `interface/gemm.c`).
    """

    def scores(self, queries: Queries, segment: Segment) -> mx.array:
        """See `Products`."""
        (asked,), keys = queries, segment[0]
        rows, heads, tokens, size = keys.shape
        count = asked.shape[-2]
        pieces = _pieces(tokens, count, size)
        if pieces == 1:
            return super().scores(queries, segment)
        cut = keys.reshape(rows, heads, pieces, tokens // pieces, size)
        scores = asked[:, :, None] @ cut.swapaxes(-1, -2)
        return scores.swapaxes(2, 3).reshape(rows, heads, count, tokens)


def _pieces(tokens: int, count: int, size: int) -> int:
    """In how many pieces so many keys are multiplied with so many queries, all equally long."""
    if count * tokens <= _SMALL or count * tokens * size >= _THREADS:
        return 1
    fitting = range(2, tokens // _LEAST + 1)
    cuts = (n for n in fitting if tokens % n == 0 and tokens // n * count <= _SMALL)
    return next(cuts, 1)


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
PIECED = Pieced()
