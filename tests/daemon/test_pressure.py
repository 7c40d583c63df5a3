"""The system's memory figures, from files and functions that the tests write."""

import asyncio
import ctypes
import errno
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from umbel.cachestore.shrink import Pressure
from umbel.daemon.models.pressure import (
    SYSCTLBYNAME,
    PressureStatus,
    PressureWatch,
    PsiSource,
    SysctlSource,
    find_psi,
    find_source,
    find_sysctl,
)

NORMAL, WARNING, CRITICAL = Pressure
LINUX = sys.platform == "linux"


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        """Tell the time in seconds."""
        return self.now


def psi(some: float, full: float) -> str:
    """Write a PSI file as the kernel does, with totals in seconds."""
    return (
        f"some avg10=12.34 avg60=3.08 avg300=0.65 total={round(some * 1e6)}\n"
        f"full avg10=0.00 avg60=0.00 avg300=0.00 total={round(full * 1e6)}\n"
    )


def write(path: Path, text: str) -> Path:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


class Host:
    """A PSI file whose totals grow, and a source that reads it."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.path = write(folder / "memory", psi(7000, 3000))
        self.source = PsiSource(self.path, self.clock)
        self.some, self.full = 7000.0, 3000.0

    def after(self, seconds: float, some: float, full: float) -> Pressure:
        """Read the level after tasks have stalled for so many of these seconds."""
        self.clock.now += seconds
        self.some += some
        self.full += full
        self.path.write_text(psi(self.some, self.full))
        return self.source()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host whose totals were read once."""
    made = Host(tmp_path)
    made.source()
    return made


class TestPsi:
    """Linux: stall times to levels."""

    def test_the_first_reading_only_begins(self, tmp_path: Path) -> None:
        """Hours of stalls since the host was started say nothing of now."""
        host = Host(tmp_path)
        assert host.source() == NORMAL
        assert host.source.figures == {}

    @pytest.mark.parametrize(
        ("some", "full", "level"),
        [
            (0.0, 0.0, NORMAL),
            (0.09, 0.09, NORMAL),
            (0.11, 0.0, WARNING),
            (0.39, 0.09, WARNING),
            (0.41, 0.0, CRITICAL),
            (0.11, 0.11, CRITICAL),
            (1.0, 1.0, CRITICAL),
        ],
    )
    def test_levels(self, host: Host, some: float, full: float, level: Pressure) -> None:
        """Some tasks stalled for a tenth: a warning. All did, or some for long: critical."""
        assert host.after(1.0, some, full) == level
        assert host.source.figures == {"some": some, "full": full}

    def test_stalls_are_a_share_of_the_time_that_passed(self, host: Host) -> None:
        """The same stall weighs less in a longer interval."""
        assert host.after(1.0, 0.2, 0.0) == WARNING
        assert host.after(4.0, 0.2, 0.0) == NORMAL
        assert host.source.figures == {"some": 0.05, "full": 0.0}

    def test_one_interval_tells_and_the_next_forgets(self, host: Host) -> None:
        """The level follows at once, in both directions, whatever the averages say."""
        levels = [host.after(1.0, stall, stall / 8) for stall in (0.0, 0.3, 0.0, 0.9, 0.0)]
        assert levels == [NORMAL, WARNING, NORMAL, CRITICAL, NORMAL]

    @pytest.mark.parametrize(("some", "full"), [(-6999.0, 0.5), (0.5, -2999.0), (-6999.0, -2999.0)])
    def test_counters_that_go_back_begin_anew(self, host: Host, some: float, full: float) -> None:
        """Nothing is known of that interval, and the next one counts from there."""
        assert host.after(1.0, 0.2, 0.0) == WARNING
        assert host.after(1.0, some, full) == NORMAL
        assert host.source.figures == {}
        assert host.after(1.0, 0.2, 0.0) == WARNING

    def test_no_time_between_two_readings(self, host: Host) -> None:
        """There is no share of nothing."""
        assert host.after(0.0, 0.5, 0.5) == NORMAL
        assert host.after(1.0, 0.2, 0.0) == WARNING

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "some\n",
            psi(1, 1).splitlines()[0],
            psi(1, 1).replace("full", "some"),
            psi(1, 1).replace("total=1000000", "total=-1"),
            psi(1, 1).replace("total=", "total:"),
            "\x00\xff" * 50,
        ],
    )
    def test_malformed_text_is_an_error(self, host: Host, text: str) -> None:
        host.path.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match="no PSI figures"):
            host.source()

    def test_its_descriptor_goes_with_it(self, tmp_path: Path) -> None:
        """It holds one while it lives, so that reading needs none, and none after."""
        path = write(tmp_path / "memory", psi(1, 1))
        source = PsiSource(path)
        held = source._file
        assert os.path.samestat(os.fstat(held), path.stat())
        assert not os.get_inheritable(held)
        del source
        gc.collect()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(held)


