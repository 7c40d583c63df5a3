"""The mlx runtime of this process: device, memory, and the end of its thread."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import BLAS  # the first import of mlx.core must come after the BLAS is chosen

import mlx.core as mx  # isort: skip

from ..control_group import memory_limit
from .device_memory import NO_LIMIT, DeviceMemory, gpu_memory, host_memory

T = TypeVar("T")


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


def device_memory() -> DeviceMemory:
    """Ask the device, or the operating system where MLX computes on the CPU."""
    info: dict[str, Any] = dict(mx.device_info())
    buffers = int(info.get("resource_limit") or NO_LIMIT)
    if backend() == "cpu":
        return host_memory(_host_memory())
    total = int(info.get("memory_size") or info.get("total_memory") or _host_memory())
    recommended = int(info.get("max_recommended_working_set_size") or total)
    return gpu_memory(f"{backend()} memory", total, recommended, buffers)


def _host_memory() -> int:
    """Bytes of physical memory, or the limit of this process's control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return total if limit is None else min(total, limit)


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
    """Do something; return what it returned, and the bytes it took for the while.

    These are the most that was active during it, over what was active before or after it.
    """
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


def backend() -> str:
    """Name the backend that computes: `metal`, `cuda` or `cpu`."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if sys.platform == "darwin" else "cuda"


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
    "DeviceMemory",
    "MemoryStatistics",
    "backend",
    "device_memory",
    "give_freed_memory_back",
    "keep_freed_memory",
    "launch",
    "launch_in_turn",
    "matmul_gflops",
    "memory_statistics",
    "peak_of",
    "release_thread",
    "resident_bytes",
]
