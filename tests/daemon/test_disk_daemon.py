"""Disks that fail under a real daemon: answers stay right, it stays up, and it says so once."""

import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

from .running import RunningDaemon, eventually, running
from .test_restart_warm import ask, on_disk

pytestmark = pytest.mark.slow  # each test starts daemons of its own

USER = "What is the capital of France?"


def filled(folder: Path, model: Path) -> str:
    """Run a daemon that leaves its state on disk; returns its answer."""
    with running(folder, model) as daemon:
        answer, _ = ask(daemon, USER)
        eventually(lambda: on_disk(daemon))
    return answer


def files(folder: Path) -> list[Path]:
    """The files of state."""
    return sorted((folder / "disk").glob("*/*.safetensors"))


def warnings(daemon: RunningDaemon) -> list[str]:
    """Lines of the log that warn."""
    return [line for line in daemon.log().splitlines() if "warning" in line]


@pytest.mark.parametrize("how", ["flip", "truncate", "missing"])
def test_damaged_files(how: str, short_path: Path, long_tiny_dir: Path) -> None:
    """A file that is not what was written is a miss."""
    answer = filled(short_path, long_tiny_dir)
    assert files(short_path)
    with running(short_path, long_tiny_dir) as daemon:
        files_found = files(short_path)
        for file in files_found:
            whole = bytearray(file.read_bytes())
            whole[-5] ^= 1
            if how == "missing":
                file.unlink()
            else:
                file.write_bytes(whole if how == "flip" else whole[:-9])
        again, cached = ask(daemon, USER)
        assert again == answer
        assert cached == 0
        warned = warnings(daemon)
        named = [file for file in files_found if any(file.name in line for line in warned)]
        assert named
        assert len(warned) == len(named), "one warning for each file"
        assert ask(daemon, USER) == (answer, ask(daemon, USER)[1])
        assert warnings(daemon) == warned


def test_the_folder_is_removed(short_path: Path, long_tiny_dir: Path) -> None:
    """While the daemon runs."""
    with running(short_path, long_tiny_dir) as daemon:
        answer, _ = ask(daemon, USER)
        eventually(lambda: on_disk(daemon))
        shutil.rmtree(short_path / "disk")
        assert ask(daemon, USER)[0] == answer
        other, _ = ask(daemon, "And of Spain?", 30)
        eventually(lambda: daemon.status()["disk"]["state"] == "off")
        assert ask(daemon, "And of Spain?", 30)[0] == other
        assert len([line for line in warnings(daemon) if "removed" in line]) == 1


def test_a_newer_index(short_path: Path, long_tiny_dir: Path) -> None:
    answer = filled(short_path, long_tiny_dir)
    (path,) = (short_path / "disk").glob("*/index.sqlite")
    with sqlite3.connect(path) as index:
        index.execute("PRAGMA user_version = 999")
    with running(short_path, long_tiny_dir) as daemon:
        assert ask(daemon, USER)[0] == answer
        assert len(warnings(daemon)) == 1


def test_another_model_on_the_same_folder(
    short_path: Path, long_tiny_dir: Path, tiny_dir: Path
) -> None:
    """Gets nothing of the first one's."""
    filled(short_path, long_tiny_dir)
    with running(short_path, tiny_dir, "--no-disk") as plain:
        expected = ask(plain, USER)
    with running(short_path, tiny_dir) as daemon:
        assert ask(daemon, USER) == expected


def _mounted(path: Path, options: str) -> bool:
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    return (
        os.geteuid() == 0
        and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.parametrize("options", ["size=300k", "ro"])
def test_a_disk_that_takes_nothing(options: str, short_path: Path, long_tiny_dir: Path) -> None:
    """It is full soon, or read-only from the start."""
    disk = short_path / "disk"
    if not _mounted(disk, options):
        pytest.skip("cannot mount a small disk here")
    try:
        with running(short_path, long_tiny_dir, "--disk-bytes", "1GiB") as daemon:
            answers = [ask(daemon, f"agent {i}: {USER}")[0] for i in range(5)]
            assert [ask(daemon, f"agent {i}: {USER}")[0] for i in range(5)] == answers
            assert daemon.request("GET", "/ready").status == 200
            assert len(warnings(daemon)) == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
