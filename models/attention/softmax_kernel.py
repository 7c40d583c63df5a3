"""A softmax and the log of its sum as one kernel on CUDA, where each operation of MLX is a launch.

In one pass over the scores: Milakov and Gimelshein, "Online normalizer calculation for softmax",
arXiv:1805.02867.
"""

from functools import cache
from typing import Any

import mlx.core as mx

TYPES = (mx.bfloat16, mx.float16, mx.float32)
"""Of scores."""

_PACK = 8  # elements that a thread reads at once
_THREADS = 256  # of a block, which has a row of scores

_SOURCE = """
  struct alignas(sizeof(T) * Width) Pack { T x[Width]; };
  const int packs = scores_shape[Axes - 1] / Width;
  const size_t first = static_cast<size_t>(blockIdx.x) * packs;
  const Pack* read = reinterpret_cast<const Pack*>(scores) + first;
  Pack* write = reinterpret_cast<Pack*>(shares) + first;
  // To base 2: one operation an element. Read once: a compiler cannot know that nobody writes it.
  const float factor = scale[0] * 1.4426950408889634f;
  float top = -INFINITY;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack pack = read[i];
    float highest = static_cast<float>(pack.x[0]);
    for (int j = 1; j < Width; ++j) {
      highest = fmaxf(highest, static_cast<float>(pack.x[j]));
    }
    highest *= factor;
    if (highest == -INFINITY) {
      continue;
    }
    if (highest > top) {
      sum *= exp2f(top - highest);
      top = highest;
    }
    for (int j = 0; j < Width; ++j) {
      sum += exp2f(fmaf(static_cast<float>(pack.x[j]), factor, -top));
    }
  }
  __shared__ float tops[32];
  __shared__ float sums[32];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  for (int round = 0; round < 2; ++round) {
    for (int other = 16; other > 0; other /= 2) {
      const float other_top = __shfl_xor_sync(0xffffffffu, top, other);
      const float other_sum = __shfl_xor_sync(0xffffffffu, sum, other);
      const float higher = fmaxf(top, other_top);
      if (higher > -INFINITY) {
        sum = sum * exp2f(top - higher) + other_sum * exp2f(other_top - higher);
        top = higher;
      }
    }
    if (round == 0) {
      if (lane == 0) {
        tops[warp] = top;
        sums[warp] = sum;
      }
      __syncthreads();
      const bool there = lane < static_cast<int>(blockDim.x) / 32;
      top = there ? tops[lane] : -INFINITY;
      sum = there ? sums[lane] : 0.0f;
    }
  }
  if (threadIdx.x == 0) {
    lse[blockIdx.x] = (top + log2f(sum)) * 0.6931471805599453f;
  }
  const float inverse = 1.0f / sum;
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack pack = read[i];
    Pack done;
    for (int j = 0; j < Width; ++j) {
      const float share = exp2f(fmaf(static_cast<float>(pack.x[j]), factor, -top)) * inverse;
      done.x[j] = static_cast<T>(share);
    }
    write[i] = done;
  }
"""


def softmax(scores: mx.array, scale: float = 1.0) -> list[mx.array]:
    """Compute a softmax over the last axis, and the log of the sum of the exponentials.

    Args:
        scores: of one of TYPES; each row has one that is not -inf.
        scale: over 0, which they are multiplied with before.

    Returns:
        The shares, in the same type, and `[..., 1]` in fp32.
    """
    length = scores.shape[-1]
    found: list[mx.array] = kernel()(
        inputs=[scores, number(scale)],
        template=[
            ("T", scores.dtype),
            ("Axes", scores.ndim),
            ("Width", _PACK if length % _PACK == 0 else 1),
        ],
        grid=(scores.size // length * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[scores.shape, (*scores.shape[:-1], 1)],
        output_dtypes=[scores.dtype, mx.float32],
    )
    return found


@cache
def number(value: float) -> mx.array:
    """An argument of kernels that all layers share."""
    return mx.array([value])


@cache
def kernel() -> Any:
    """The kernel; made once."""
    return mx.fast.cuda_kernel(
        name="softmax_lse",
        input_names=["scores", "scale"],
        output_names=["shares", "lse"],
        source=_SOURCE,
    )
