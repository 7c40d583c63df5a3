"""A decode step's attention to rows' own keys, and the merge of all parts, as one kernel on CUDA.

A step of a batch is bound by launches: there, what a row has of its own is nothing beside them.
The kernel takes the place of a dozen operations in each layer. So it does for the few tokens that
rows share beside what products are made of: each row reads them by itself. Its softmax is that of
`softmax_kernel`; parts merge as in `cascade`.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from . import tails
from .softmax_kernel import TYPES, number

MOST = 4
"""Parts that one's own keys are merged with: they are arguments, of which there are as many."""

_WARP = 32
_PACK = 8  # elements that a thread reads at once
_WARPS = 8  # of a block; with more of them threads have too few registers
_GROUP = 8  # heads that share a key head: each has its own sums in a thread's registers
_SHARED = 40_000  # bytes of a block's shared memory, of which each has 48 KiB
_BY_ROW, _BY_HEAD = 1, 2

_SOURCE = """
  constexpr int Lanes = D / 8;
  constexpr int Keys = 32 / Lanes;
  constexpr int Each = 2;
  struct alignas(16) Pack { T x[8]; };
  const int rows = queries_shape[0];
  const int row = blockIdx.x / KV;
  const int head = blockIdx.x % KV;
  const int warp = threadIdx.x / 32;
  const int slot = threadIdx.x % 32 / Lanes;
  const int at = threadIdx.x % Lanes;
  const size_t mine = (static_cast<size_t>(row) * KV + head) * G;
  float query[G][8];
  float out[G][8];
  float top[G];
  float sum[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    const T* asks = queries + row * queries_strides[0] + (head * G + g) * queries_strides[1];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      query[g][j] = static_cast<float>(asks[(at * 8 + j) * queries_strides[3]]) * scale[0];
      out[g][j] = 0.0f;
    }
    top[g] = -INFINITY;
    sum[g] = 0.0f;
  }
  const size_t ring = (static_cast<size_t>(row) * KV + head) * keys_shape[2] * D;
  const T* all_keys[1 + Tails] = {keys + ring, TAIL_KEYS};
  const T* all_values[1 + Tails] = {values + ring, TAIL_VALUES};
  const size_t key_steps[1 + Tails] = {D, KEY_STEPS};
  const size_t value_steps[1 + Tails] = {D, VALUE_STEPS};
  int turn = 0;
#pragma unroll 1
  for (int n = 0; n <= Tails; ++n) {
    const int count = n ? tail_lengths[row * Tails + n - 1] : spans[2 * row + 1];
    const int first = n ? 0 : spans[2 * row];
    const int positions = n ? count : keys_shape[2];
    const T* k = all_keys[n];
    const T* v = all_values[n];
    const size_t k_step = key_steps[n];
    const size_t v_step = value_steps[n];
    const int begin = (warp + Warps - turn % Warps) % Warps;
    turn += (count + Each * Keys - 1) / (Each * Keys);
    for (int base = begin * Each * Keys; base < count; base += Warps * Each * Keys) {
      Pack packs[Each];
      Pack held[Each];  // read before they are needed: to wait for memory is most of the time
      int where[Each];
      float scores[Each][G];
#pragma unroll
      for (int e = 0; e < Each; ++e) {
        const int i = base + e * Keys + slot;
        where[e] = first + (i < count ? i : 0);
        where[e] -= where[e] < positions ? 0 : positions;
        packs[e] = reinterpret_cast<const Pack*>(k + where[e] * k_step)[at];
        held[e] = reinterpret_cast<const Pack*>(v + where[e] * v_step)[at];
      }
#pragma unroll
      for (int e = 0; e < Each; ++e) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          float score = 0.0f;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            score += query[g][j] * static_cast<float>(packs[e].x[j]);
          }
          for (int other = 1; other < Lanes; other *= 2) {
            score += __shfl_xor_sync(0xffffffffu, score, other);
          }
          scores[e][g] = base + e * Keys + slot < count ? score : -INFINITY;
        }
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float higher = top[g];
#pragma unroll
        for (int e = 0; e < Each; ++e) {
          higher = fmaxf(higher, scores[e][g]);
        }
        if (higher > -INFINITY) {
          const float less = expf(top[g] - higher);
          sum[g] *= less;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            out[g][j] *= less;
          }
          top[g] = higher;
#pragma unroll
          for (int e = 0; e < Each; ++e) {
            const float weight = expf(scores[e][g] - higher);
            sum[g] += weight;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              out[g][j] += weight * static_cast<float>(held[e].x[j]);
            }
          }
        }
      }
    }
  }
  __shared__ float outs[Warps * G * D];
  __shared__ float tops[Warps * G];
  __shared__ float sums[Warps * G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    for (int other = Lanes; other < 32; other *= 2) {
      const float other_top = __shfl_xor_sync(0xffffffffu, top[g], other);
      const float higher = fmaxf(top[g], other_top);
      const float less = higher > -INFINITY ? expf(top[g] - higher) : 0.0f;
      const float more = higher > -INFINITY ? expf(other_top - higher) : 0.0f;
      sum[g] = sum[g] * less + __shfl_xor_sync(0xffffffffu, sum[g], other) * more;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        out[g][j] = out[g][j] * less + __shfl_xor_sync(0xffffffffu, out[g][j], other) * more;
      }
      top[g] = higher;
    }
    if (slot == 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        outs[(warp * G + g) * D + at * 8 + j] = out[g][j];
      }
      tops[warp * G + g] = top[g];
      sums[warp * G + g] = sum[g];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += blockDim.x) {
    const int g = i / D;
    float highest = Sinks ? sinks[head * G + g] : -INFINITY;
    for (int w = 0; w < Warps; ++w) {
      highest = fmaxf(highest, tops[w * G + g]);
    }
    const size_t places[3] = {0, mine + g, (static_cast<size_t>(head) * rows + row) * G + g};
PARTS
    float all = Sinks ? expf(sinks[head * G + g] - highest) : 0.0f;
    float weighed = 0.0f;
    for (int w = 0; w < Warps; ++w) {
      const float weight = expf(tops[w * G + g] - highest);
      all += sums[w * G + g] * weight;
      weighed += outs[(w * G + g) * D + i % D] * weight;
    }
MERGED
    merged[mine * D + i] = static_cast<T>(weighed / all);
  }
"""


