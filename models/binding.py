"""Puts what is computed otherwise here in the place of mlx-lm's functions.

That is in the modules whose classes make up a loaded model. All models of these classes in this
process call what was bound last.
"""

import sys
from collections.abc import Callable
from typing import Any

from mlx_lm.models import activations, base, gated_delta
from mlx_lm.models.cache import ChunkedKVCache

from . import short_convolution
from .activations import Swiglu
from .attention.binding import Attention
from .attention.chunked import CountsByRow
from .gated_delta import GatedDelta
from .load.device import DevicePolicy

BOUND: dict[str, tuple[Callable[..., Any], type[Attention | Swiglu | GatedDelta]]] = {
    "scaled_dot_product_attention": (base.scaled_dot_product_attention, Attention),
    "swiglu": (activations.swiglu, Swiglu),
    "gated_delta_update": (gated_delta.gated_delta_update, GatedDelta),
}
"""By its name, a function and what stands in its place."""


def bind(model: Any, device: DevicePolicy) -> None:
    """Have a model's modules call what is computed for this device.

    Args:
        model: mlx-lm's.
        device: whose.
    """
    short_convolution.bind(model, by_kernel=device.convolution_kernel)
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, (function, bound) in BOUND.items():
            present = getattr(module, name, None)
            if present is function or isinstance(present, bound):
                setattr(module, name, bound(device))
        if getattr(module, "ChunkedKVCache", None) is ChunkedKVCache:
            vars(module)["mx"] = CountsByRow()
