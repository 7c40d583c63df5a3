"""Attention of prompts where a kernel is planned for each shape that it meets.

On CUDA MLX has cuDNN plan attention for the exact numbers of queries and keys, and keeps 256 of
these plans. To make one takes the host a tenth of a second; what a plan runs takes microseconds
(`scaled_dot_product_attention.cpp` of MLX 0.32). Nearly every chunk of a prompt has another number
of keys. So queries and keys are padded to one of few sizes.
"""

import mlx.core as mx

LARGEST = 128
"""Size of the largest heads for which cuDNN has a kernel; MLX computes others by products."""
_STEP = 512
"""Tokens: a chunk attends for fewer than so many in vain, and 8,000 tokens have 16 such sizes."""


def attend_causally(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Compute causal attention by MLX's kernel, in one of few shapes.

    As many queries as keys are added at the end: the last query still is the last key's, so that
    the kernel's own mask holds, and no query that counts sees a key that was added. What queries
    still lack of a multiple of the step is added before them.

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
    held = _size(keys.shape[2])
    behind = held - keys.shape[2]
    before = -(count + behind) % min(_STEP, held)
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


def _padded(array: mx.array, before: int, behind: int) -> mx.array:
    if not before + behind:
        return array  # which MLX would copy
    return mx.pad(array, [(0, 0), (0, 0), (before, behind), (0, 0)])
