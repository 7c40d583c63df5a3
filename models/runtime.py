"""The mlx runtime of this process: device, memory, and the end of its thread."""

import sys
import time
from dataclasses import dataclass
from typing import Any

from . import BLAS  # the first import of mlx.core must come after the BLAS is chosen

import mlx.core as mx  # isort: skip


@dataclass(frozen=True)
class MemoryStatistics:
    """MLX's own figures, in bytes.

    Attributes:
        active: held by live arrays, weights included.
        cached: freed by arrays and kept by the allocator for the next ones.
        peak: the most that was ever active.
    """

    active: int
    cached: int
    peak: int


def memory_statistics() -> MemoryStatistics:
    """Read the allocator's counters; cheap, and safe from any thread."""
    return MemoryStatistics(
        active=mx.get_active_memory(),
        cached=mx.get_cache_memory(),
        peak=mx.get_peak_memory(),
    )


def backend() -> str:
    """Name the backend that computes: `metal`, `cuda` or `cpu`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if sys.platform == "darwin" else "cuda"


def launch(*arrays: Any) -> None:
    """Start computing arrays, in any nesting, and do not wait for them."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def release_thread() -> None:
    """Finish and drop this thread's streams: its last MLX call.

    A process that exits soon after a thread with live streams ended is aborted by the
    C++ runtime ("terminate called without an active exception"). After this call the
    thread cannot use MLX again.
    """
    mx.synchronize()
    mx.clear_streams()


def matmul_gflops(size: int = 1024) -> float:
    """Measure fp32 matrix products on the default device, in GFLOP/s.

    Takes milliseconds with a fast BLAS and about a second with the reference one.
    """
    a = mx.ones((size, size))
    mx.eval(a @ a)
    start = time.perf_counter()
    mx.eval(a @ (a + 1))
    return 2 * size**3 / (time.perf_counter() - start) / 1e9


__all__ = [
    "BLAS",
    "MemoryStatistics",
    "backend",
    "launch",
    "matmul_gflops",
    "memory_statistics",
    "release_thread",
]
