"""Queries and keys of a decode step rotated by one kernel on CUDA, for what attends to them next.

MLX rotates each by itself, and the products with what rows share then need the queries copied so
that those of a head of keys lie side by side. That is three launches a layer, of which a step of a
batch has too many. The arithmetic is that of MLX (`mlx/backend/cuda/rope.cu` of MLX 0.32).
"""

import math
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from .attention.softmax_kernel import TYPES, number

_THREADS = 256  # of a block; each rotates a pair of numbers
_SOURCE = """
  constexpr int Heads = KV * (G + 1);  // those of queries first
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int j = i % (D / 2);
  const int head = i / (D / 2) % Heads;
  const int row = i / (D / 2) / Heads;
  const int rows = positions_shape[0];
  if (row >= rows) {
    return;
  }
  const bool asks = head < KV * G;
  const T* read = asks ? queries + row * queries_strides[0] + head * queries_strides[1]
                       : keys + row * keys_strides[0] + (head - KV * G) * keys_strides[1];
  const size_t step = asks ? queries_strides[3] : keys_strides[3];
  T* write = asks ? grouped + ((static_cast<size_t>(head / G) * rows + row) * G + head % G) * D
                  : rotated + (static_cast<size_t>(row) * KV + head - KV * G) * D;
  if (j >= Dims / 2) {  // what is not rotated
    for (int n = 2 * j; n < 2 * j + 2; ++n) {
      write[n] = read[n * step];
    }
    return;
  }
  const float part = static_cast<float>(j) / (Dims / 2);
  const float inverse = Listed ? 1.0f / frequencies[j] : exp2f(-part * log_base[0]);
  const float theta = scale[0] * static_cast<float>(positions[row]) * inverse;
  const float cosine = cosf(theta);
  const float sine = sinf(theta);
  const float one = static_cast<float>(read[j * step]);
  const float other = static_cast<float>(read[(j + Dims / 2) * step]);
  write[j] = static_cast<T>(one * cosine - other * sine);
  write[j + Dims / 2] = static_cast<T>(one * sine + other * cosine);
"""


class Turn(NamedTuple):
    """By how much a module rotates.

    Attributes:
        dims: numbers of a head that are rotated, the first ones.
        scale: of positions.
        base: whose powers are the frequencies.
        frequencies: `[dims / 2]`, in the place of these; None where there is a base.
    """

    dims: int
    scale: float
    base: float
    frequencies: mx.array | None


def reads(x: mx.array, positions: mx.array, dims: int) -> bool:
    """Whether `rotate` knows queries or keys of this shape and type: of one token a row."""
    token = x.ndim == 4 and x.shape[2] == 1 and positions.shape == x.shape[:1]  # noqa: PLR2004
    known = x.dtype in TYPES and positions.dtype == mx.int32
    return token and known and x.shape[3] % 2 == dims % 2 == 0


def pairs(queries: mx.array, keys: mx.array) -> bool:
    """Whether these may be queries and keys of one layer."""
    (rows, heads, _, size), (others, kv_heads, _, key_size) = queries.shape, keys.shape
    alike = (rows, size, queries.dtype) == (others, key_size, keys.dtype)
    return alike and heads % kv_heads == 0


def rotate(
    queries: mx.array, keys: mx.array, positions: mx.array, turn: Turn
) -> tuple[mx.array, mx.array]:
    """Rotate a token's queries and keys in each row.

    Args:
        queries: `[rows, heads, 1, size]`.
        keys: `[rows, kv_heads, 1, size]`.
        positions: `[rows]`.
        turn: by how much.

    Returns:
        The queries by the heads of keys that they ask, `[rows, kv_heads, group, size]`, and the
        keys. In memory those of one head of keys follow each other.
    """
    rows, heads, _, size = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    threads = rows * (heads + kv_heads) * size // 2
    listed = turn.frequencies is not None
    grouped, rotated = kernel()(
        inputs=[
            *(queries, keys, positions, number(turn.scale)),
            number(1.0 if listed else math.log2(turn.base)),
            turn.frequencies if listed else number(1.0),
        ],
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("Dims", turn.dims),
            ("G", group),
            ("KV", kv_heads),
            ("Listed", listed),
        ],
        grid=(-(-threads // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(kv_heads, rows, group, size), keys.shape],
        output_dtypes=[queries.dtype, keys.dtype],
    )
    return grouped.swapaxes(0, 1), rotated


@cache
def kernel() -> Any:
    """The kernel; made once."""
    return mx.fast.cuda_kernel(
        name="rotate",
        input_names=["queries", "keys", "positions", "scale", "log_base", "frequencies"],
        output_names=["grouped", "rotated"],
        source=_SOURCE,
        ensure_row_contiguous=False,  # queries and keys are parts of one product
    )
