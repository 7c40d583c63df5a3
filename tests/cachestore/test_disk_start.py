"""Start of the disk tier: files and rows that it keeps, removes, leaves alone and refuses."""

import os
import re
import signal
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import structlog.testing

from umbel import ownership
from umbel.cachestore.disk.files import INDEX, new_name
from umbel.cachestore.disk.index import FORMAT
from umbel.cachestore.disk.tier import DiskTier
from umbel.cachestore.errors import DiskTierError, FolderInUseError
from umbel.cachestore.record import Pin, Record, RecordKind

from .disk_tools import FINGERPRINT, TIMEOUT, child, damaged, job, opened, own_names, write


def made(folder: Path, count: int = 3) -> list[Record]:
    """Make a folder with some records, and close it."""
    with opened(folder) as tier:
        return write(tier, *map(job, range(count)))


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / INDEX)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuse(folder: Path) -> str:
    """Open a tier that cannot be opened; return what is said."""
    with pytest.raises(DiskTierError) as raised:
        DiskTier(folder, fingerprint=FINGERPRINT, queue_bytes=1 << 20)
    assert str(folder) in str(raised.value)
    return str(raised.value)


# -- what is kept --------------------------------------------------------------------------


def test_records_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        assert tier.records == []
        kept = write(
            tier,
            job(9, kind=RecordKind.CHECKPOINT, start=9, end=9, tokens=b""),
            job(5, tenant="größer"),
            job(0, used=1 << 40),
        )
    with opened(tmp_path) as tier:
        assert tier.records == kept[::-1]
        assert [record.kind for record in tier.records[1:]] == list(RecordKind)
        assert tier.collected == Counter()
        assert damaged(tier, *tier.records) == []
        statistics = tier.statistics()
        assert statistics.records == 3
        assert statistics.nbytes == sum(tier.path(r).stat().st_size for r in kept)


