"""Folders that a group may write to: whose they are depends on who is in the group."""

import grp
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbel import ownership

GROUP = 4711
USER = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    """What was found out of a group is forgotten before and after each test."""
    ownership._is_own_group.cache_clear()
    yield
    ownership._is_own_group.cache_clear()


@pytest.mark.parametrize(
    ("members", "first", "writable"),
    [([], [], 0o775), ([USER], [USER], 0o775), ([], [USER], 0o770)],
    ids=["nobody else", "this user", "this user's first"],
)
def test_a_group_of_ones_own_is_no_other_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    members: list[str],
    first: list[str],
    writable: int,
) -> None:
    """A folder that umask 002 made is this user's own."""
    _group(monkeypatch, members, first)
    assert ownership.folder_fault(_folder(tmp_path, monkeypatch, writable)) is None


@pytest.mark.parametrize(
    ("members", "first", "mode"),
    [(["eve"], [], 0o775), ([USER, "eve"], [], 0o770), ([], ["eve"], 0o775), ([], [], 0o777)],
    ids=["a member", "another member", "another's first group", "all users"],
)
def test_others_in_the_group_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], first: list[str], mode: int
) -> None:
    """The fault names the folder and its mode."""
    _group(monkeypatch, members, first)
    folder = _folder(tmp_path, monkeypatch, mode)
    expected = f"other users can write to {folder} (mode {mode:04o})"
    assert ownership.folder_fault(folder) == expected


def test_a_group_without_a_name_is_not_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members cannot be known."""
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert ownership.folder_fault(_folder(tmp_path, monkeypatch, 0o775)) is not None


def _group(monkeypatch: pytest.MonkeyPatch, members: list[str], first: list[str]) -> None:
    users = [SimpleNamespace(pw_name=name, pw_gid=GROUP) for name in first]
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_mem=members))
    monkeypatch.setattr(pwd, "getpwall", lambda: users)


def _folder(path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> Path:
    folder = path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        fields = list(real(self, **options))
        fields[5] = GROUP
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", stat)
    return folder
