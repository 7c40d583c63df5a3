"""The differences between devices: limits, and the operations that a model's layers call.

A backend is a path of computing. `metal` is the base and uses MLX's operations alone; `cpu` and
`cuda` replace some of them. Any path runs on any device, but CUDA's kernels, which need CUDA.

Importing this package imports no MLX: the environment that MLX reads when it starts is set in here.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from .output_rows import OutputRows

Name = Literal["cpu", "metal", "cuda"]
"""A backend's name, or that of the device it is made for."""


@dataclass(frozen=True)
class Limits:
    """The properties of a device that scheduler and daemon know.

    Attributes:
        fp32: weights become fp32: the device has no other fast type.
        overlaps: the device computes while the host goes on, so that a step is launched before
            the last one's tokens are read.
        warms_up: kernels are compiled or loaded when they are first met, which must be before
            the first request.
        host_reads: the host can read arrays where the device wrote them. Else an array that the
            host reads moves to the host's memory and stays there.
        prefill_chunk: prompt tokens that are best computed at once.
        max_stall: seconds for which a call of a prompt may keep streams waiting, unless the user
            sets it.
        freed_bytes: freed buffers that MLX keeps for the next arrays, at most. Other programs use
            the memory of a Mac; a card's is free for them. A CPU's calls have ever other sizes,
            and the C library gives what is freed to any: nothing is kept there.
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


class Softmax(NamedTuple):
    """Softmax of scores, over their last axis, that can be merged with others.

    Attributes:
        shares: `[..., n]`, which sum to 1, in the scores' type.
        lse: `[..., 1]`, the log of the sum of the scores' exponentials, in fp32.
    """

    shares: "mx.array"
    lse: "mx.array"


@dataclass(frozen=True)
class Backend(ABC):
    """The operations of a path. A value, so that tests can run every path on a CPU.

    Attributes:
        limits: what scheduler and daemon know of it.
        block: tokens of a prompt that attend at a time; None where attention is one kernel.
        compiles: small functions are compiled into one kernel.
        length_multiple: of tokens for which products are fast; see `kv/alignment.py`.
        launches_layers: prompts and decode steps are launched layer by layer. MLX makes CUDA graphs
            of so many operations, a hundred on Hopper, and it takes 2 to 10 ms to make one that was
            not met yet: so cut, all layers of a kind are one graph.
    """

    limits: Limits
    block: int | None = None
    compiles: bool = True
    length_multiple: int = 1
    launches_layers: bool = False

    @abstractmethod
    def prepare(self, model: Any) -> "OutputRows":
        """Make a model's layers call this backend's operations; see `prepare.prepare`."""

    @abstractmethod
    def attend(
        self,
        queries: "mx.array",
        keys: "mx.array",
        values: "mx.array",
        scale: float,
        mask: "mx.array | str | None",
        sinks: "mx.array | None",
    ) -> "mx.array":
        """Attend to keys that lie in one piece.

        Args:
            queries: `[B, heads, T, size]`.
            keys: `[B, kv_heads, N, size]`. With a causal mask the last T are the queries' own.
            values: likewise.
            scale: of the scores.
            mask: None, "causal", or an array that broadcasts to `[B, heads, T, N]`: true where a
                query may look, or what is added to the scores.
            sinks: `[heads]`, or None.

        Returns:
            `[B, heads, T, size of a value]`.
        """

    @abstractmethod
    def softmaxes(self, scores: "Sequence[mx.array]") -> list[Softmax]:
        """Compute several softmaxes. The scores are overwritten: only the caller may hold them.

        Args:
            scores: `[..., n]` each; each row has one that is not -inf.
        """

    @abstractmethod
    def swiglu(self, gate: "mx.array", x: "mx.array") -> "mx.array":
        """Multiply `silu(gate)` and `x`, which have one shape."""

    @abstractmethod
    def gated_delta(
        self, q: "mx.array", *others: Any, **options: Any
    ) -> "tuple[mx.array, mx.array]":
        """Compute the gated delta rule, with the signature of mlx-lm's `gated_delta_update`."""

    @abstractmethod
    def convolution(self, layer: Any) -> type | None:
        """The class that computes a convolution in the place of its own; None to leave it."""


def device_name() -> Name:
    """Name the device that computes in this process."""
    import mlx.core as mx  # noqa: PLC0415  (see above)

    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if sys.platform == "darwin" else "cuda"


def choose(name: Name | None = None) -> Backend:
    """Choose how models are run on this device.

    Args:
        name: a path, in the place of the device's own. It keeps to what the device's memory,
            types and compiler are like.

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


def _backend(name: Name) -> Backend:
    if name == "cpu":
        from .cpu import CPU  # noqa: PLC0415  (see above)

        return CPU
    if name == "metal":
        from .metal import METAL  # noqa: PLC0415  (see above)

        return METAL
    from .cuda import CUDA  # noqa: PLC0415  (see above)

    return CUDA


def limits_of(name: Name | None = None) -> Limits:
    """The limits of the backend that `choose` chooses.

    Raises:
        ModelLoadError: as there.
    """
    return choose(name).limits
