"""MLX in this process: device, memory, launches, and the end of its thread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import BLAS  # the first import of mlx.core must come after the BLAS is chosen

import mlx.core as mx  # isort: skip

from .backends import device_name
from .backends.memory import device_memory

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryStatistics:
    """MLX's own figures, in bytes.

    Attributes:
        active: held by live arrays, weights included.
        cached: freed by arrays and kept by the allocator for the next ones.
        peak: upper bound of `active` so far.
    """

    active: int
    cached: int
    peak: int


def keep_freed_memory(limit: int) -> None:
    """Bound the freed buffers that MLX keeps for the next arrays, in bytes."""
    mx.set_cache_limit(limit)


def give_freed_memory_back() -> None:
    """Return the freed buffers that MLX keeps to the system."""
    mx.clear_cache()


def memory_statistics() -> MemoryStatistics:
    """Read the allocator's counters; cheap, and safe from any thread."""
    return MemoryStatistics(
        active=mx.get_active_memory(),
        cached=mx.get_cache_memory(),
        peak=mx.get_peak_memory(),
    )


def peak_of(work: Callable[[], T]) -> tuple[T, int]:
    """Run `work`; return its result, and the peak of active bytes over those before or after."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = work()
    mx.synchronize()
    return result, mx.get_peak_memory() - max(before, mx.get_active_memory())


def resident_bytes() -> int:
    """Bytes that are active while nothing is computed."""
    mx.synchronize()
    return mx.get_active_memory()


def launch(*arrays: Any) -> None:
    """Start computing arrays, in any nesting, and do not wait for them."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def launch_in_turn(layers: Sequence[Any]) -> None:
    """Start computing the state that each layer wrote, one launch a layer.

    Args:
        layers: arrays of each, in any nesting, in the model's order.
    """
    for arrays in layers:
        launch(arrays)


def release_thread() -> None:
    """Finish and drop this thread's streams: its last MLX call.

    The C++ runtime aborts a process that exits soon after a thread with live streams ended
    ("terminate called without an active exception").
    """
    mx.synchronize()
    mx.clear_streams()


def matmul_gflops(size: int = 1024) -> float:
    """Measure fp32 matrix products, in GFLOP/s: a second with the reference BLAS, else less."""
    a = mx.ones((size, size))
    mx.eval(a @ a)
    start = time.perf_counter()
    mx.eval(a @ (a + 1))
    return 2 * size**3 / (time.perf_counter() - start) / 1e9


__all__ = ["BLAS", "device_memory", "device_name"]  # of other modules, for importers of this one
