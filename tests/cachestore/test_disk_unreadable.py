"""Files that cannot be read just now: a miss that deletes nothing, and no more than that."""

import errno
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from umbel.cachestore.disk import tier as disk_tier
from umbel.cachestore.disk.files import INDEX, new_name, verify_file, write_file
from umbel.cachestore.errors import UnreadableFileError
from umbel.cachestore.paging import page_in
from umbel.cachestore.paging.page_in import PageInStatus

from .disk_tools import TIMEOUT, damaged, job, opened, own_names, payload, write
from .fakes import HYBRID, FakeSpan
from .pager_tools import PagedWorld, damage
from .test_disk_start import content, made, refuse
from .test_pager_faults import drain, long_world, the_record, want

NUMBERS = (
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.EACCES,
    errno.EPERM,
    errno.ENOMEM,
    errno.ELOOP,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
each_error = pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
OPEN = os.open


class Clock:
    """A monotonic clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(page_in, "_clock", moved)
    monkeypatch.setattr(disk_tier, "_clock", moved)
    return moved


def failing(number: int, asked: list[str], which: str = "") -> Callable[..., int]:
    """Fail to open a file for reading; note which were asked for."""

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        name = Path(path).name
        if name.endswith(".safetensors") and not flags & os.O_WRONLY and which in name:
            asked.append(name)
            raise OSError(number, os.strerror(number), str(path))
        return OPEN(path, flags, *rest, **named)

    return open_


# -- one file ------------------------------------------------------------------------------


@each_error
def test_unopenable_file_is_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / new_name()
    nbytes, checksum = write_file(tmp_path, path.name, payload())
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(number, []))
        with pytest.raises(UnreadableFileError, match=os.strerror(number)):
            verify_file(path, nbytes, checksum)
    assert verify_file(path, nbytes, checksum) == {"seed": "0"}


@pytest.mark.parametrize("step", ["fstat", "pread", "readinto", "memory"])
def test_each_step_of_reading_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / new_name()
    nbytes, checksum = write_file(tmp_path, path.name, payload())

    def fail(*_: object) -> None:
        if step == "memory":
            raise MemoryError
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    class Unreadable(io.FileIO):
        readinto = fail

    def unreadable(fd: int, *_: object, **__: object) -> Unreadable:
        return Unreadable(fd)

    before = len(list(Path("/dev/fd").iterdir()))
    with monkeypatch.context() as patched:
        if step in ("readinto", "memory"):
            patched.setattr(os, "fdopen", unreadable)
        else:
            patched.setattr(os, step, fail)
        with pytest.raises(UnreadableFileError, match="cannot be read"):
            verify_file(path, nbytes, checksum)
    assert len(list(Path("/dev/fd").iterdir())) == before


# -- a node --------------------------------------------------------------------------------


@each_error
@pytest.mark.parametrize("start", [0, 30, 60])
def test_it_is_a_miss_that_deletes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, number: int, start: int
) -> None:
    """The request computes the tokens itself; a later one finds them on disk as they were."""
    world = long_world(folder)
    files, asked = world.tier.files(), list[str]()
    name = the_record(world, start).name
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(number, asked, name))
        world.fetch(range(91))
        assert asked == [name], "it is asked for once"
        assert world.probe(range(91)) == (90, start)
        assert want(world, 91) is PageInStatus.NOTHING
        assert world.serve(range(91)) == start
        world.write_all()
    assert world.tier.files() >= files
    assert len(world.tier.jobs) == 4, "three nodes and a token: nothing was written twice"
    assert world.tier.statistics().failures == 1
    world.page_out()
    world.fetch(range(92))
    assert world.probe(range(92))[1] == start, "it rests still"
    clock.now += 5.1
    assert world.fetch(range(92)) == 1
    assert world.probe(range(92))[1] == 91
    world.finish()


def test_a_whole_state_that_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    world = PagedWorld(HYBRID, folder, interval=20)
    world.serve(range(50))
    world.page_out()
    files = world.tier.files()
    holders = [n.persisted_checkpoint for n in world.trie.nodes() if n.persisted_checkpoint]
    last = max(holders, key=lambda record: record.end)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(errno.EMFILE, [], last.name))
        assert world.fetch(range(60)) == 2
        assert 0 < world.probe(range(60))[1] < last.end
    assert world.tier.files() == files
    clock.now += 5.1
    world.fetch(range(60))
    assert world.probe(range(60))[1] == last.end
    world.finish()


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_load_that_fails_after_verification(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, error: Exception
) -> None:
    world = long_world(folder)
    files = world.tier.files()

    def load(_: object) -> FakeSpan:
        raise error

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
        patched.setattr(world.codec, "load_span", load)
        world.fetch(range(91))
        assert world.probe(range(91)) == (90, 0)
        clock.now += 5.1
        world.fetch(range(91))
    assert world.tier.files() == files
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert world.tier.statistics().failures == 2
    clock.now += 5.1
    world.fetch(range(91))
    assert world.probe(range(91))[1] == 90
    world.finish()


def test_damage_beside_an_unreadable_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Each is what it is: the one is forgotten with what goes on from it, the other waits."""
    world = long_world(folder)
    damage(world.tier.path(the_record(world, 60)), "flip")
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing(errno.EIO, [], the_record(world, 30).name))
        world.fetch(range(91))
        assert world.probe(range(91)) == (90, 30)
    clock.now += 5.1
    world.fetch(range(91))
    assert world.probe(range(91)) == (60, 60)
    drain(world)
    world.finish()


