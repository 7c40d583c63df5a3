"""A decode step's attention to rows' own keys, and the merge of all parts, as one kernel on CUDA.

A step of a batch is bound by launches: there, what a row has of its own is nothing beside them.
The kernel takes the place of a dozen operations in each layer. Its softmax is that of
`softmax_kernel`; parts merge as in `cascade`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from . import kernel_arguments, kernel_source
from .kernel_arguments import RING
from .kernel_source import KEYS, MAX_HEADS, QUERIES, SUM_OF_WARPS, TOP_OF_WARPS, WARP, WARPS
from .softmax_kernel import TYPES, number

_SOURCE = f"""
  const int rows = keys_shape[0];
  const int row = blockIdx.x / KV;
  const int head = blockIdx.x % KV;
  constexpr int Sets = 1;
  const size_t mine = (static_cast<size_t>(row) * KV + head) * G;
{QUERIES}
  const size_t ring = (static_cast<size_t>(row) * KV + head) * keys_shape[2] * D;
  const T* k = keys + ring;
  const T* v = values + ring;
  const size_t k_step = D;
  const size_t v_step = D;
{RING}
{KEYS}
{WARPS}
  const int splits = kinds[PLACES];
  const float* split_sums = split_lse + static_cast<size_t>(row) * splits * KV * G;
  const float* split_outs = split_output + static_cast<size_t>(row) * splits * KV * G * D;
  for (int i = threadIdx.x; i < G * D; i += blockDim.x) {{
    const int g = i / D;
    const int asked = head * G + g;
    float highest = Sinks ? sinks[asked] : -INFINITY;
{TOP_OF_WARPS}
    for (int p = 0; p < splits; ++p) {{
      highest = fmaxf(highest, split_sums[p * KV * G + asked]);
    }}
    const size_t places[3] = {{0, mine + g, (static_cast<size_t>(head) * rows + row) * G + g}};
PARTS
    float all = Sinks ? expf(sinks[asked] - highest) : 0.0f;
    float weighed = 0.0f;
{SUM_OF_WARPS}
    for (int p = 0; p < splits; ++p) {{
      const float weight = expf(split_sums[p * KV * G + asked] - highest);
      all += weight;
      weighed += weight * split_outs[(p * KV * G + asked) * D + i % D];
    }}
MERGED
    merged[mine * D + i] = static_cast<T>(weighed / all);
  }}
"""


def reads(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """True if `attend` computes these shapes and types."""
    known = queries.dtype == keys.dtype and keys.dtype in TYPES
    return known and queries.shape[2] <= MAX_HEADS and kernel_source.reads(keys, values)


class Ring(NamedTuple):
    """Tokens of rows' own.

    Attributes:
        keys: `[rows, kv_heads, positions, size]`.
        values: likewise.
        spans: `[rows, 2]`: where each row's tokens begin, and how many they are.
    """

    keys: mx.array
    values: mx.array
    spans: mx.array


def attend(
    queries: mx.array,
    ring: Ring,
    scale: float,
    sinks: mx.array | None,
    *,
    others: Sequence[tuple[mx.array, mx.array]],
    splits: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """Compute attention of rows to their own keys in a ring, and merge it with other parts.

    Args:
        queries: `[rows, kv_heads, group, size]`.
        ring: the rows' own keys.
        scale: of the scores.
        sinks: `[heads]`, or None.
        others: outputs of other parts of all rows, and the logs of their sums in fp32: `[rows,
            kv_heads, group, ...]`, or `[1, kv_heads, rows * group, ...]`. At most
            `kernel_arguments.MAX_PARTS`.
        splits: what `split_kernel` found of these rows; None if it read nothing.

    Returns:
        `[rows, heads, 1, size]`.
    """
    rows, kv_heads, group, size = queries.shape
    warps = kernel_source.warps_of(group, size)
    none = number(1.0)
    found: list[mx.array] = kernel()(
        inputs=[
            *(queries, *ring, number(scale)),
            kernel_arguments.kinds_of(others, 0 if splits is None else splits[1].shape[1]),
            none if sinks is None else mx.contiguous(sinks.astype(mx.float32)),
            *kernel_arguments.parts(others, ring.keys),
            *((none, none) if splits is None else splits),
        ],
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("G", group),
            ("KV", kv_heads),
            ("Warps", warps),
            ("Sinks", sinks is not None),
        ],
        grid=(rows * kv_heads * warps * WARP, 1, 1),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[(rows, kv_heads * group, 1, size)],
        output_dtypes=[queries.dtype],
    )
    return found[0]


@cache
def kernel() -> Any:
    """The kernel; made once."""
    source = _SOURCE.replace("PLACES", str(kernel_arguments.MAX_PARTS))
    return mx.fast.cuda_kernel(
        name="attend",
        input_names=[
            *("queries", "keys", "values", "spans", "scale", "kinds", "sinks"),
            *kernel_arguments.PART_NAMES,
            *("split_output", "split_lse"),
        ],
        output_names=["merged"],
        source=kernel_arguments.with_parts(source),
        ensure_row_contiguous=False,  # queries may be a slice
    )