def test_ids_are_never_given_again(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        first, second = write(tier, job(0), job(1))
        tier.delete([second])
    with opened(tmp_path) as tier:
        (third,) = write(tier, job(1))
    assert first.id < second.id < third.id


def test_pins_are_kept_for_their_model(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        tier.pin(Pin("a", "tenant", b"old!"))
        tier.pin(Pin("a", "tenant", b"new!"))
        tier.pin(Pin("a", "other", b"1234"))
        tier.pin(Pin("b", "tenant", b"5678"))
        tier.pin(Pin("c", "tenant", b""))
        tier.unpin("b", "tenant")
        tier.unpin("c", "unknown")
        assert tier.pins == []
    with opened(tmp_path, fingerprint="another") as tier:
        assert tier.pins == []
    with opened(tmp_path) as tier:
        expected = [
            Pin("a", "other", b"1234"),
            Pin("a", "tenant", b"new!"),
            Pin("c", "tenant", b""),
        ]
        assert tier.pins == expected


# -- what is removed -----------------------------------------------------------------------


def test_useless_files_and_rows_are_collected(tmp_path: Path) -> None:
    """Unfinished files, files without a row, rows without their file: counted and removed."""
    kept, missing, short, folder = made(tmp_path, 4)
    (tmp_path / new_name()).write_bytes(b"123")
    (tmp_path / new_name().replace("safetensors", "tmp")).write_bytes(b"4567")
    (tmp_path / missing.name).unlink()
    os.truncate(tmp_path / short.name, 100)
    (tmp_path / folder.name).unlink()
    (tmp_path / folder.name).mkdir()
    with opened(tmp_path) as tier:
        assert tier.records == [kept]
        assert tier.collected == Counter(temporaries=1, orphans=1, rows=3, nbytes=107)
        assert own_names(tmp_path) == {kept.name}
        assert (tmp_path / folder.name).is_dir()
    with opened(tmp_path) as tier:
        assert tier.collected == Counter()


def test_records_of_another_model_are_collected(tmp_path: Path) -> None:
    old = made(tmp_path)
    with opened(tmp_path, fingerprint="another") as tier:
        assert tier.records == []
        assert tier.collected == Counter(rows=3, nbytes=sum(r.nbytes for r in old))
        assert own_names(tmp_path) == set()
    with opened(tmp_path) as tier:
        assert tier.collected == Counter()


def test_an_older_format_is_collected(tmp_path: Path) -> None:
    old = made(tmp_path)
    change(tmp_path, "PRAGMA user_version = 0")
    with opened(tmp_path) as tier:
        assert tier.records == []
        assert tier.collected == Counter(orphans=3, nbytes=sum(r.nbytes for r in old))
        write(tier, job())
    assert len(own_names(tmp_path)) == 1


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    """Other names, folders and links, even of our names, whatever happens to the index."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    folder = tmp_path / "cache"
    made(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "notes.tmp").write_bytes(b"notes")
    (folder / new_name()).symlink_to(outside)
    (folder / new_name()).mkdir()
    foreign = {path.name for path in folder.iterdir()} - own_names(folder)
    (folder / INDEX).write_bytes(b"damaged" * 1000)
    with opened(folder):
        assert own_names(folder) == set()
        assert foreign - {path.name for path in folder.iterdir()} == set()
    assert outside.read_bytes() == b"precious"
    assert (folder / "model.safetensors").read_bytes() == b"weights"


# -- an index of no use --------------------------------------------------------------------


def _garble(folder: Path, start: int, length: int) -> None:
    content = bytearray((folder / INDEX).read_bytes())
    content[start : start + length] = b"\xa5" * length
    (folder / INDEX).write_bytes(content)


def _garble_names(folder: Path) -> None:
    with closing(sqlite3.connect(folder / INDEX)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name LIKE 'sqlite_autoindex_records%'"
        (page,) = database.execute(query).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    _garble(folder, (page - 1) * size, size)


def _garble_a_name(folder: Path) -> None:
    """Flip a bit of what only lookups by name read, and what leaves its structure whole."""
    with closing(sqlite3.connect(folder / INDEX)) as database:
        (name,) = database.execute("SELECT name FROM records WHERE id = 2").fetchone()
    before = (folder / INDEX).read_bytes()
    first, second = (found.start() for found in re.finditer(name.encode(), before))
    at = second if before[first - 60 : first].count(b"tenant") else first
    flipped = bytearray(before)
    flipped[at] ^= 1
    (folder / INDEX).write_bytes(flipped)


CORRUPTION: dict[str, Callable[[Path], object]] = {
    "header": lambda folder: _garble(folder, 0, 16),
    "schema": lambda folder: _garble(folder, 100, 400),
    "pages": lambda folder: _garble(folder, 4096, 12000),
    "all": lambda folder: (folder / INDEX).write_bytes(b"\xff" * 20000),
    "truncated": lambda folder: os.truncate(folder / INDEX, 5000),
    "empty": lambda folder: os.truncate(folder / INDEX, 0),
    "index": _garble_names,
    "table": lambda folder: change(folder, "DROP TABLE records"),
    "column": lambda folder: change(folder, "ALTER TABLE records DROP COLUMN used"),
    "pins": lambda folder: change(folder, "DROP TABLE pins"),
    "kind": lambda folder: change(folder, "UPDATE records SET kind = 'other' WHERE id = 2"),
    "text": lambda folder: change(folder, "UPDATE records SET tenant = CAST(x'ff' AS TEXT)"),
    "name": lambda folder: change(folder, "UPDATE records SET name = '../../x' WHERE id = 2"),
    "type": lambda folder: change(folder, "UPDATE records SET tenant = x'41' WHERE id = 2"),
    "before the start": lambda folder: change(folder, "UPDATE records SET start = -1 WHERE id = 2"),
    "recency": lambda folder: change(folder, "UPDATE records SET used = 1 << 62 WHERE id = 2"),
    "layout": lambda folder: change(
        folder,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET sql = replace(sql, 'used INTEGER', 'used INTEGEX')",
    ),
    "a name in the index of names": _garble_a_name,
    "write version": lambda folder: _garble(folder, 18, 1),
    "temporary": lambda folder: change(
        folder, "UPDATE records SET name = printf('%032d.tmp', 0) WHERE id = 2"
    ),
}


@pytest.mark.parametrize("corruption", CORRUPTION)
def test_damaged_index_is_replaced(tmp_path: Path, corruption: str) -> None:
    old = made(tmp_path)
    CORRUPTION[corruption](tmp_path)
    with structlog.testing.capture_logs() as logs, opened(tmp_path) as tier:
        assert tier.records == []
        assert tier.collected == Counter(orphans=3, nbytes=sum(r.nbytes for r in old))
        kept = write(tier, job())
    warned = [entry for entry in logs if entry["log_level"] == "warning"]
    assert len(warned) == (corruption != "empty")
    with opened(tmp_path) as tier:
        assert tier.records == kept


def test_a_newer_index_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    change(tmp_path, f"PRAGMA user_version = {FORMAT + 1}")
    (tmp_path / new_name().replace("safetensors", "tmp")).write_bytes(b"unfinished")
    before = content(tmp_path)
    assert "newer umbel" in refuse(tmp_path)
    assert content(tmp_path) == before
    change(tmp_path, f"PRAGMA user_version = {FORMAT}")
    with opened(tmp_path) as tier:
        assert len(tier.records) == 3


def test_an_index_that_someone_holds_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = made(tmp_path)
    monkeypatch.setattr("umbel.cachestore.disk.index._BUSY_SECONDS", 0.05)
    with closing(sqlite3.connect(tmp_path / INDEX)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "locked" in refuse(tmp_path)
    with opened(tmp_path) as tier:
        assert tier.records == kept


# -- the folder ----------------------------------------------------------------------------


def test_everything_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        with opened(folder) as tier:
            write(tier, job())
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
            assert len(modes) == 4  # the lock, the index and its log, one file
            assert set(modes.values()) == {0o600}
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    folder.chmod(0o755)
    with opened(folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_is_own_group", lambda _: False)
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    made(folder, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(mode)
    before = content(folder)
    with (
        pytest.raises(DiskTierError, match=rf"is not used: other users can write .*{mode:04o}"),
        opened(folder),
    ):
        pass
    assert content(folder) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    os.chown(folder, 4321, -1)
    with (
        pytest.raises(DiskTierError, match=r"belongs to another user \(uid 4321\)"),
        opened(folder),
    ):
        pass
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert not list(folder.iterdir())


def test_a_folder_with_other_things_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "foreign").touch()
    tmp_path.chmod(0o755)
    with opened(tmp_path):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    refuse(tmp_path / "file")
    refuse(tmp_path / "file" / "below")
    for name in ("lock", INDEX):
        folder = tmp_path / f"with-{name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / "file")
        refuse(folder)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_folder_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "it cannot be written" in refuse(tmp_path)


def test_two_tiers_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        kept = write(tier, job())
        with pytest.raises(FolderInUseError, match=str(tmp_path)):
            DiskTier(tmp_path, fingerprint="another", queue_bytes=1)
        assert damaged(tier, *kept) == []
        kept += write(tier, job(1))
    with opened(tmp_path) as tier:
        assert tier.records == kept


def test_two_processes_exclude_each_other(tmp_path: Path) -> None:
    with child(tmp_path, "busy") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            with pytest.raises(FolderInUseError, match="in use"):
                DiskTier(tmp_path, fingerprint=FINGERPRINT, queue_bytes=1)
            assert process.poll() is None
        finally:
            process.kill()
        assert process.wait(TIMEOUT) == -signal.SIGKILL
    with opened(tmp_path) as tier:
        write(tier, job())
