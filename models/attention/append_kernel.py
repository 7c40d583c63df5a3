"""A decode step's rotations, and the write of its keys and values, as one kernel on CUDA.

MLX rotates queries and keys, the products with what rows share need a copy of the queries in which
those of a head of keys lie side by side, and keys and values are written into the rows' buffers:
five launches a layer and a dozen views, of which a step of a batch has too many. The arithmetic is
that of MLX (`mlx/backend/cuda/rope.cu` of MLX 0.32).

Keys and values are written where they belong, into arrays that the kernel is given and that MLX
takes for read. Decision 38 says why nobody can see one half of it.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..step_arrays import Cut
from .softmax_kernel import TYPES, number

_THREADS = 256  # of a block; each has two numbers
_SOURCE = """
  constexpr int Heads = KV * (G + 2);  // of queries, of keys, and of values
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int j = i % (D / 2);
  const int head = i / (D / 2) % Heads;
  const int row = i / (D / 2) / Heads;
  const int rows = positions_shape[0];
  if (row >= rows) {
    return;
  }
  const int kind = head < KV * G ? 0 : head < KV * (G + 1) ? 1 : 2;
  const int own = head - (kind == 0 ? 0 : kind == 1 ? KV * G : KV * (G + 1));
  const T* starts[3] = {queries + QueriesBegin, keys + KeysBegin, values + ValuesBegin};
  const size_t row_steps[3] = {STEPS_0};
  const size_t head_steps[3] = {HEAD_STEPS};
  const size_t steps[3] = {STEPS_LAST};
  const T* read = starts[kind] + row * row_steps[kind] + own * head_steps[kind];
  const size_t step = steps[kind];
  const int newest = spans[2 * row] + spans[2 * row + 1] - 1;
  const int room = ring_keys_shape[2];
  const size_t place = (static_cast<size_t>(row) * KV + own) * room + newest % room;
  const size_t asked = (static_cast<size_t>(own / G) * rows + row) * G + own % G;
  T* write = kind == 0 ? together + asked * D
                       : const_cast<T*>(kind == 1 ? ring_keys : ring_values) + place * D;
  if (kind == 2 || j >= Dims / 2) {  // what is not rotated
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


class Token(NamedTuple):
    """What a step computes of a token of each row.

    Attributes:
        queries: `[rows, heads, 1, size]`, not rotated.
        keys: `[rows, kv_heads, 1, size]`, not rotated.
        values: likewise.
        positions: `[rows]`.
        turn: by how much queries and keys are rotated.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    positions: mx.array
    turn: Turn


def rotates(x: mx.array, positions: mx.array, dims: int) -> bool:
    """Whether `append` knows queries or keys of this shape and type: of one token a row."""
    token = x.ndim == 4 and x.shape[2] == 1 and positions.shape == x.shape[:1]  # noqa: PLR2004
    known = x.dtype in TYPES and positions.dtype == mx.int32
    return token and known and x.shape[3] % 2 == dims % 2 == 0


def appends(token: Token) -> bool:
    """Whether `append` knows all of them together."""
    queries, keys, values, *_ = token
    (rows, heads, _, size), (_, kv_heads, _, _) = queries.shape, keys.shape
    alike = keys.shape == values.shape == (rows, kv_heads, 1, size)
    types = queries.dtype == keys.dtype == values.dtype
    return alike and types and heads % kv_heads == 0


def append(token: Token, ring: Sequence[mx.array], spans: mx.array) -> mx.array:
    """Rotate queries and keys, and write keys and values into a ring, where it lies.

    Args:
        token: of each row.
        ring: the rows' keys and values, `[rows, kv_heads, positions, size]`, which nobody reads at
            the place that is written but who has what this returns.
        spans: `[rows, 2]`: where each row's tokens begin, and how many they are, this one included.

    Returns:
        `[1, kv_heads, rows * group, size]`, the queries.
    """
    rows, heads, _, size = token.queries.shape
    kv_heads, turn = token.keys.shape[1], token.turn
    listed = turn.frequencies is not None
    parts, begins = _parts(token)
    threads = rows * (heads + 2 * kv_heads) * size // 2
    found: list[mx.array] = kernel(cut=parts[0].ndim == 2)(  # noqa: PLR2004
        inputs=[
            *(*parts, *ring, token.positions, spans, number(turn.scale)),
            number(1.0 if listed else math.log2(turn.base)),
            number(1.0) if turn.frequencies is None else turn.frequencies,
        ],
        template=[
            ("T", token.queries.dtype),
            ("D", size),
            ("Dims", turn.dims),
            ("G", heads // kv_heads),
            ("KV", kv_heads),
            ("Listed", listed),
            *zip(("QueriesBegin", "KeysBegin", "ValuesBegin"), begins, strict=True),
        ],
        grid=(-(-threads // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1, kv_heads, rows * (heads // kv_heads), size)],
        output_dtypes=[token.queries.dtype],
    )
    return found[0]


def _parts(token: Token) -> tuple[list[mx.array], list[int]]:
    """Queries, keys and values as arguments, and where each begins: a product, or three arrays."""
    parts = [token.queries, token.keys, token.values]
    cuts = [part for part in parts if isinstance(part, Cut)]
    products = [cut.product for cut in cuts if cut.product is not None]
    if len(products) == len(parts) and all(product is products[0] for product in products):
        return products, [cut.begin for cut in cuts]
    return parts, [0, 0, 0]


@cache
def kernel(*, cut: bool) -> Any:
    """The kernel; made once for each way in which its inputs lie.

    Args:
        cut: they are parts of a product, `[rows, all columns]`.
    """
    names, source = ("queries", "keys", "values"), _SOURCE
    steps = {
        "STEPS_0": [f"{name}_strides[0]" for name in names],
        "HEAD_STEPS": ["D"] * len(names) if cut else [f"{name}_strides[1]" for name in names],
        "STEPS_LAST": [f"{name}_strides[{1 if cut else 3}]" for name in names],
    }
    for word, each in steps.items():
        source = source.replace(word, ", ".join(f"static_cast<size_t>({step})" for step in each))
    return mx.fast.cuda_kernel(
        name="append_cut" if cut else "append",
        input_names=[
            *(*names, "ring_keys", "ring_values", "positions", "spans"),
            *("scale", "log_base", "frequencies"),
        ],
        output_names=["together"],
        source=source,
        ensure_row_contiguous=False,  # a copy of a ring would be written in its place
    )
