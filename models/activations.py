"""Activations of mlx-lm's layers, where MLX's own are slow.

On CUDA a step's gates are read from the product that has them, by one kernel. MLX's exponential on
x86 is scalar, so that SiLU takes a third of a prefill there. NumPy's is vectorised;
`attention.softmax` uses it, too. To wait for a few thousand gates, those of two tokens of SmolLM2,
takes longer than MLX's does.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import activations

from .attention.kernel_source import PACK
from .attention.softmax_kernel import TYPES
from .load.device import DevicePolicy
from .step_arrays import Cut, Flat

_compiled = activations.swiglu

_THREADS = 256  # of a block; each has a pack
_SOURCE = """
  struct alignas(sizeof(T) * Width) Pack { T x[Width]; };
  const int packs = Size / Width;  // of a row
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const size_t row = i / packs;
  if (row >= static_cast<size_t>(product_shape[0])) {
    return;
  }
  const T* read = product + row * product_shape[1] + i % packs * Width;
  const Pack gates = *reinterpret_cast<const Pack*>(read + Gates);
  const Pack others = *reinterpret_cast<const Pack*>(read + Others);
  Pack done;
  for (int j = 0; j < Width; ++j) {
    const float gate = static_cast<float>(gates.x[j]);
    const float silu = gate / (1.0f + expf(-gate));
    done.x[j] = static_cast<T>(silu * static_cast<float>(others.x[j]));
  }
  reinterpret_cast<Pack*>(gated)[i] = done;
"""


@dataclass(frozen=True)
class Swiglu:
    """What models call instead of mlx-lm's function.

    Attributes:
        device: how it is computed.
    """

    device: DevicePolicy

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        """Multiply `silu(gate)` and `x`, which have one shape."""
        if isinstance(gate, Cut) and isinstance(x, Cut) and _pair(gate, x):
            return _of_product(gate, x)
        if self.device.fused or gate.dtype != mx.float32:
            result: mx.array = _compiled(gate, x)
            return result
        if gate.size < self.device.host_gates:
            return gate * mx.sigmoid(gate) * x
        divisor = -gate  # of its own memory: others may hold the gate
        mx.eval(divisor, x)
        view = np.array(divisor, copy=False)
        with np.errstate(over="ignore"):  # what is divided by infinity is 0, as it shall be
            np.exp(view, out=view)
        view += 1
        return gate / divisor * x


def _pair(gate: Cut, x: Cut) -> bool:
    """Whether both are columns of one product, of a type that the kernel knows."""
    known = gate.product is not None and gate.product is x.product and gate.dtype in TYPES
    return known and gate.shape == x.shape


def _of_product(gate: Cut, x: Cut) -> mx.array:
    """Multiply `silu(gate)` and `x`, which are columns of one product."""
    rows, _, size = gate.shape
    begins = gate.begin, x.begin
    width = PACK if all(n % PACK == 0 for n in (size, *begins)) else 1
    threads = rows * size // width
    gated: mx.array
    (gated,) = kernel()(
        inputs=[gate.product],
        template=[
            *(("T", gate.dtype), ("Width", width), ("Size", size)),
            *zip(("Gates", "Others"), begins, strict=True),
        ],
        grid=(-(-threads // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, size)],
        output_dtypes=[gate.dtype],
    )
    return Flat(gated)


@cache
def kernel() -> Any:
    """The kernel; made once."""
    return mx.fast.cuda_kernel(
        name="swiglu", input_names=["product"], output_names=["gated"], source=_SOURCE
    )
