"""Memory pressure of the operating system, polled.

macOS gives a level. Linux gives the time that tasks stalled for lack of memory (PSI), which is made
a level here. Both are read in microseconds and without waiting, on the event loop.
"""

import asyncio
import ctypes
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import structlog

from ...cachestore.shrink import Pressure, Shrink
from ...control_group import GROUPS, PROC, unified_group

log = structlog.get_logger()

# Shares of the time between two polls. They are a choice: systemd-oomd kills at 60 % of `full`
# for 30 s, and the budget should shrink long before.
SOME_WARNING = 0.10
SOME_CRITICAL = 0.40
FULL_CRITICAL = 0.10

_SYSCTL = b"kern.memorystatus_vm_pressure_level"
# The kernel translates this sysctl to libdispatch's DISPATCH_MEMORYPRESSURE_*.
_SYSCTL_LEVELS = {1: Pressure.NORMAL, 2: Pressure.WARNING, 4: Pressure.CRITICAL}
SYSCTLBYNAME = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
    ctypes.c_size_t,
    use_errno=True,
)
"""The type of libc's `sysctlbyname`: name, old value and its size, new value and its size."""

_PSI_LINE = re.compile(rb"^(some|full) avg10=\S+ avg60=\S+ avg300=\S+ total=(\d+)$", re.MULTILINE)
_PSI_BYTES = 4096  # more than any such file has

Level = Literal["normal", "warning", "critical"]
_LEVELS: dict[Pressure, Level] = {
    Pressure.NORMAL: "normal",
    Pressure.WARNING: "warning",
    Pressure.CRITICAL: "critical",
}


class SysctlSource:
    """The level of macOS: `kern.memorystatus_vm_pressure_level`, for any user.

    Attributes:
        name: of the source, for people.
        figures: that the last level was made from, for its log line.

    Args:
        sysctlbyname: libc's function, of the type `SYSCTLBYNAME`.
    """

    name = _SYSCTL.decode()

    def __init__(self, sysctlbyname: Callable[..., int]) -> None:
        self.figures: Mapping[str, float] = {}
        self._sysctlbyname = sysctlbyname

    def __call__(self) -> Pressure:
        """Read the level.

        Raises:
            OSError: the kernel refuses.
            ValueError: the kernel's source has no such value.
        """
        value = ctypes.c_int(0)
        size = ctypes.c_size_t(ctypes.sizeof(value))
        if self._sysctlbyname(_SYSCTL, ctypes.byref(value), ctypes.byref(size), None, 0):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), self.name)
        self.figures = {"value": value.value}
        if value.value not in _SYSCTL_LEVELS:
            raise ValueError(f"{self.name} is {value.value}, which is no level")
        return _SYSCTL_LEVELS[value.value]


class Stalled(NamedTuple):
    """Microseconds in which some task stalled for memory, and in which all of them did."""

    some: int
    full: int


class PsiSource:
    """The level since the last call, from a PSI file of Linux; the first call returns NORMAL.

    It is computed from the totals: avg10 takes ten seconds to follow them.

    Attributes:
        name: of the source, for people.
        figures: that the last level was made from, for its log line.

    Args:
        path: of the file. It stays open: the daemon's other files may take all descriptors.
        clock: seconds, monotonic.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = str(path)
        self.figures: Mapping[str, float] = {}
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._clock = clock
        self._last: tuple[float, Stalled] | None = None

    def __call__(self) -> Pressure:
        """Read the totals and compare them with the last ones.

        Raises:
            OSError: the file cannot be read: EOPNOTSUPP if PSI is off, ENODEV if the cgroup is
                gone.
            ValueError: it is no PSI file.
        """
        now, total = self._clock(), _parse_psi(os.pread(self._file, _PSI_BYTES, 0))
        last, self._last = self._last, (now, total)
        self.figures = {}
        if last is None:
            return Pressure.NORMAL
        seconds, before = now - last[0], last[1]
        if seconds <= 0 or total.some < before.some or total.full < before.full:
            return Pressure.NORMAL  # the counters were reset: this interval is unknown
        some = (total.some - before.some) / 1e6 / seconds
        full = (total.full - before.full) / 1e6 / seconds
        self.figures = {"some": round(some, 3), "full": round(full, 3)}
        return _stall_level(some, full)


def _parse_psi(text: bytes) -> Stalled:
    totals = {kind: int(total) for kind, total in _PSI_LINE.findall(text)}
    if totals.keys() != {b"some", b"full"}:
        raise ValueError(f"no PSI figures in {text[:80]!r}")
    return Stalled(totals[b"some"], totals[b"full"])


def _stall_level(some: float, full: float) -> Pressure:
    if full >= FULL_CRITICAL or some >= SOME_CRITICAL:
        return Pressure.CRITICAL
    return Pressure.WARNING if some >= SOME_WARNING else Pressure.NORMAL


def find_source() -> SysctlSource | PsiSource | None:
    """Find this system's source of memory pressure; None without one. Raises nothing."""
    return find_sysctl() if sys.platform == "darwin" else find_psi()


