"""A decode step's attention of MLA to rows' own latents, and the merge of all parts, on CUDA.

As `decode_kernel`, for a model that has one head of latents, which are keys and values at once, and
beside it the keys' rotated part. A warp has a whole latent: each of its threads keeps a 32nd part
of it, of every query and of every sum. Some heads of a row are a block, and all read the same.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from . import kernel_arguments, kernel_source
from .decode_kernel import Ring
from .kernel_arguments import RING
from .kernel_source import PACK, SUM_OF_WARPS, TOP_OF_WARPS, WARP
from .products import Queries
from .softmax_kernel import TYPES, number

_MAX_HEADS = 4  # of a block: with more of them a thread has no registers left for sums
_MAX_SIZE = 512  # of a latent, for the same reason
_PACKS = (1, 2, 4, PACK)  # elements that a thread can read at once

_SOURCE = f"""
  constexpr int Wide = D / 32 < 8 ? D / 32 : 8;  // elements that a thread reads at once
  constexpr int Packs = D / 32 / Wide;
  constexpr int Turned = (R + 31) / 32;
  constexpr int Keys = 1;  // that a warp has at once
  constexpr int Each = 2;
  struct alignas(sizeof(T) * Wide) Pack {{ T x[Wide]; }};
  const int row = blockIdx.x / Sets;
  const int set = blockIdx.x % Sets;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const size_t mine = (static_cast<size_t>(row) * Sets + set) * G;
  float query[G][Packs * Wide];
  float turned[G][Turned];
  float out[G][Packs * Wide];
  float top[G];
  float sum[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {{
    const size_t asked = set * G + g;
    const T* asks = queries + row * queries_strides[0] + asked * queries_strides[1];
    const T* turns = rotated + row * rotated_strides[0] + asked * rotated_strides[1];
#pragma unroll
    for (int j = 0; j < Packs * Wide; ++j) {{
      const int i = (j / Wide * 32 + lane) * Wide + j % Wide;
      query[g][j] = static_cast<float>(asks[i * queries_strides[3]]) * scale[0];
      out[g][j] = 0.0f;
    }}
#pragma unroll
    for (int j = 0; j < Turned; ++j) {{
      const int i = j * 32 + lane;
      turned[g][j] = i < R ? static_cast<float>(turns[i * rotated_strides[3]]) : 0.0f;
    }}
    top[g] = -INFINITY;
    sum[g] = 0.0f;
  }}
  const size_t ring = static_cast<size_t>(row) * keys_shape[2];
  const T* k = keys + ring * D;
  const T* v = values + ring * R;
  const size_t k_step = D;
  const size_t v_step = R;
{RING}
    for (int base = begin * Each; base < count; base += Warps * Each) {{
      Pack packs[Each][Packs];
      float parts[Each][Turned];
      float scores[Each][G];
#pragma unroll
      for (int e = 0; e < Each; ++e) {{
        int where = first + (base + e < count ? base + e : 0);
        where -= where < positions ? 0 : positions;
#pragma unroll
        for (int p = 0; p < Packs; ++p) {{
          packs[e][p] = reinterpret_cast<const Pack*>(k + where * k_step)[p * 32 + lane];
        }}
#pragma unroll
        for (int j = 0; j < Turned; ++j) {{
          const int i = j * 32 + lane;
          parts[e][j] = i < R ? static_cast<float>(v[where * v_step + i]) : 0.0f;
        }}
      }}
#pragma unroll
      for (int e = 0; e < Each; ++e) {{
#pragma unroll
        for (int g = 0; g < G; ++g) {{
          float score = 0.0f;
#pragma unroll
          for (int j = 0; j < Packs * Wide; ++j) {{
            score += query[g][j] * static_cast<float>(packs[e][j / Wide].x[j % Wide]);
          }}
#pragma unroll
          for (int j = 0; j < Turned; ++j) {{
            score += turned[g][j] * parts[e][j];
          }}
          for (int other = 1; other < 32; other *= 2) {{
            score += __shfl_xor_sync(0xffffffffu, score, other);
          }}
          scores[e][g] = base + e < count ? score : -INFINITY;
        }}
      }}
#pragma unroll
      for (int g = 0; g < G; ++g) {{
        float higher = top[g];  // the first of them is there
#pragma unroll
        for (int e = 0; e < Each; ++e) {{
          higher = fmaxf(higher, scores[e][g]);
        }}
        const float less = expf(top[g] - higher);
        sum[g] *= less;
#pragma unroll
        for (int j = 0; j < Packs * Wide; ++j) {{
          out[g][j] *= less;
        }}
        top[g] = higher;
#pragma unroll
        for (int e = 0; e < Each; ++e) {{
          const float weight = expf(scores[e][g] - higher);
          sum[g] += weight;
#pragma unroll
          for (int j = 0; j < Packs * Wide; ++j) {{
            out[g][j] += weight * static_cast<float>(packs[e][j / Wide].x[j % Wide]);
          }}
        }}
      }}
    }}
  __shared__ float outs[Warps * G * D];
  __shared__ float tops[Warps * G];
  __shared__ float sums[Warps * G];
#pragma unroll
  for (int g = 0; g < G; ++g) {{
#pragma unroll
    for (int j = 0; j < Packs * Wide; ++j) {{
      outs[(warp * G + g) * D + (j / Wide * 32 + lane) * Wide + j % Wide] = out[g][j];
    }}
    if (lane == 0) {{
      tops[warp * G + g] = top[g];
      sums[warp * G + g] = sum[g];
    }}
  }}
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += blockDim.x) {{
    const int g = i / D;
    float highest = -INFINITY;
{TOP_OF_WARPS}
    const size_t places[3] = {{0, mine + g, mine + g}};  // one head of latents: in either order
PARTS
    float all = 0.0f;
    float weighed = 0.0f;
{SUM_OF_WARPS}
MERGED
    merged[mine * D + i] = static_cast<T>(weighed / all);
  }}
