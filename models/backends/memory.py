"""The memory that a device has for weights and state."""

import os
from dataclasses import dataclass
from typing import Any

from ...control_group import memory_limit
from . import device_name

NO_LIMIT = 1 << 62
"""Allocations of a process, where the device does not bound them."""

_WIRED_BELOW, _WIRED_FROM = (2, 3), (3, 4)
"""The part of a Mac's memory that its GPU may wire, below and from `_LARGE_MAC` bytes on."""
_LARGE_MAC = 36 * 10**9


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Attributes:
        name: for people.
        total: of the device.
        recommended: upper bound for one process.
        headroom: part of it that is left to other programs and the allocator.
        buffers: allocations that a process may have.
    """

    name: str
    total: int
    recommended: int
    headroom: int
    buffers: int

    @property
    def usable(self) -> int:
        """Bytes that weights, state and request bodies may take together."""
        return self.recommended - self.headroom

    def budget(self, resident: int, bodies: int) -> int:
        """Bytes for state beside the weights and the largest request bodies; 0 or less if none."""
        return self.usable - resident - bodies


def host_memory(total: int) -> DeviceMemory:
    """Describe the memory of a machine whose CPU computes, beside other programs."""
    return DeviceMemory("host memory", total, total, total // 4, NO_LIMIT)


def gpu_memory(name: str, total: int, recommended: int, buffers: int = NO_LIMIT) -> DeviceMemory:
    """Describe a GPU's memory. A quarter of its allocations is left to the step that runs."""
    headroom = max(1 << 29, recommended // 16)
    return DeviceMemory(name, total, recommended, headroom, buffers * 3 // 4)


def mac_memory(total: int) -> DeviceMemory:
    """Describe a Mac of this size, with macOS's own limit of what a GPU may wire."""
    part, of = _WIRED_BELOW if total < _LARGE_MAC else _WIRED_FROM
    return gpu_memory("metal memory", total, total * part // of)


def device_memory() -> DeviceMemory:
    """Read the device's memory, or the system's where MLX computes on the CPU."""
    import mlx.core as mx  # noqa: PLC0415  (planning for another machine needs no MLX)

    if device_name() == "cpu":
        return host_memory(_host_memory())
    info: dict[str, Any] = dict(mx.device_info())
    buffers = int(info.get("resource_limit") or NO_LIMIT)
    total = int(info.get("memory_size") or info.get("total_memory") or _host_memory())
    recommended = int(info.get("max_recommended_working_set_size") or total)
    return gpu_memory(f"{device_name()} memory", total, recommended, buffers)


def _host_memory() -> int:
    """Bytes of physical memory, or the limit of this process's control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return total if limit is None else min(total, limit)