def find_sysctl() -> SysctlSource | None:
    """Find the level of macOS; None elsewhere."""
    try:
        source = SysctlSource(SYSCTLBYNAME(("sysctlbyname", ctypes.CDLL(None))))
        source()
    except (AttributeError, OSError, ValueError):
        return None
    return source


def find_psi(proc: Path = PROC, cgroups: Path = GROUPS) -> PsiSource | None:
    """Find the PSI file of this process's cgroup, which shows systemd's MemoryHigh, or the host's.

    Args:
        proc: the mount of procfs.
        cgroups: the mount of cgroup v2. Beside v1 it is elsewhere and limits no memory.
    """
    own = unified_group(proc)
    paths = [] if own is None else [cgroups / own / "memory.pressure"]
    for path in [*paths, proc / "pressure/memory"]:
        try:
            PsiSource(path)()
            return PsiSource(path)
        except (OSError, ValueError):
            continue
    return None


class PressureStatus(msgspec.Struct):
    """Memory pressure in `/status`.

    Attributes:
        level: the last one.
        share: usable share of the configured budget, 0.25 to 1.
        source: of the level; None without one, and then the level stays normal.
    """

    level: Level
    share: float
    source: str | None


class PressureWatch:
    """Polls a source, and shrinks the budget.

    Args:
        source: returns the level; None if the system has none. Its first exception is logged, and
            it is not called again. `name` and `figures` of it, if any, are in the log and `status`.
        on_share: called on the event loop with the usable share of the configured budget,
            whenever it has changed. Before the first call it is 1.
        clock: seconds, monotonic.
        interval: seconds between polls.
    """

    def __init__(
        self,
        source: Callable[[], Pressure] | None,
        on_share: Callable[[float], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        interval: float = 1.0,
    ) -> None:
        self._source = source
        self._on_share = on_share
        self._clock = clock
        self._interval = interval
        self._shrink = Shrink()
        self._level = Pressure.NORMAL

    @property
    def status(self) -> PressureStatus:
        """Level, share and source of the last poll."""
        return PressureStatus(_LEVELS[self._level], self._shrink.share, self._name)

    @property
    def _name(self) -> str | None:
        return None if self._source is None else getattr(self._source, "name", "simulated")

    async def run(self) -> None:
        """Poll until cancelled, or until `on_share` raises."""
        while True:
            self._poll()
            await asyncio.sleep(self._interval)

    def _poll(self) -> None:
        level, before = self._read(), self._shrink.share
        share = self._shrink.observe(level, self._clock())
        if level != self._level:
            self._log_change(level, share)
            self._level = level
        if share != before:
            self._on_share(share)

    def _read(self) -> Pressure:
        if self._source is None:
            return Pressure.NORMAL
        try:
            return self._source()
        except Exception as error:  # noqa: BLE001  (only a hint is missing)
            log.warning("memory pressure is no longer read", source=self._name, error=str(error))
            self._source = None
            return Pressure.NORMAL

    def _log_change(self, level: Pressure, share: float) -> None:
        write = log.info if level == Pressure.NORMAL else log.warning
        write(
            "memory pressure",
            pressure=_LEVELS[level],
            before=_LEVELS[self._level],
            share=share,
            source=self._name,
            **getattr(self._source, "figures", {}),
        )
