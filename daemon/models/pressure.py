"""What the operating system says about memory pressure, polled.

macOS gives a level. Linux gives the time that tasks stalled for want of memory (PSI), of which
a level is made here. Both are read in microseconds and without waiting, on the event loop.
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
from typing import Literal, NamedTuple, Protocol

import msgspec
import structlog

from ...cachestore.shrink import Pressure, Shrink
from ...control_group import GROUPS, PROC, unified_group

log = structlog.get_logger()

# Shares of the time between two polls. They are a choice: systemd-oomd kills at 60 % of `full`
# for 30 s, and the budget is to shrink long before.
SOME_WARNING = 0.10
SOME_CRITICAL = 0.40
FULL_CRITICAL = 0.10

_SYSCTL = b"kern.memorystatus_vm_pressure_level"
# Of libdispatch's DISPATCH_MEMORYPRESSURE_*, which this sysctl is translated to in the kernel.
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


class Source(Protocol):
    """Where a level comes from. To be called about once a second, by one caller.

    Attributes:
        name: what is read, for people.
        figures: what the level of the last call was made from, for its log line.
    """

    name: str
    figures: Mapping[str, float]

    def __call__(self) -> Pressure:
        """Read the level.

        Raises:
            OSError: it cannot be read.
            ValueError: what was read makes no sense.
        """
        ...


class SysctlSource:
    """The level that macOS computes: `kern.memorystatus_vm_pressure_level`, for any user.

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
            OSError: the kernel does not tell.
            ValueError: the value is none of those that the kernel's source has.
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
    """Microseconds in which some task stalled for memory, and in which all that could run did."""

    some: int
    full: int


class PsiSource:
    """The level from one of Linux's PSI files, since the last call; the first only begins.

    The totals are used, as avg10 takes ten seconds to follow them.

    Args:
        path: the file. It stays open: the daemon's other files may take all descriptors.
        clock: monotonic time in seconds.

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
            OSError: the file cannot be read: EOPNOTSUPP where PSI is off, ENODEV where the
                cgroup is gone.
            ValueError: it is no PSI file.
        """
        now, total = self._clock(), _parse_psi(os.pread(self._file, _PSI_BYTES, 0))
        last, self._last = self._last, (now, total)
        self.figures = {}
        if last is None:
            return Pressure.NORMAL
        seconds, before = now - last[0], last[1]
        if seconds <= 0 or total.some < before.some or total.full < before.full:
            return Pressure.NORMAL  # the counters began anew: nothing is known of this interval
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


def find_source() -> Source | None:
    """Find what this system tells of its memory, if it does. Raises nothing."""
    return find_sysctl() if sys.platform == "darwin" else find_psi()


def find_sysctl() -> SysctlSource | None:
    """Find macOS's level, if this is macOS."""
    try:
        source = SysctlSource(SYSCTLBYNAME(("sysctlbyname", ctypes.CDLL(None))))
        source()
    except (AttributeError, OSError, ValueError):
        return None
    return source


def find_psi(proc: Path = PROC, cgroups: Path = GROUPS) -> PsiSource | None:
    """Find the PSI file of this process's cgroup, where systemd's MemoryHigh shows, or the host's.

    Args:
        proc: where procfs is mounted.
        cgroups: where cgroup v2 is mounted. Beside v1 it is elsewhere and limits no memory.
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
    """What `/status` tells of the memory's pressure.

    Attributes:
        level: what was read last.
        share: what may be used of the configured budget, 0.25 to 1.
        source: what is read; None where nothing can be, and the level is normal for ever.
    """

    level: Level
    share: float
    source: str | None


class PressureWatch:
    """Polls a source and says how far the budget shrinks.

    Args:
        source: reads the level; None where the system has none. An exception of it is logged,
            once, and it is not called again. `Source` has what the log line and `status` tell.
        on_share: is called on the event loop with the share of the configured budget that may
            be used, whenever it has changed. Before the first call it is 1.
        clock: monotonic time in seconds.
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
        """The level, the share and the source, as of the last poll."""
        return PressureStatus(_LEVELS[self._level], self._shrink.share, self._name)

    @property
    def _name(self) -> str | None:
        return None if self._source is None else getattr(self._source, "name", "simulated")

    async def run(self) -> None:
        """Poll until cancelled. Only an exception of `on_share` ends it otherwise."""
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
        except Exception as error:  # noqa: BLE001  (a hint is missing, nothing worse)
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
