"""Attention of a batch's rows to what each alone leases, as one kernel on CUDA.

Histories of thousands of tokens, of different lengths, each somewhere else. As products they are
operations for each of them, or copies side by side; a kernel reads them where they lie. Many blocks
share a row's keys, and what they find is merged: Flash-Decoding (Dao, Haziza, Massa and Sizov,
2023). Its softmax is that of `softmax_kernel`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from . import kernel_source
from .cascade import Part
from .kernel_source import KEYS, MAX_HEADS, QUERIES, SUM_OF_WARPS, TOP_OF_WARPS, WARP, WARPS
from .products import Segment
from .softmax_kernel import TYPES, number

MAX_SOURCES = 16
"""Arrays of keys that rows read: they are arguments, of which there are as many."""

_SOURCE = f"""
  constexpr int Heads = KV * Sets;
  const int splits = table_shape[1];
  const int head = blockIdx.x % Heads;
  const int split = blockIdx.x / Heads % splits;
  const int row = blockIdx.x / Heads / splits;
  const int* read = table + (static_cast<size_t>(row) * splits + split) * 3;
  const int source = read[0];
  const int count = read[2];
  const size_t mine = (static_cast<size_t>(row) * splits + split) * Heads + head;
  if (count == 0) {{
    for (int i = threadIdx.x; i < G * D; i += blockDim.x) {{
      output[mine * G * D + i] = 0.0f;
      if (i < G) {{
        lse[mine * G + i] = -INFINITY;
      }}
    }}
    return;
  }}
  const T* k = keys_0;
  const T* v = values_0;
  size_t k_step = 0;
  size_t v_step = 0;
CHOICE
{QUERIES}
  const int first = 0;
  const int positions = count;
  const int begin = warp;
{KEYS}
{WARPS}
  for (int i = threadIdx.x; i < G * D; i += blockDim.x) {{
    const int g = i / D;
    float highest = -INFINITY;
{TOP_OF_WARPS}
    float all = 0.0f;
    float weighed = 0.0f;
{SUM_OF_WARPS}
    output[mine * G * D + i] = weighed / all;
    if (i % D == 0) {{
      lse[mine * G + g] = highest + logf(all);
    }}
  }}
"""

_CHOSEN = """
  if (source == NUMBER) {
    k = keys_NUMBER + head / Sets * keys_NUMBER_strides[1] + read[1] * keys_NUMBER_strides[2];
    v = values_NUMBER;
    v += head / Sets * values_NUMBER_strides[1] + read[1] * values_NUMBER_strides[2];
    k_step = static_cast<size_t>(keys_NUMBER_strides[2]);
    v_step = static_cast<size_t>(values_NUMBER_strides[2]);
  }
"""


def reads(segment: Segment) -> bool:
    """True if `attend` reads a layer's tensors of these shapes and types."""
    known = len(segment) == 2 and segment[0].dtype in TYPES  # noqa: PLR2004  (keys and values)
    return known and kernel_source.reads(*segment)


def attend(
    queries: mx.array, segments: Sequence[Segment], table: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    """Compute attention of rows to parts of what each leases.

    Args:
        queries: `[rows, kv_heads, group, size]`.
        segments: keys and values, `[1, kv_heads, ..., size]`, MAX_SOURCES of them. Their
            strides say where tokens are; the table says which are read.
        table: `[rows, splits, 3]`: which segment a block reads, from which token on, and how many;
            none for a block that reads nothing.
        scale: of the scores.

    Returns:
        Outputs in fp32, `[rows, splits, heads, size]`, and the logs of their sums, `[rows, splits,
        heads]`: -inf of what read nothing.
    """
    splits, (rows, kv_heads, group, size) = table.shape[1], queries.shape
    heads = kv_heads * group
    sets = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= MAX_HEADS)
    warps = kernel_source.warps_of(group // sets, size)
    output, lse = kernel()(
        inputs=[queries, number(scale), table, *[array for pair in segments for array in pair]],
        template=[
            ("T", segments[0][0].dtype),
            ("D", size),
            ("G", group // sets),
            ("KV", kv_heads),
            ("Sets", sets),
            ("Warps", warps),
        ],
        grid=(rows * splits * kv_heads * sets * warps * WARP, 1, 1),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[(rows, splits, heads, size), (rows, splits, heads)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return output, lse


def merged(found: tuple[mx.array, mx.array], kv_heads: int, dtype: mx.Dtype) -> Part:
    """Make one part of what blocks have found, where no kernel does so with all other parts.

    Args:
        found: by `attend`.
        kv_heads: of the keys.
        dtype: of the output.
    """
    output, lse = found
    rows, _, heads, size = output.shape
    top = mx.maximum(lse.max(axis=1, keepdims=True), mx.finfo(mx.float32).min)
    weights = mx.exp(lse - top)
    total = weights.sum(axis=1)
    some = mx.maximum(total, 1e-30)  # a row that reads nothing has zeros
    weighed = (weights[..., None] * output).sum(axis=1) / some[..., None]
    logs = mx.log(total) + top.squeeze(1)
    shape = (rows, kv_heads, heads // kv_heads)
    return Part(weighed.astype(dtype).reshape(*shape, size), logs.reshape(*shape, 1))


@cache
def kernel() -> Any:
    """The kernel; made once."""
    chosen = "".join(_CHOSEN.replace("NUMBER", str(number)) for number in range(MAX_SOURCES))
    each = [f"{name}_{number}" for number in range(MAX_SOURCES) for name in ("keys", "values")]
    return mx.fast.cuda_kernel(
        name="attend_split",
        input_names=["queries", "scale", "table", *each],
        output_names=["output", "lse"],
        source=_SOURCE.replace("CHOICE\n", chosen),
        ensure_row_contiguous=False,  # what is read are parts of arrays, and so may queries be
    )
