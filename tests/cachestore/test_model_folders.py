"""One folder a model below one root: nothing of another model goes, but by age, over the budget."""

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import structlog.testing

from umbel.cachestore.disk.files import INDEX, LOCK, claim
from umbel.cachestore.disk.model_folders import ModelFolders, removal_order, stored_models, trim
from umbel.cachestore.errors import FolderInUseError
from umbel.cachestore.record import Pin, Record, RecordKind, hasher

from .disk_tools import job, opened, wait_until, write

A, B = "a" * 32, "b" * 32


def fill(folder: Path, fingerprint: str, *used: int) -> list[Record]:
    """Leave state of a model in a folder: paths of four tokens, each used at a time of its own."""
    jobs = [
        job(number * 4, start=0, end=4, prefix=hasher().digest(), used=each)
        for number, each in enumerate(used)
    ]
    with opened(folder, fingerprint=fingerprint) as tier:
        return write(tier, *jobs)


def rest_since(folder: Path, seconds: float) -> None:
    os.utime(folder / INDEX, (seconds, seconds))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def test_models_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = ModelFolders(tmp_path, ["org/x", "y"], 1000)
    x, y = folders.take("org/x", A), folders.take("y", B)
    fill(x, A, 1)
    fill(y, B, 1)
    folders.close()
    assert (x.name, y.name) == (f"org%2Fx-{A}", f"y-{B}")
    found = {each.name: each for each in stored_models(tmp_path)}
    assert found.keys() == {"org/x", "y"}
    assert found["org/x"].nbytes == sum(path.stat().st_size for path in x.glob("*.safetensors"))


def test_one_daemon_has_the_root(tmp_path: Path) -> None:
    first = ModelFolders(tmp_path, ["x"])
    with pytest.raises(FolderInUseError):
        ModelFolders(tmp_path, ["y"])
    first.close()
    ModelFolders(tmp_path, ["y"]).close()


def test_a_model_under_another_name_keeps_its_state(tmp_path: Path) -> None:
    kept = fill(tmp_path / f"old-{A}", A, 1)
    folders = ModelFolders(tmp_path, ["new", "again"])
    new, again = folders.take("new", A), folders.take("again", A)
    assert new.name == f"new-{A}"
    assert files(new) == {record.name for record in kept}
    assert not (tmp_path / f"old-{A}").exists()
    assert again.name == f"again-{A}"
    folders.give_back(new)
    assert folders.take("new", A) == new
    folders.close()
    folders = ModelFolders(tmp_path, ["new", "again"])
    assert folders.take("again", A) == again
    assert folders.take("new", A) == new
    folders.close()


def test_model_unused_longest_goes_first(tmp_path: Path) -> None:
    old, new = tmp_path / f"old-{A}", tmp_path / f"new-{B}"
    olds, news = fill(old, A, 30, 10, 20), fill(new, B, 1, 2, 3)
    rest_since(old, 1000)
    rest_since(new, 2000)
    folders = ModelFolders(tmp_path, ["mine"])
    assert [each.name for each in folders.resting] == ["new", "old"]
    nbytes = olds[0].nbytes
    assert folders.make_room(4 * nbytes + 1)
    wait_until(lambda: folders.resting_bytes == nbytes)
    assert not old.exists()
    assert files(new) == {news[2].name}
    assert [each.used for each in folders.resting] == [2000], "its age stays"
    folders.close()


def test_no_more_goes_than_is_needed(tmp_path: Path) -> None:
    kept = fill(tmp_path, A, 30, 10, 20)
    nbytes = kept[0].nbytes
    assert trim(tmp_path, A, nbytes + 1) == 2 * nbytes
    assert files(tmp_path) == {kept[0].name}
    assert trim(tmp_path, A, nbytes, lambda: True) == 0
    assert trim(tmp_path, A, 0) == 0
    with opened(tmp_path, fingerprint=A) as tier:
        assert tier.records == kept[:1]


def test_a_loaded_models_folder_is_not_trimmed(tmp_path: Path) -> None:
    mine, other = tmp_path / f"mine-{A}", tmp_path / f"other-{B}"
    fill(mine, A, 1)
    fill(other, B, 1)
    folders = ModelFolders(tmp_path, ["mine"])
    assert folders.take("mine", A) == mine
    lock = claim(other)
    assert folders.make_room(1 << 20)
    wait_until(lambda: not folders.make_room(1 << 20))
    os.close(lock)
    assert (len(files(mine)), len(files(other))) == (1, 1)
    folders.close()


