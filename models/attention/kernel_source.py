"""Source that CUDA kernels of decode steps share: a block reads keys for one row of queries.

Each thread keeps eight elements of a key, of its value and of every query's sum, so that a few
threads have a whole key and a warp has several. Each warp sums by itself, with the softmax of
`softmax_kernel`; what the warps have found is put together in shared memory.

A kernel names the parts in this order, and defines what each reads before it.
"""

import mlx.core as mx

WARP = 32
PACK = 8
"""Elements that a thread reads at once."""
MAX_HEADS = 8
"""Heads that a block reads the same keys for: each has its own sums in a thread's registers."""
_WARPS = 8  # of a block; with more of them threads have too few registers
_SHARED = 40_000  # bytes of a block's shared memory, of which each has 48 KiB

QUERIES = """
  // For `row` and `head`, which counts blocks of G heads: Sets of them ask the same keys.
  // Queries are `[rows, KV, Sets * G, D]`.
  constexpr int Lanes = D / 8;
  constexpr int Keys = 32 / Lanes;
  constexpr int Each = 2;
  struct alignas(16) Pack { T x[8]; };
  const int warp = threadIdx.x / 32;
  const int slot = threadIdx.x % 32 / Lanes;
  const int at = threadIdx.x % Lanes;
  float query[G][8];
  float out[G][8];
  float top[G];
  float sum[G];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    const T* asks = queries + row * static_cast<size_t>(queries_strides[0]);
    asks += head / Sets * queries_strides[1];
    asks += (head % Sets * G + g) * queries_strides[2];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      query[g][j] = static_cast<float>(asks[(at * 8 + j) * queries_strides[3]]) * scale[0];
      out[g][j] = 0.0f;
    }
    top[g] = -INFINITY;
    sum[g] = 0.0f;
  }
"""

KEYS = """
  // `count` keys from `k` and values from `v`, so many elements apart: from `first` on, and from 0
  // after `positions`. The warps begin with the one that is `begin`.
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
"""

WARPS = """
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
"""

TOP_OF_WARPS = """
    // `highest` of what the warps have found for head `g`.
    for (int w = 0; w < Warps; ++w) {
      highest = fmaxf(highest, tops[w * G + g]);
    }
"""

SUM_OF_WARPS = """
    // What they have found for element `i`, added to `all` and `weighed`.
    for (int w = 0; w < Warps; ++w) {
      const float weight = expf(tops[w * G + g] - highest);
      all += sums[w * G + g] * weight;
      weighed += outs[(w * G + g) * D + i % D] * weight;
    }
"""


def reads(keys: mx.array, values: mx.array) -> bool:
    """True if a warp has whole keys of this size, and values of the same."""
    size = keys.shape[3]
    return size % PACK == 0 and WARP % (size // PACK) == 0 and values.shape == keys.shape


def warps_of(heads: int, size: int) -> int:
    """How many warps a block has: as many as have room for their sums.

    Args:
        heads: that it reads the same keys for.
        size: of a key.
    """
    return max(1, min(_WARPS, _SHARED // (4 * heads * size)))
