"""Convolutions of recurrent layers over a few tokens, a channel each, as one kernel on CUDA.

In MLX, cuDNN plans a convolution for the exact numbers of rows and tokens (`conv.cpp` of MLX 0.32):
180 to 300 ms on an H100's host, for which a prompt of a new length and all sequences that decode
wait. This kernel takes any numbers.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d

from .gated_delta import TYPES, WARP

_BLOCK = 128  # channels, a thread each
_STRETCH = 8  # tokens that a thread computes: it reads each input once
_MOST = 16  # input tokens of an output: a thread holds them in registers


_SOURCE = """
  const int channels = x_shape[2];
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= channels) {
    return;
  }
  const int tokens = x_shape[1] - (Size - 1);
  const int stretches = (tokens + Stretch - 1) / Stretch;
  const size_t row = blockIdx.y / stretches;
  const int first = blockIdx.y % stretches * Stretch;
  const T* read = x + (row * x_shape[1] + first) * channels + channel;
  T* write = y + (row * tokens + first) * channels + channel;
  float factors[Size];
  float held[Size];
  for (int i = 0; i < Size; ++i) {
    factors[i] = static_cast<float>(weight[channel * Size + i]);
  }
#pragma unroll
  for (int i = 0; i < Size - 1; ++i) {
    held[i + 1] = static_cast<float>(read[static_cast<size_t>(i) * channels]);
  }
  for (int t = 0; t < Stretch && first + t < tokens; ++t) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Size - 1; ++i) {
      held[i] = held[i + 1];
      sum += held[i] * factors[i];
    }
    held[Size - 1] = static_cast<float>(read[static_cast<size_t>(t + Size - 1) * channels]);
    sum += held[Size - 1] * factors[Size - 1];
    write[static_cast<size_t>(t) * channels] = static_cast<T>(sum);
  }
"""


class ShortConvolution(Conv1d):
    """A short convolution, computed by the kernel."""

    def __call__(self, x: mx.array) -> mx.array:
        """Compute it.

        Args:
            x: `[rows, tokens + size - 1, channels]`.

        Returns:
            `[rows, tokens, channels]`, each of as many tokens as the weights' size.
        """
        channels, size, _ = self.weight.shape
        tokens = x.shape[1] - size + 1
        if tokens < 1 or x.dtype != self.weight.dtype:
            result: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return result
        threads = -(-channels // WARP) * WARP
        y: mx.array
        (y,) = kernel()(
            inputs=[x, self.weight],
            template=[("T", x.dtype), ("Size", size), ("Stretch", _STRETCH)],
            grid=(threads, x.shape[0] * -(-tokens // _STRETCH), 1),
            threadgroup=(min(_BLOCK, threads), 1, 1),
            output_shapes=[(x.shape[0], tokens, channels)],
            output_dtypes=[x.dtype],
        )
        return y + self.bias if "bias" in self else y


def computes(layer: Any) -> bool:
    """True for a convolution of each channel by itself, of few tokens that lie side by side."""
    if type(layer) is not Conv1d:
        return False
    channels, size, inputs = layer.weight.shape
    by_channel = inputs == 1 and layer.groups == channels
    usual = (layer.stride, layer.dilation, layer.padding) == (1, 1, 0)
    return by_channel and usual and size <= _MOST and layer.weight.dtype in TYPES


@cache
def kernel() -> Any:
    """The kernel; made once, as MLX compiles it once for each size and type."""
    return mx.fast.cuda_kernel(
        name="short_convolution",
        input_names=["x", "weight"],
        output_names=["y"],
        source=_SOURCE,
    )