def test_a_closed_root_is_left_alone(tmp_path: Path) -> None:
    fill(tmp_path / f"x-{A}", A, 1)
    folders = ModelFolders(tmp_path, [])
    folders.close()
    assert not folders.make_room(1 << 20)
    assert len(files(tmp_path / f"x-{A}")) == 1


def path(tokens: bytes) -> bytes:
    hashed = hasher()
    hashed.update(tokens)
    digest: bytes = hashed.digest()
    return digest


def record(number: int, tokens: bytes, start: int, used: int, tenant: str = "t") -> Record:
    """A span from an offset of a path to its end; offsets are in tokens of four bytes."""
    before, own = tokens[: 4 * start], tokens[4 * start :]
    return Record(
        number,
        RecordKind.SPAN,
        tenant,
        start,
        len(tokens) // 4,
        path(before),
        b"",
        own,
        f"{number}",
        1,
        b"",
        used,
    )


def test_paths_go_from_their_ends() -> None:
    """A beginning that something goes on from stays as long, however old its own mark is."""
    one, two, three = b"aaaa" * 4, b"aaaa" * 4 + b"bbbb" * 2, b"aaaa" * 2 + b"cccc"
    root, deep, fork = record(1, one, 0, 1), record(2, two, 4, 50), record(3, three, 2, 20)
    lone = record(4, b"zzzz", 0, 10)
    assert [r.id for r in removal_order([root, lone, fork, deep], [])] == [4, 3, 2, 1]


def test_pinned_paths_go_last() -> None:
    """Wherever in a record the pin ends; another tenant's equal tokens are not pinned."""
    tokens = b"aaaa" * 4
    first, rest = record(1, tokens[:8], 0, 1), record(2, tokens, 2, 1)
    others, newer = record(3, tokens, 0, 5, "u"), record(4, b"zzzz", 0, 99)
    pins = [Pin("p", "t", tokens[:12])]
    order = removal_order([first, others, newer, rest], pins)
    assert [each.id for each in order] == [3, 4, 2, 1]


# -- state of an older umbel ----------------------------------------------------------------


def test_state_of_an_older_umbel_is_moved(tmp_path: Path) -> None:
    """The default model's from the root, others' from `models`; records, files and pins."""
    with opened(tmp_path, fingerprint=A) as tier:
        kept = write(tier, job(0, used=7))
        tier.pin(Pin("prompt", "t", b"1234"))
    others = fill(tmp_path / "models" / "org%2Fx", B, 1)
    (tmp_path / "responses.sqlite").write_bytes(b"")
    with structlog.testing.capture_logs() as logs:
        folders = ModelFolders(tmp_path, ["default", "org/x"])
    moved = [line for line in logs if line["event"] == "state of an older umbel moved"]
    assert sorted(line["bytes"] for line in moved) == sorted(
        record.nbytes for record in (*kept, *others)
    )
    folder, other = folders.take("default", A), folders.take("org/x", B)
    assert (folder.name, other.name) == (f"default-{A}", f"org%2Fx-{B}")
    with opened(folder, fingerprint=A) as tier, opened(other, fingerprint=B) as second:
        assert tier.records == kept
        assert tier.pins == [Pin("prompt", "t", b"1234")]
        assert second.records == others
    folders.close()
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {LOCK, "responses.sqlite", folder.name, other.name}


def test_a_move_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    kept = fill(tmp_path, A, 1, 2)
    target = tmp_path / f"unnamed-{A}"
    target.mkdir()
    shutil.move(tmp_path / kept[0].name, target)
    ModelFolders(tmp_path, ["x"]).close()
    with opened(target, fingerprint=A) as tier:
        assert tier.records == kept


def test_old_state_of_no_use_is_removed_with_a_warning(tmp_path: Path) -> None:
    (kept,) = fill(tmp_path, A, 1)
    (tmp_path / INDEX).write_bytes(b"not a database" * 500)
    with structlog.testing.capture_logs() as logs:
        ModelFolders(tmp_path, ["x"]).close()
    (warning,) = logs
    assert (warning["log_level"], warning["bytes"]) == ("warning", kept.nbytes)
    assert {each.name for each in tmp_path.iterdir()} == {LOCK}


def test_state_of_a_newer_umbel_stays(tmp_path: Path) -> None:
    (kept,) = fill(tmp_path, A, 1)
    with closing(sqlite3.connect(tmp_path / INDEX)) as database:
        database.execute("PRAGMA user_version = 999")
    with structlog.testing.capture_logs() as logs:
        ModelFolders(tmp_path, ["x"]).close()
    assert [line["bytes"] for line in logs] == [kept.nbytes]
    assert files(tmp_path) == {kept.name}