def reads(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether `attend` knows these shapes and types."""
    size, group = keys.shape[3], queries.shape[1] // keys.shape[1]
    whole = size % _PACK == 0 and _WARP % (size // _PACK) == 0 and values.shape == keys.shape
    return whole and group <= _GROUP and queries.dtype == keys.dtype and keys.dtype in TYPES


class Ring(NamedTuple):
    """What rows have of their own.

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
    few: tails.Few,
    others: Sequence[tuple[mx.array, mx.array]],
) -> mx.array:
    """Compute attention of rows to their own keys in a ring and to few others, and merge it.

    Args:
        queries: `[rows, heads, 1, size]`.
        ring: the rows' own keys.
        scale: of the scores.
        sinks: `[heads]`, or None.
        few: what they read besides, row by row.
        others: outputs of other parts of all rows, and the logs of their sums in fp32: `[rows,
            kv_heads, group, ...]`, or `[1, kv_heads, rows * group, ...]`. MOST at most.

    Returns:
        `[rows, heads, 1, size]`.
    """
    rows, heads, _, size = queries.shape
    kv_heads = ring.keys.shape[1]
    group = heads // kv_heads
    warps = max(1, min(_WARPS, _SHARED // (4 * group * size)))
    kinds = [_BY_HEAD if output.shape[0] == 1 else _BY_ROW for output, _ in others]
    unused, none = MOST - len(others), number(1.0)
    segments = [*few.segments, *[ring[:2]] * (tails.MOST - len(few.segments))]
    found: list[mx.array] = kernel()(
        inputs=[
            *(queries, *ring, number(scale), few.lengths),
            *[array for segment in segments for array in segment],
            _numbers((*kinds, *[0] * unused)),
            none if sinks is None else mx.contiguous(sinks.astype(mx.float32)),
            *[mx.contiguous(array) for other in others for array in other],
            *(ring.keys, none) * unused,
        ],
        template=[
            ("T", queries.dtype),
            ("D", size),
            ("G", group),
            ("KV", kv_heads),
            ("Warps", warps),
            ("Tails", tails.MOST),
            ("Sinks", sinks is not None),
        ],
        grid=(rows * kv_heads * warps * _WARP, 1, 1),
        threadgroup=(warps * _WARP, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return found[0]


@cache
def _numbers(values: tuple[int, ...]) -> mx.array:
    """As `number`."""
    return mx.array(values, mx.int32)


@cache
def kernel() -> Any:
    """The kernel; made once."""
    names = [(f"output_{n}", f"lse_{n}") for n in range(MOST)]
    parts, merged = "", ""
    for n, (output, lse) in enumerate(names):
        place = f"places[kinds[{n}]]"
        parts += f"    const float top_{n} = kinds[{n}] ? {lse}[{place}] : -INFINITY;\n"
        parts += f"    highest = fmaxf(highest, top_{n});\n"
        merged += f"    if (kinds[{n}]) {{\n"
        merged += f"      const float weight = expf(top_{n} - highest);\n"
        merged += "      all += weight;\n"
        merged += f"      weighed += weight * static_cast<float>({output}[{place} * D + i % D]);\n"
        merged += "    }\n"
    return mx.fast.cuda_kernel(
        name="attend",
        input_names=[
            *("queries", "keys", "values", "spans", "scale", "tail_lengths"),
            *[f"tail_{name}_{n}" for n in range(tails.MOST) for name in ("keys", "values")],
            *("kinds", "sinks"),
            *[name for pair in names for name in pair],
        ],
        output_names=["merged"],
        source=_with_tails(_SOURCE.replace("PARTS\n", parts).replace("MERGED\n", merged)),
        ensure_row_contiguous=False,  # a tail is a slice, and so may queries be
    )


def _with_tails(source: str) -> str:
    """Say where the kernel finds the tails that are its arguments."""
    for name in ("keys", "values"):
        each = [f"tail_{name}_{n}" for n in range(tails.MOST)]
        starts = ", ".join(f"{tail} + head * {tail}_strides[1]" for tail in each)
        source = source.replace(f"TAIL_{name.upper()}", starts)
        steps = ", ".join(f"static_cast<size_t>({tail}_strides[2])" for tail in each)
        source = source.replace(f"{name[:-1].upper()}_STEPS", steps)
    return source
