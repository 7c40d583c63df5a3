"""Attention of prompts on CUDA, padded to few shapes.

In MLX, cuDNN plans attention for the exact numbers of queries and keys and for their strides
(`scaled_dot_product_attention.cpp` of MLX 0.32). A plan takes the host 35 ms (H200) to 100 ms
(H100); the kernel takes microseconds. Nearly every chunk of a prompt has another number of keys, so
queries and keys are padded to one of few sizes, in one piece: a process plans each shape once.
"""

from typing import NamedTuple

import mlx.core as mx

LARGEST = 128
"""Size of the largest heads for which cuDNN has a kernel; MLX computes others by products."""
_STEP = 512
"""Multiple of tokens: padding is shorter than this, and 8,000 tokens have 16 sizes."""


class Shape(NamedTuple):
    """Numbers of tokens for which a kernel is planned.

    Attributes:
        queries: padded number of queries.
        keys: padded number of keys, of which the last are the queries' own.
    """

    queries: int
    keys: int


def shape_of(count: int, held: int) -> Shape:
    """The padded shape of `count` queries over `held` keys, their own included."""
    keys = _size(held)
    return Shape(_rounded(count + keys - held, keys), keys)


def attend_causally(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Compute causal attention by MLX's kernel, in one of few shapes.

    Padding adds as many queries as keys at the end: the last query still belongs to the last key,
    so the kernel's causal mask holds, and no real query sees a padded key. Further queries are
    added in front, up to a multiple of 512.

    Args:
        queries: `[B, heads, T, size]`.
        keys: `[B, kv_heads, N, size]`, of which the last T are the queries' own.
        values: likewise.
        scale: of the scores.
        sinks: `[heads]`, or None.

    Returns:
        `[B, heads, T, size of a value]`.
    """
    count = queries.shape[2]
    shape = shape_of(count, keys.shape[2])
    behind = shape.keys - keys.shape[2]
    before = shape.queries - count - behind
    attended = mx.fast.scaled_dot_product_attention(
        _padded(queries, before, behind),
        _padded(keys, 0, behind),
        _padded(values, 0, behind),
        scale=scale,
        mask="causal",
        sinks=sinks,
    )
    return attended[:, :, before : before + count]


def _size(count: int) -> int:
    """Round up to a power of two, or to a multiple of the step."""
    return 1 << (count - 1).bit_length() if count < _STEP else -(-count // _STEP) * _STEP


def _rounded(count: int, keys: int) -> int:
    """Round queries up to a multiple of the step, or of all keys where these are fewer."""
    step = min(_STEP, keys)
    return -(-count // step) * step


def _padded(array: mx.array, before: int, behind: int) -> mx.array:
    if not before + behind:
        return mx.contiguous(array)  # as a padded array is

    return mx.pad(array, [(0, 0), (0, 0), (before, behind), (0, 0)])
