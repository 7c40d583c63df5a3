"""What a layer adds to its input, and the norm of the sum, as one kernel in steps on CUDA.

A model of mlx-lm's adds what its attention or its MLP gave, and hands the sum to the next norm:
two launches, twice a layer. Here a projection says that what it gives is to be added, the sum waits
for its norm, and both are computed by one. The arithmetic is that of MLX
(`mlx/backend/cuda/rms_norm.cu` of MLX 0.32): sums and products are rounded as often.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear

from .attention.kernel_source import PACK, WARP
from .attention.softmax_kernel import TYPES, number
from .projections import across
from .step_arrays import Flat, NotedArray, flat, is_step

_LAST = ("o_proj", "out_proj", "down_proj")
"""Names that mlx-lm gives to the last projection of attention, of a recurrence, or of an MLP."""

_THREADS = 1024  # of a block at most, which has a row
_SOURCE = """
  struct alignas(sizeof(T) * Width) Pack { T x[Width]; };
  const int packs = left_shape[1] / Width;
  const size_t first = static_cast<size_t>(blockIdx.x) * packs;
  const Pack* lefts = reinterpret_cast<const Pack*>(left) + first;
  const Pack* rights = reinterpret_cast<const Pack*>(right) + first;
  const Pack* weights = reinterpret_cast<const Pack*>(weight);
  Pack* totals = reinterpret_cast<Pack*>(total) + first;
  Pack* write = reinterpret_cast<Pack*>(normed) + first;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack one = lefts[i];
    const Pack other = rights[i];
    Pack sum;
    for (int j = 0; j < Width; ++j) {
      sum.x[j] = static_cast<T>(static_cast<float>(one.x[j]) + static_cast<float>(other.x[j]));
      const float rounded = static_cast<float>(sum.x[j]);
      squares += rounded * rounded;
    }
    totals[i] = sum;
  }
  __shared__ float sums[32];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  for (int other = 16; other > 0; other /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, other);
  }
  if (lane == 0) {
    sums[warp] = squares;
  }
  __syncthreads();
  float all = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    all += sums[w];
  }
  const float inverse = 1.0f / sqrtf(all / (packs * Width) + eps[0]);
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack sum = totals[i];  // by this thread
    const Pack factor = weights[i];
    Pack done;
    for (int j = 0; j < Width; ++j) {
      const T scaled = static_cast<T>(static_cast<float>(sum.x[j]) * inverse);
      done.x[j] = static_cast<T>(static_cast<float>(scaled) * static_cast<float>(factor.x[j]));
    }
    write[i] = done;
  }
"""


class Addend(Flat):
    """What the first sublayer of a layer gives in a step: mostly it is added."""

    def __radd__(self, other: Any) -> mx.array:
        """Have the sum wait for its norm. Python asks the right side first if it is a subclass."""
        return _sum(other, self)


class Sum(NotedArray):
    """What sublayers have added to a layer's input: MLX's to whoever looks, the kernel's in a norm.

    What is added next is a sum likewise.

    Attributes:
        parts: what is added, `[rows, size]`; None once somebody has changed the sum.
        total: by the kernel; None before a norm.

    Args:
        left: the layer's input, `[rows, 1, size]`.
        right: what is added, of the same shape and type.
    """

    parts: tuple[mx.array, mx.array] | None = None
    total: mx.array | None = None

    def __init__(self, left: mx.array, right: mx.array) -> None:
        super().__init__(mx.add(left, right))
        self.parts = flat(left), flat(right)  # of their own: a model may change what it added

    def forget(self) -> None:
        """Be no sum any more."""
        self.parts = self.total = None

    def __add__(self, other: Any) -> mx.array:
        """Add to what the norm has computed, if there was one."""
        return _sum(self if self.total is None else self.total, other)


def _sum(left: Any, right: Any) -> mx.array:
    arrays = isinstance(left, mx.array) and isinstance(right, mx.array)
    if arrays and (left.shape, left.dtype) == (right.shape, right.dtype):
        return Sum(left, right)
    return mx.add(left, right)


class _Last:
    """A projection whose outputs are added to what came into the layer."""

    _across: Callable[[mx.array], mx.array] | None

    def __call__(self, x: mx.array) -> mx.array:
        """Compute it; a step's output knows that it will be added."""
        step = is_step(x) and x.dtype in TYPES
        if step and self._across is not None:
            return Addend(self._across(flat(x)))
        output: mx.array = super().__call__(flat(x) if step else x)  # type: ignore[misc]
        return Addend(output) if step else output


class LastLinear(_Last, Linear):
    """A projection with plain weights."""


class LastQuantizedLinear(_Last, QuantizedLinear):
    """A projection with quantised weights."""


class SumNorm(RMSNorm):
    """A norm that computes the sum before it, too, if there is one."""

    def __call__(self, x: mx.array) -> mx.array:
        """Compute it, of `[..., size]`."""
        parts = x.parts if isinstance(x, Sum) and x.total is None else None
        if isinstance(x, Sum) and parts is not None and self.weight.dtype == x.dtype:
            total, normed = sum_and_norm(*parts, self.weight, self.eps)
            x.total = Flat(total)
            return Flat(normed)
        if is_step(x):
            return Flat(super().__call__(flat(x)))  # type: ignore[no-untyped-call]
        usual: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return usual


_BOUND: dict[type, type] = {
    Linear: LastLinear,
    QuantizedLinear: LastQuantizedLinear,
    RMSNorm: SumNorm,
}


def bind(model: Any, *, by_kernel: bool) -> bool:
    """Have a model's sums and norms in steps be the kernel's, or MLX's.

    Returns:
        Whether any was not.
    """
    changed = []
    for module in model.modules():
        for name, child in module.children().items():
            kind = type(child)
            usual = next((key for key, bound in _BOUND.items() if bound is kind), kind)
            adds = usual in _BOUND and (usual is RMSNorm or name in _LAST)
            wanted = _BOUND[usual] if by_kernel and adds else usual
            if wanted is not kind:
                if issubclass(wanted, _Last):
                    vars(child)["_across"] = across(child)
                child.__class__ = wanted
                changed.append(child)
    return bool(changed)


def sum_and_norm(
    left: mx.array, right: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """Add two arrays, and compute the norm of the sum: all are `[rows, size]`."""
    rows, size = left.shape
    width = PACK if size % PACK == 0 else 1
    threads = min(_THREADS, -(-size // width // WARP) * WARP)
    total, normed = kernel()(
        inputs=[left, right, weight, number(eps)],
        template=[("T", left.dtype), ("Width", width)],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[left.shape, left.shape],
        output_dtypes=[left.dtype, left.dtype],
    )
    return total, normed


@cache
def kernel() -> Any:
    """The kernel; made once."""
    return mx.fast.cuda_kernel(
        name="sum_norm",
        input_names=["left", "right", "weight", "eps"],
        output_names=["total", "normed"],
        source=_SOURCE,
    )
