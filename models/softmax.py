"""Weights of scores: `exp(score - top)`, with `top` the largest score and their sum.

MLX's exponential on x86 is scalar: about 20 ns an element, so that a prompt of 540 tokens
spends half its prefill in it. NumPy's is vectorised, ten times faster. On the CPU, scores in
fp32 are therefore evaluated and turned into weights in place, in MLX's own buffer: a NumPy view
of an MLX array may be written to. Elsewhere it is MLX's functions, compiled into one kernel.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

ON_CPU = mx.default_device() == mx.Device(mx.cpu)


def on_gpu(function: F) -> F:
    """Compile a function where the default device is a GPU.

    On the CPU MLX would start a C++ compiler for each, for nothing: the products take the time.
    """
    return function if ON_CPU else cast("F", mx.compile(function))


class Weights(NamedTuple):
    """What scores come to, over their last axis.

    Attributes:
        shares: `[..., n]`, `exp(score - top)`, in fp32.
        top: `[..., 1]`, the largest score; it must not be -inf.
        total: `[..., 1]`, the sum of the shares.
    """

    shares: mx.array
    top: mx.array
    total: mx.array


def weigh(scores: Sequence[mx.array]) -> list[Weights]:
    """Weigh several arrays of scores. They are used up: nobody else may hold them."""
    if ON_CPU and all(array.dtype == mx.float32 for array in scores):
        mx.eval(list(scores))
        return [_weighed_in_place(array) for array in scores]
    return [_weighed(array) for array in scores]


@on_gpu
def _weighed(scores: mx.array) -> Weights:
    scores = scores.astype(mx.float32)
    top = scores.max(axis=-1, keepdims=True)
    shares = mx.exp(scores - top)
    return Weights(shares, top, shares.sum(axis=-1, keepdims=True))


def _weighed_in_place(scores: mx.array) -> Weights:
    view: NDArray[np.float32] = np.array(scores, copy=False)
    top = view.max(axis=-1, keepdims=True)
    view -= top
    np.exp(view, out=view)
    return Weights(scores, mx.array(top), mx.array(view.sum(axis=-1, keepdims=True)))
