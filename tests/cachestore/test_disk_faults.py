"""The disk tier on disks that are full, read-only, broken or gone."""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog.testing

from umbel.cachestore.disk import tier as disk_tier
from umbel.cachestore.disk.files import INDEX
from umbel.cachestore.disk.tier import DiskTier
from umbel.cachestore.errors import DiskTierError
from umbel.cachestore.record import Pin, Record

from .disk_tools import (
    FINGERPRINT,
    TIMEOUT,
    damaged,
    fill,
    job,
    opened,
    own_names,
    results,
    wait_until,
    write,
)

SYNC, RENAME, OPEN, WRITE = os.fsync, os.rename, os.open, os.write


class Clock:
    """The monotonic clock of the queue, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(disk_tier, "_clock", made.monotonic)
    return made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as folder:
        yield folder


@contextmanager
def small_disk(folder: Path, size: str = "2m") -> Iterator[Path]:
    """Mount a small file system in memory; skips the test where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no tmpfs can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def suspended(tier: DiskTier, token: int = 0) -> str:
    with structlog.testing.capture_logs() as logs:
        assert tier.write(job(token))
        assert [(done.token, done.record) for done in results(tier)] == [(token, None)]
    assert [entry["log_level"] for entry in logs] == ["warning"]
    statistics = tier.statistics()
    assert statistics.state == "suspended"
    assert statistics.reason == logs[0]["reason"]
    assert statistics.queued_bytes == 0
    assert not tier.write(job(token))
    return statistics.reason


def refuse(folder: Path) -> str:
    """Open a tier that cannot be opened; return what is said."""
    with pytest.raises(DiskTierError) as raised:
        DiskTier(folder, fingerprint=FINGERPRINT, queue_bytes=1 << 20)
    assert str(folder) in str(raised.value)
    return str(raised.value)


# -- full ----------------------------------------------------------------------------------


def test_a_disk_that_is_full_from_the_start(small: Path) -> None:
    fill(small / "filler")
    assert "full" in refuse(small / "cache") or "space" in refuse(small / "cache")
    (small / "filler").unlink()
    with opened(small / "cache") as tier:
        write(tier, job())


def test_a_full_disk_at_a_restart_can_be_read(small: Path) -> None:
    folder = small / "cache"
    with opened(folder) as tier:
        kept = write(tier, job(0), job(1))
    (folder / ("0" * 32 + ".tmp")).touch()
    fill(small / "filler")
    with opened(folder) as tier:
        assert tier.records == kept
        assert tier.collected["temporaries"] == 1
        assert damaged(tier, *kept) == []
        assert "space" in suspended(tier)


def test_a_disk_that_fills_and_is_freed(small: Path, clock: Clock) -> None:
    with opened(small / "cache", retry_after=60.0) as tier:
        kept = write(tier, job(0), job(1))
        fill(small / "filler")
        assert "space" in suspended(tier, 2)
        assert damaged(tier, *kept) == []
        assert own_names(small / "cache") == {record.name for record in kept}
        (small / "filler").unlink()
        clock.now += 59.9
        assert not tier.write(job(3))
        clock.now += 0.2
        kept += write(tier, job(4), job(5))
        assert tier.statistics().state == "on"
        assert tier.statistics().reason == ""
        assert tier.statistics().failures == 1
    with opened(small / "cache") as tier:
        assert tier.records == kept


def test_a_disk_that_stays_full_is_said_once(small: Path, clock: Clock) -> None:
    with opened(small / "cache", retry_after=60.0) as tier:
        fill(small / "filler")
        suspended(tier)
        with structlog.testing.capture_logs() as logs:
            for token in range(3):
                clock.now += 61
                assert tier.write(job(token))
                assert [done.record for done in results(tier)] == [None]
                assert not tier.write(job(token))
        assert logs == []
        assert tier.statistics().failures == 4


def test_a_full_disk_can_be_freed_by_deleting(small: Path, clock: Clock) -> None:
    with opened(small / "cache") as tier:
        records = write(tier, *(job(token, items=50_000) for token in range(4)))
        fill(small / "filler")
        suspended(tier)
        with structlog.testing.capture_logs():
            tier.delete(records[:3])
            assert tier.flush(TIMEOUT)
        assert own_names(small / "cache") == {records[3].name}
        assert tier.statistics().records == 1
        assert tier.statistics().failures == 2  # the write and the transaction
        clock.now += 61
        records += write(tier, job(9))
    with opened(small / "cache") as tier:
        assert tier.records == records[3:]
        assert tier.collected["rows"] == 0


# -- read-only -----------------------------------------------------------------------------