"""


def reads(queries: Queries, latents: mx.array, rotated: mx.array) -> bool:
    """True if `attend` computes these shapes and types."""
    size, dtype = latents.shape[3], latents.dtype
    pack = min(size // WARP, PACK)
    whole = size <= _MAX_SIZE and pack in _PACKS and size % (WARP * pack) == 0
    alike = dtype in TYPES and all(array.dtype == dtype for array in (*queries, rotated))
    return whole and alike and latents.shape[1] == 1 and queries[0].shape[3] == size


def attend(
    queries: Queries,
    ring: Ring,
    scale: float,
    *,
    others: Sequence[tuple[mx.array, mx.array]],
) -> mx.array:
    """Compute attention of rows to their own latents in a ring, and merge it with other parts.

    Args:
        queries: of the latents, `[rows, heads, 1, size]`, and of the keys' rotated part, which are
            scaled.
        ring: the rows' own latents, `[rows, 1, positions, size]`, and the rotated part.
        scale: of the scores of latents.
        others: outputs of other parts of all rows, and the logs of their sums in fp32:
            `[rows, 1, heads, ...]` or `[1, 1, rows * heads, ...]`. At most
            `kernel_arguments.MAX_PARTS`.

    Returns:
        `[rows, heads, 1, size]`.
    """
    asked, rotated = queries
    rows, heads, _, size = asked.shape
    group = next(n for n in range(_MAX_HEADS, 0, -1) if heads % n == 0)
    sets = heads // group
    warps = kernel_source.warps_of(group, size)
    found: list[mx.array] = kernel()(
        inputs=[
            *(asked, rotated, *ring, number(scale)),
            kernel_arguments.kinds_of(others),
            *kernel_arguments.parts(others, ring.keys),
        ],
        template=[
            ("T", asked.dtype),
            ("D", size),
            ("R", rotated.shape[3]),
            ("G", group),
            ("Sets", sets),
            ("Warps", warps),
        ],
        grid=(rows * sets * warps * WARP, 1, 1),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[asked.shape],
        output_dtypes=[asked.dtype],
    )
    return found[0]


@cache
def kernel() -> Any:
    """The kernel; made once."""
    return mx.fast.cuda_kernel(
        name="attend_latents",
        input_names=[
            *("queries", "rotated", "keys", "values", "spans", "scale", "kinds"),
            *kernel_arguments.PART_NAMES,
        ],
        output_names=["merged"],
        source=kernel_arguments.with_parts(_SOURCE),
        ensure_row_contiguous=False,  # queries may be a slice
    )