class TestFindingPsi:
    """Which file it is, on hosts of several kinds."""

    @pytest.fixture
    def proc(self, tmp_path: Path) -> Path:
        """The procfs of a host with PSI, of a process in a service's cgroup."""
        write(tmp_path / "proc/pressure/memory", psi(1, 1))
        write(tmp_path / "proc/self/cgroup", "0::/user.slice/umbel.service\n")
        return tmp_path / "proc"

    @pytest.fixture
    def cgroups(self, tmp_path: Path) -> Path:
        """An empty folder in which cgroup v2 is mounted."""
        (tmp_path / "cgroup").mkdir()
        return tmp_path / "cgroup"

    def found(self, proc: Path, cgroups: Path) -> str | None:
        """Name what is found."""
        source = find_psi(proc, cgroups)
        return None if source is None else source.name

    def test_the_service_has_its_own(self, proc: Path, cgroups: Path) -> None:
        """That is where the stalls of systemd's MemoryHigh show."""
        own = write(cgroups / "user.slice/umbel.service/memory.pressure", psi(1, 1))
        write(cgroups / "memory.pressure", psi(1, 1))
        assert self.found(proc, cgroups) == str(own)

    def test_a_container_sees_its_own_as_the_root(self, proc: Path, cgroups: Path) -> None:
        """In a cgroup namespace the path is a slash."""
        write(proc / "self/cgroup", "0::/\n")
        own = write(cgroups / "memory.pressure", psi(1, 1))
        assert self.found(proc, cgroups) == str(own)

    def test_v1_lines_are_passed_over(self, proc: Path, cgroups: Path) -> None:
        """Where both are mounted, v2's line is the one of hierarchy 0 without controllers."""
        lines = "9:name=systemd:/a\n4:memory:/process/b\n10:cpu::/c\n0::/d:e/f g\n"
        write(proc / "self/cgroup", lines)
        own = write(cgroups / "d:e/f g/memory.pressure", psi(1, 1))
        assert self.found(proc, cgroups) == str(own)

    @pytest.mark.parametrize(
        "lines", ["", "4:memory:/b\n", "0::/gone (deleted)\n", "0::/../../x\n", "\xff\n", "0::\n"]
    )
    def test_the_hosts_file_else(self, proc: Path, cgroups: Path, lines: str) -> None:
        """A cgroup that is v1, gone, elsewhere or without figures has no file to read."""
        (proc / "self/cgroup").write_text(lines, encoding="latin-1")
        assert self.found(proc, cgroups) == str(proc / "pressure/memory")

    def test_the_hosts_file_where_the_cgroup_is_not_told(self, proc: Path, cgroups: Path) -> None:
        """There may be no such file in procfs."""
        (proc / "self/cgroup").unlink()
        assert self.found(proc, cgroups) == str(proc / "pressure/memory")

    def test_the_hosts_file_where_the_cgroups_own_is_unreadable(
        self, proc: Path, cgroups: Path
    ) -> None:
        own = cgroups / "user.slice/umbel.service/memory.pressure"
        own.mkdir(parents=True)  # opens, and reading it fails
        assert self.found(proc, cgroups) == str(proc / "pressure/memory")
        own.rmdir()
        write(own, "nothing\n")
        assert self.found(proc, cgroups) == str(proc / "pressure/memory")

    def test_no_file_at_all(self, tmp_path: Path) -> None:
        """A kernel without PSI, or a sandbox without procfs, has nothing to tell."""
        assert find_psi(tmp_path / "proc", tmp_path / "cgroup") is None

    @pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EACCES, errno.ENODEV])
    def test_files_that_cannot_be_read(
        self, proc: Path, cgroups: Path, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kernel started with psi=0 has the files, and an error for who reads them."""

        def refuse(*_: object) -> NoReturn:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pread", refuse)
        assert find_psi(proc, cgroups) is None

    @pytest.mark.skipif(not LINUX, reason="procfs is Linux's")
    def test_this_machine(self) -> None:
        source = find_source()
        if source is None:
            pytest.skip("no PSI here")
        assert source() == NORMAL
        assert source.figures == {}
        assert source() in Pressure
        assert source.figures.keys() <= {"some", "full"}


def libc(value: int, failure: int = 0, written: int = 4) -> Callable[..., int]:
    """Make a sysctlbyname that knows one name, called as C calls it."""

    def sysctlbyname(name: bytes, old: int, size: object, new: int | None, new_size: int) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        assert isinstance(size, ctypes._Pointer)
        assert size.contents.value == 4
        assert (new, new_size) == (None, 0)
        if failure:
            ctypes.set_errno(failure)
            return -1
        ctypes.memmove(old, value.to_bytes(4, sys.byteorder), written)
        size.contents.value = written
        return 0

    return SYSCTLBYNAME(sysctlbyname)


class TestSysctl:
    """MacOS: the kernel's level."""

    @pytest.mark.parametrize(("value", "level"), [(1, NORMAL), (2, WARNING), (4, CRITICAL)])
    def test_levels(self, value: int, level: Pressure) -> None:
        """The values are the flags that libdispatch has for them."""
        source = SysctlSource(libc(value))
        assert source() == level
        assert source.figures == {"value": value}

    @pytest.mark.parametrize("value", [0, 3, 8, 2**31])
    def test_other_values_are_an_error(self, value: int) -> None:
        """The kernel's own numbers, 0 to 3, are not what this sysctl tells."""
        with pytest.raises(ValueError, match="no level"):
            SysctlSource(libc(value))()

    def test_nothing_written_is_an_error(self) -> None:
        """A value of no bytes is none."""
        with pytest.raises(ValueError, match="no level"):
            SysctlSource(libc(2, written=0))()

    def test_a_failure_says_why(self) -> None:
        """The error is libc's."""
        with pytest.raises(OSError, match="memorystatus_vm_pressure_level") as caught:
            SysctlSource(libc(1, failure=errno.ENOENT))()
        assert caught.value.errno == errno.ENOENT

    def test_the_error_is_the_one_that_libc_left(self) -> None:
        """Here of a real function that takes a name, too: there is no such folder."""
        ctypes.set_errno(0)
        with pytest.raises(FileNotFoundError, match="memorystatus_vm_pressure_level"):
            SysctlSource(SYSCTLBYNAME(("chdir", ctypes.CDLL(None))))()

    @pytest.mark.skipif(sys.platform == "darwin", reason="here it is found")
    def test_elsewhere_it_is_not_found(self) -> None:
        """Another system's libc has no such function, or the function no such name."""
        assert find_sysctl() is None

    @pytest.mark.skipif(sys.platform != "darwin", reason="this is macOS's")
    def test_this_machine(self) -> None:
        """The real kernel tells one of the three."""
        source = find_source()
        assert isinstance(source, SysctlSource)
        assert source() in Pressure
        assert source.figures["value"] in {1, 2, 4}


class Script:
    """Levels that come a second apart; then the reader is cancelled."""

    name = "script"

    def __init__(self, *levels: Pressure | Exception) -> None:
        self.clock = Clock()
        self.left = list(levels)
        self.figures: dict[str, float] = {}
        self.calls = 0

    def __call__(self) -> Pressure:
        """Read the next level."""
        self.calls += 1
        self.clock.now += 1.0
        if not self.left:
            raise asyncio.CancelledError
        level = self.left.pop(0)
        if isinstance(level, Exception):
            raise level
        self.figures = {"some": level / 10}
        return level


class Watched:
    """A watch over a script, and what it said."""

    def __init__(self, *levels: Pressure | Exception) -> None:
        self.shares: list[float] = []
        self.script = Script(*levels)
        self.watch = PressureWatch(
            self.script, self.shares.append, clock=self.script.clock, interval=0.0
        )

    async def run(self) -> None:
        """Run to the script's end."""
        with pytest.raises(asyncio.CancelledError):
            await self.watch.run()
        assert self.script.left == []


class TestWatch:
    """Levels to shares, log lines and the status."""

    async def test_the_share_is_told_when_it_changes(self) -> None:
        """At a warning and five seconds later, and as it grows; not in between."""
        watched = Watched(*[WARNING] * 6, *[NORMAL] * 45)
        await watched.run()
        assert watched.shares == [0.9, 0.8, 0.9, 1.0]
        assert watched.watch.status == PressureStatus("normal", 1.0, "script")

    async def test_nothing_is_told_without_pressure(self) -> None:
        watched = Watched(*[NORMAL] * 10)
        with capture_logs() as lines:
            await watched.run()
        assert watched.shares == []
        assert lines == []

    async def test_the_status_is_of_the_last_poll(self) -> None:
        """Level, share and where they come from."""
        watched = Watched(NORMAL, CRITICAL)
        assert watched.watch.status == PressureStatus("normal", 1.0, "script")
        await watched.run()
        assert watched.watch.status == PressureStatus("critical", 0.5, "script")

    async def test_a_line_for_each_change_of_level(self) -> None:
        """With the figures; the share's own steps have none."""
        watched = Watched(NORMAL, *[WARNING] * 20, CRITICAL, CRITICAL, NORMAL, NORMAL)
        with capture_logs() as lines:
            await watched.run()
        assert {line["event"] for line in lines} == {"memory pressure"}
        assert {line["source"] for line in lines} == {"script"}
        keys = ("log_level", "before", "pressure", "share", "some")
        assert [tuple(line[key] for key in keys) for line in lines] == [
            ("warning", "normal", "warning", 0.9, 0.1),
            ("warning", "warning", "critical", 0.5, 0.2),
            ("info", "critical", "normal", 0.5, 0.0),
        ]

    @pytest.mark.parametrize(
        "error", [OSError(errno.ENODEV, "gone"), ValueError("odd"), RuntimeError("a fault of ours")]
    )
    async def test_a_source_that_fails_is_given_up(self, error: Exception) -> None:
        """One warning, no further call, and the budget recovers."""
        watched = Watched(CRITICAL, error)
        with capture_logs() as lines:
            running = asyncio.create_task(watched.watch.run())
            for _ in range(100):
                watched.script.clock.now += 1.0
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert watched.script.calls == 2
        assert watched.watch.status == PressureStatus("normal", 1.0, None)
        assert watched.shares == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
        assert [(line["event"], line["log_level"]) for line in lines] == [
            ("memory pressure", "warning"),
            ("memory pressure is no longer read", "warning"),
            ("memory pressure", "info"),
        ]
        assert lines[1]["source"] == "script"
        assert lines[1]["error"] == str(error)

    async def test_no_source(self) -> None:
        """Where the system tells nothing, nothing shrinks and nothing is logged."""
        shares: list[float] = []
        watch = PressureWatch(None, shares.append, interval=0.0)
        with capture_logs() as lines:
            running = asyncio.create_task(watch.run())
            for _ in range(100):
                await asyncio.sleep(0)
            assert not running.done()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        assert watch.status == PressureStatus("normal", 1.0, None)
        assert (shares, lines) == ([], [])

    async def test_a_bare_function_is_a_source(self) -> None:
        """As in a test of the whole daemon."""
        watch = PressureWatch(lambda: CRITICAL, lambda _: None, interval=3600.0)
        assert watch.status == PressureStatus("normal", 1.0, "simulated")
        running = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert watch.status == PressureStatus("critical", 0.5, "simulated")

    async def test_it_sleeps_between_polls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """For as long as it was told, a second if it was not."""
        slept: list[float] = []
        sleep = asyncio.sleep

        async def note(seconds: float) -> None:
            slept.append(seconds)
            await sleep(0)

        monkeypatch.setattr(asyncio, "sleep", note)
        watches = (
            PressureWatch(Script(NORMAL, NORMAL), lambda _: None),
            PressureWatch(Script(NORMAL, NORMAL), lambda _: None, interval=0.25),
        )
        for watch in watches:
            with pytest.raises(asyncio.CancelledError):
                await watch.run()
        assert slept == [1.0, 1.0, 0.25, 0.25]

    async def test_stalls_reach_the_share(self, tmp_path: Path) -> None:
        """From the file to the callback: each poll tells of the second before it."""
        host = Host(tmp_path)
        stalls = iter([(0.0, 0.0), (0.0, 0.0), (0.2, 0.0), (0.2, 0.15)])
        shares: list[float] = []

        def poll() -> Pressure:
            stall = next(stalls, None)
            if stall is None:
                raise asyncio.CancelledError
            return host.after(1.0, *stall)

        watch = PressureWatch(poll, shares.append, clock=host.clock, interval=0.0)
        with pytest.raises(asyncio.CancelledError):
            await watch.run()
        assert shares == [0.9, 0.5]
