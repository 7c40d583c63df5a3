"""Rows of an array: more of them, or fewer."""

import mlx.core as mx


def resized(tensor: mx.array, rows: int) -> mx.array:
    """Have this many rows of zeros or of what was there; those beyond are dropped."""
    more = rows - tensor.shape[0]
    if more > 0:
        return mx.pad(tensor, [(0, more), *[(0, 0)] * (tensor.ndim - 1)])
    return mx.contiguous(tensor[:rows])  # a slice would keep what was dropped in memory
