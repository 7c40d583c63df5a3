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
    """Clear the cache of groups before and after each test."""
    ownership._is_own_group.cache_clear()
    yield
    ownership._is_own_group.cache_clear()


@pytest.mark.parametrize(
    ("members", "first", "writable"),
    [([], [], 0o775), ([USER], [USER], 0o775), ([], [USER], 0o770)],
    ids=["no member", "this user", "this user's first"],
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
    [(["eve"], [], 0o775), ([USER, "eve"], [], 0o770), ([], ["eve"], 0o775), ([], [USER], 0o777)],
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


@pytest.mark.parametrize(("name", "first"), [("domain users", GROUP), (USER, GROUP + 1)])
def test_a_group_that_was_not_made_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    """A directory does not list the members of its groups, so that none are seen."""
    _group(monkeypatch, [], [], name=name, users_first=first)
    assert ownership.folder_fault(_folder(tmp_path, monkeypatch, 0o775)) is not None


def test_a_group_without_a_name_is_not_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members cannot be known."""
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert ownership.folder_fault(_folder(tmp_path, monkeypatch, 0o775)) is not None


def _group(
    monkeypatch: pytest.MonkeyPatch,
    members: list[str],
    first: list[str],
    *,
    name: str = USER,
    users_first: int = GROUP,
) -> None:
    user = SimpleNamespace(pw_name=USER, pw_gid=users_first)
    users = [SimpleNamespace(pw_name=each, pw_gid=GROUP) for each in first]
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
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