def test_a_read_only_disk_is_refused(small: Path) -> None:
    with opened(small / "cache") as tier:
        kept = write(tier, job())
    (small / "empty").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    for name in ("cache", "empty", "new"):
        assert "make it writable" in refuse(small / name)
    subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True)
    with opened(small / "cache") as tier:
        assert tier.records == kept


# -- broken --------------------------------------------------------------------------------


def _fail(number: int, original: Callable[..., object], call: int = 1) -> Callable[..., object]:
    calls = 0

    def failing(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **named)

    return failing


STEPS: dict[str, tuple[str, Callable[[int], Callable[..., object]]]] = {
    "open the folder": ("open", lambda number: _fail(number, OPEN)),
    "open": ("open", lambda number: _fail(number, OPEN, 2)),
    "write": ("write", lambda number: _fail(number, WRITE, 2)),
    "sync": ("fsync", lambda number: _fail(number, SYNC)),
    "rename": ("rename", lambda number: _fail(number, RENAME)),
    "sync the folder": ("fsync", lambda number: _fail(number, SYNC, 2)),
}
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EMFILE)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_each_step_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, step: str, number: int
) -> None:
    """Nothing of the file is left, the reason is given, and it goes on when the disk does."""
    with opened(tmp_path) as tier:
        kept = write(tier, job(0))
        with monkeypatch.context() as patched:
            name, failing = STEPS[step]
            patched.setattr(os, name, failing(number))
            assert os.strerror(number) in suspended(tier, 1)
        assert own_names(tmp_path) == {kept[0].name}
        assert damaged(tier, *kept) == []
        clock.now += 61
        kept += write(tier, job(2))
    with opened(tmp_path) as tier:
        assert tier.records == kept
        assert tier.collected["orphans"] == tier.collected["temporaries"] == 0


def _full_index(tier: DiskTier) -> Callable[[], object]:
    """Let the index grow no more; return what lifts that."""
    database = tier._index._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    return lambda: database.execute("PRAGMA max_page_count = 1000000")


def test_a_transaction_may_fail(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path) as tier:
        kept = write(tier, job(0))
        lift = _full_index(tier)
        large = job(1, tokens=bytes(100_000))
        with structlog.testing.capture_logs() as logs:
            assert tier.write(large)
            assert results(tier)[0].record is None
        assert [entry["reason"] for entry in logs] == ["database or disk is full"]
        assert tier.statistics().state == "suspended"
        assert own_names(tmp_path) == {kept[0].name}
        lift()
        clock.now += 61
        kept += write(tier, large)
    with opened(tmp_path) as tier:
        assert tier.records == kept


def test_other_transactions_may_fail(tmp_path: Path, clock: Clock) -> None:
    with opened(tmp_path) as tier:
        (record,) = write(tier, job(0))
        lift = _full_index(tier)
        with structlog.testing.capture_logs() as logs:
            tier.pin(Pin("name", "tenant", bytes(100_000)))
            assert tier.flush(TIMEOUT)
            assert tier.statistics().state == "suspended"
            clock.now += 59
            tier.pin(Pin("name", "tenant", bytes(100_000)))
            assert tier.flush(TIMEOUT)
        assert len(logs) == 1
        lift()
        clock.now += 2
        write(tier, job(1))
        assert damaged(tier, record) == []


def test_waiting_writes_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier, monkeypatch.context() as patched:
        (record,) = write(tier, job(0))
        tries: list[object] = []

        def slow(*arguments: object) -> None:
            tries.append(arguments)
            wait_until(lambda: taken)
            raise OSError(errno.EIO, "broken")

        patched.setattr(os, "fsync", slow)
        taken = False
        assert all(tier.write(job(token)) for token in (1, 2))
        tier.delete([record])
        assert tier.write(job(3))
        taken = True
        with structlog.testing.capture_logs():
            done = results(tier)
        assert [(written.token, written.record) for written in done] == [
            (1, None),
            (2, None),
            (3, None),
        ]
        assert len(tries) == 1
        assert own_names(tmp_path) == set()


def test_a_clock_that_is_set_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, retry_after=0.3) as tier, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _fail(errno.EIO, SYNC))
        suspended(tier)
        patched.setattr(os, "fsync", SYNC)
        real = time.time
        patched.setattr(time, "time", lambda: real() - 1e6)
        wait_until(lambda: tier.write(job(1)))
        assert results(tier)[0].record is not None
    with opened(tmp_path, retry_after=1e6) as tier, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _fail(errno.EIO, SYNC))
        suspended(tier)
        patched.setattr(time, "time", lambda: real() + 1e9)
        assert not tier.write(job(2))


