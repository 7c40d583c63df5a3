"""Softmax whose parts can be merged: shares, and the log of the sum they were divided by.

MLX's exponential on x86 is scalar: about 20 ns an element, so that a prompt of 540 tokens
spends half its prefill in it. NumPy's is vectorised, ten times faster. Where attention is not
fused (the CPU), scores in fp32 are therefore evaluated and turned into shares in place, in MLX's
own buffer: a NumPy view of an MLX array may be written to. Elsewhere it is MLX's kernels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from ..load.device import DevicePolicy
from . import softmax_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Softmax(NamedTuple):
    """Softmax of scores, over their last axis.

    Attributes:
        shares: `[..., n]`, which sum to 1, in the scores' type.
        lse: `[..., 1]`, the log of the sum of the scores' exponentials, in fp32.
    """

    shares: mx.array
    lse: mx.array


def softmaxes(
    scores: Sequence[mx.array], device: DevicePolicy, *, scale: float = 1.0
) -> list[Softmax]:
    """Compute several softmaxes. The scores are overwritten, so only the caller may hold them.

    Each row of scores must have one that is not -inf.

    Args:
        scores: `[..., n]` each.
        device: how they are computed.
        scale: of the scores, which they have yet to be multiplied with.
    """
    if device.attention_kernels and all(array.dtype in softmax_kernel.TYPES for array in scores):
        return [Softmax(*softmax_kernel.softmax(array, scale)) for array in scores]
    if scale != 1.0:
        scores = [array * scale for array in scores]
    if not device.fused and all(array.dtype == mx.float32 for array in scores):
        mx.eval(list(scores))
        return [_in_place(array) for array in scores]
    return [
        Softmax(
            mx.softmax(array, axis=-1, precise=True),
            mx.logsumexp(array.astype(mx.float32), axis=-1, keepdims=True),
        )
        for array in scores
    ]


def _in_place(scores: mx.array) -> Softmax:
    view: NDArray[np.float32] = np.array(scores, copy=False)
    top = view.max(axis=-1, keepdims=True)
    view -= top
    np.exp(view, out=view)
    total = view.sum(axis=-1, keepdims=True)
    view /= total
    return Softmax(scores, mx.array(top + np.log(total)))
