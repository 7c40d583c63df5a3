"""SiLU of mlx-lm's layers through NumPy on a CPU.

MLX's exponential is scalar on x86, where SiLU takes a third of a prefill. NumPy's is vectorised;
`attention.softmax` uses it, too. Waiting for a few thousand gates, those of two tokens of SmolLM2,
takes longer than MLX's exponential does.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.models import activations

from .load.device import DevicePolicy

_compiled = activations.swiglu


@dataclass(frozen=True)
class Swiglu:
    """SwiGLU of a prepared model, in the place of mlx-lm's function.

    Attributes:
        device: how it is computed.
    """

    device: DevicePolicy

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        """Multiply `silu(gate)` and `x`, which have one shape."""
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