def test_thousands_are_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    with opened(tmp_path) as tier:
        records = write(tier, *map(job, range(3)))
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
            patched.setattr(os, "open", failing(errno.EMFILE, []))
            for _ in range(2):
                verified = tier.verify(records * 500).result(TIMEOUT)
                assert verified.damaged == []
                assert len(verified.unreadable) == 1500
                clock.now += 61
        assert [entry["count"] for entry in logs] == [1, 1500]
        assert all("Too many open files" in entry["reason"] for entry in logs)
        assert tier.statistics().failures == 3000
        assert tier.statistics().state == "on"
        assert damaged(tier, *records) == []


# -- the start -----------------------------------------------------------------------------


def _scandir(number: int) -> Callable[..., Any]:
    real = os.scandir

    class Failing:
        def __init__(self, path: object) -> None:
            self._entries = real(path)  # type: ignore[call-overload]

        def __enter__(self) -> Iterator[Any]:
            yield_one = iter([next(self._entries)])

            def entries() -> Iterator[Any]:
                yield from yield_one
                raise OSError(number, os.strerror(number))

            return entries()

        def __exit__(self, *_: object) -> None:
            self._entries.close()

    return Failing


@each_error
@pytest.mark.parametrize("what", ["list", "index", "lock", "lstat"])
def test_a_start_that_fails_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    """Neither an index that cannot be opened is damaged, nor a file missing that is not listed."""
    kept = made(tmp_path)
    before = content(tmp_path)
    error = OSError(number, os.strerror(number))

    def open_(path: Any, *rest: Any, **named: Any) -> int:
        if Path(path).name == (INDEX if what == "index" else "lock"):
            raise error
        return OPEN(path, *rest, **named)

    def lstat(_: object) -> os.stat_result:
        raise error

    with monkeypatch.context() as patched:
        if what == "list":
            patched.setattr(os, "scandir", _scandir(number))
        elif what == "lstat":
            patched.setattr(os, "lstat", lstat)
        else:
            patched.setattr(os, "open", open_)
        assert os.strerror(number) in refuse(tmp_path)
    assert {name for name in before if name.endswith("safetensors")} <= set(content(tmp_path))
    with opened(tmp_path) as tier:
        assert tier.records == kept
        assert damaged(tier, *kept) == []


@pytest.mark.parametrize(
    "code", ["SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_IOERR_READ", "SQLITE_FULL", "SQLITE_PERM"]
)
def test_an_index_that_sqlite_cannot_read_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    kept = made(tmp_path)
    said = sqlite3.OperationalError("the disk")
    said.sqlite_errorcode = getattr(sqlite3, code)
    error: Exception = said

    def fail(*_: object) -> str:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("umbel.cachestore.disk.index.DiskIndex._fault", fail)
        assert "the disk" in refuse(tmp_path)
        error = MemoryError()  # of which SQLite makes no error of its own
        assert "MemoryError" in refuse(tmp_path)
    with opened(tmp_path) as tier:
        assert tier.records == kept


def test_a_file_that_cannot_be_looked_at_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = made(tmp_path)
    orphan = new_name()
    (tmp_path / orphan).write_bytes(b"123")
    with monkeypatch.context() as patched:
        patched.setattr(
            "umbel.cachestore.disk.recovery.own_files",
            lambda _: iter([(name, None) for name in own_names(tmp_path)]),
        )
        with opened(tmp_path) as tier:
            assert tier.records == kept
            assert tier.collected["nbytes"] == 0
    with opened(tmp_path) as tier:
        assert tier.records == kept
        assert tier.collected["orphans"] == 1


# -- a process without descriptors -----------------------------------------------------------


def test_a_process_without_descriptors_deletes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cachestore.starved", str(tmp_path / "disk")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["refused"] > 0
    assert said["missed"] == 3
    assert said["restored"] == 90
    assert said["written"] == 30
    assert said["before"] == said["after"]