def test_a_file_that_cannot_be_removed_stays_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as tier, monkeypatch.context() as patched:
        (record,) = write(tier, job(0))
        patched.setattr(os, "unlink", _fail(errno.EIO, lambda: 0))
        with structlog.testing.capture_logs() as logs:
            tier.delete([record])
            assert tier.flush(TIMEOUT)
        assert len(logs) == 1
        assert tier.statistics().records == 0
        assert tier.statistics().state == "on"
    with opened(tmp_path) as tier:
        assert tier.records == []
        assert tier.collected["orphans"] == 1
        assert own_names(tmp_path) == set()


@pytest.mark.parametrize("what", ["write", "delete", "pin"])
def test_an_index_that_is_damaged_while_it_is_used(tmp_path: Path, what: str) -> None:
    with opened(tmp_path, retry_after=0.0) as tier:
        kept = write(tier, *(job(token, tokens=bytes(9000)) for token in range(9)))
        database = tier._index._database
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        database.execute("PRAGMA cache_size = 1")
        size = (tmp_path / INDEX).stat().st_size
        with (tmp_path / INDEX).open("r+b") as index:
            index.seek(4096)
            index.write(b"\xa5" * (size - 4096))
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                if what == "write":
                    assert tier.write(job(20)) or tier.statistics().state == "off"
                elif what == "delete":
                    tier.delete(kept[:1])
                else:
                    tier.pin(Pin("name", "tenant", bytes(4)))
                assert tier.flush(TIMEOUT)
        assert tier.statistics().state == "off"
        assert "restart umbel to begin without it" in tier.statistics().reason
        assert len(logs) == 1
        assert {done.record for done in tier.completed()} <= {None}
        assert damaged(tier, *kept[1:]) == []
        assert not tier.write(job(21))
    with opened(tmp_path) as tier:
        assert tier.records == []
        write(tier, job(22))


# -- gone ----------------------------------------------------------------------------------


def _replace(folder: Path) -> None:
    shutil.rmtree(folder)
    with opened(folder) as tier:
        write(tier, job(7))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


GONE: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
    "replaced": _replace,
    "emptied": _empty,
    "index": lambda folder: (folder / "index.sqlite").unlink(),
    "lock": lambda folder: (folder / "lock").unlink(),
}


@contextmanager
def gone(folder: Path, how: str) -> Iterator[tuple[DiskTier, list[Record]]]:
    """Open a tier with two records, and take its folder away."""
    with opened(folder, retry_after=0.0) as tier:
        kept = write(tier, job(0), job(1))
        GONE[how](folder)
        yield tier, kept


@pytest.mark.parametrize("how", GONE)
def test_a_folder_that_is_gone_ends_the_tier(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "cache"
    with gone(folder, how) as (tier, kept), structlog.testing.capture_logs() as logs:
        before = sorted(tmp_path.rglob("*"))
        assert tier.write(job(2))
        assert [done.record for done in results(tier)] == [None]
        assert tier.statistics().state == "off"
        assert "restart" in tier.statistics().reason
        assert not tier.write(job(3))
        tier.touch({kept[0].id: 5})
        tier.pin(Pin("name", "tenant", b""))
        tier.delete(kept)
        assert tier.flush(TIMEOUT)
        assert sorted(tmp_path.rglob("*")) == before
        assert [entry["log_level"] for entry in logs] == ["warning"]
    with opened(folder) as tier:
        write(tier, job(4))


def test_a_verification_notices_that_the_folder_is_gone(tmp_path: Path) -> None:
    with (
        gone(tmp_path / "cache", "removed") as (tier, kept),
        structlog.testing.capture_logs() as logs,
    ):
        assert damaged(tier, *kept) == kept
        assert tier.statistics().state == "off"
        assert not tier.write(job(2))
        assert sum("restart" in entry["reason"] for entry in logs) == 1


@pytest.mark.parametrize("how", ["moved back", "suspended"])
def test_off_is_for_good(tmp_path: Path, how: str) -> None:
    """Until a restart, whatever comes after: others may have had the folder meanwhile."""
    folder = tmp_path / "cache"
    with gone(folder, "moved") as (tier, kept), structlog.testing.capture_logs():
        assert damaged(tier, *kept) == kept
        (tmp_path / "moved").rename(folder)
        if how == "suspended":
            assert not tier.leave("suspended", "a failure noticed late")
        assert damaged(tier, *kept) == []
        assert not tier.write(job(2))
        assert tier.statistics().state == "off"
    with opened(folder) as tier:
        assert tier.records == kept
