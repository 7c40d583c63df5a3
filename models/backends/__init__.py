"""The differences between devices: limits, and the operations that a model's layers call.

A backend is a path of computing. `base` uses MLX's operations alone and is the path of a Mac; `cpu`
and `cuda` replace some of them. Any path runs on any device, except CUDA's kernels on others.

Importing this package imports no MLX: `environment` sets what MLX reads when it starts.
"""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ..errors import ModelLoadError

if TYPE_CHECKING:
    from .base import Backend

Name = Literal["cpu", "metal", "cuda"]
"""A backend's name, or that of the device it is made for."""


@dataclass(frozen=True)
class Limits:
    """The properties of a device that scheduler and daemon know.

    Attributes:
        fp32: weights become fp32: the device has no other fast type.
        overlaps: the device computes while the host goes on, so that a step is launched before
            the last one's tokens are read.
        warms_up: kernels are compiled or loaded at their first use, which must be before the first
            request.
        host_reads: the host can read arrays where the device wrote them. Else an array that the
            host reads moves to the host's memory and stays there.
        prefill_chunk: prompt tokens that are best computed at once.
        max_stall: seconds for which a call of a prompt may keep streams waiting, unless the user
            sets it.
        freed_bytes: freed buffers that MLX keeps for the next arrays, at most. Other programs use
            the memory of a Mac; a card's is free for them. A CPU's calls have ever other sizes,
            and the C library reuses freed memory for any: nothing is kept there.
        contiguous: a sequence that decodes alone has its keys in one piece, so that attention is
            one launch a layer.
        row_multiple: of rows for which products are the fastest.
    """

    fp32: bool
    overlaps: bool
    warms_up: bool
    host_reads: bool
    prefill_chunk: int
    max_stall: float
    freed_bytes: int
    contiguous: bool = False
    row_multiple: int = 1


def device_name() -> Name:
    """Name the device that computes in this process."""
    import mlx.core as mx  # noqa: PLC0415  (see above)

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if sys.platform == "darwin" else "cuda"


def choose(name: Name | None = None) -> "Backend":
    """Choose how models are run on this device.

    Args:
        name: a path, in the place of the device's own. The limits of the device's memory, types
            and compiler stay.

    Raises:
        ModelLoadError: the path is CUDA's, and the device is another one.
    """
    device = device_name()
    if name is None or name == device:
        return _backend(device)
    if name == "cuda":
        raise ModelLoadError(f"the backend cuda needs CUDA, and MLX computes on {device}")
    path, own = _backend(name), _backend(device)
    limits = replace(
        path.limits,
        fp32=path.limits.fp32 or own.limits.fp32,
        host_reads=own.limits.host_reads,
        freed_bytes=own.limits.freed_bytes,
    )
    return replace(path, limits=limits, compiles=path.compiles and own.compiles)


def _backend(name: Name) -> "Backend":
    if name == "cpu":
        from .cpu import CPU  # noqa: PLC0415  (see above)

        return CPU
    if name == "metal":
        from .base import METAL  # noqa: PLC0415  (see above)

        return METAL
    from .cuda import CUDA  # noqa: PLC0415  (see above)

    return CUDA


def limits_of(name: Name | None = None) -> Limits:
    """The limits of the backend that `choose` returns; raises as it does."""
    return choose(name).limits
