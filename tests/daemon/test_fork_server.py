"""A forked daemon is to a test what a fresh one is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .fork_server import ROOT, ForkServer, fork_server
from .running import START, eventually, is_ready, running, spawn


@pytest.fixture(autouse=True)
def server() -> ForkServer:
    """The one of this process."""
    found = fork_server()
    if found is None:
        pytest.skip("all are fresh here")
    return found


def test_its_exit_status_and_its_log_are_its_own(short_path: Path) -> None:
    """As those of a fresh one that cannot start."""
    said = []
    for fresh in (False, True):
        daemon = spawn(short_path, "no-such-model", fresh=fresh)
        assert daemon.process.wait(START) == 1
        lines = [line.split("event=")[-1] for line in daemon.log().splitlines()]
        said.append([line.replace(f"pid={daemon.process.pid}", "pid") for line in lines])
    assert said[0] == said[1]
    assert any("no model 'no-such-model'" in line for line in said[0])


def test_it_is_a_child_of_the_test(short_path: Path, tiny_dir: Path) -> None:
    """In its folder, with the program's name and settings, and a signal tells how it ended."""
    with running(short_path, tiny_dir, env={"UMBEL_NO_DISK": "1"}) as daemon:
        folder = Path("/proc") / str(daemon.process.pid)
        assert f"PPid:\t{os.getpid()}\n" in (folder / "status").read_text()
        assert "fork_server" in (folder / "cmdline").read_text()
        assert (folder / "cwd").readlink() == Path.cwd()
        assert daemon.status()["disk"] is None
        daemon.process.kill()
        assert daemon.process.wait(START) == -signal.SIGKILL


PROGRAM = """
import os, sys
from pathlib import Path
from tests.daemon.running import spawn
print(spawn(Path(sys.argv[1]), sys.argv[2]).process.pid, flush=True)
os._exit(1)
"""


def test_it_ends_with_the_tests(short_path: Path, tiny_dir: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(short_path), str(tiny_dir)]
    told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert told.returncode == 1
    eventually(lambda: not Path("/proc", told.stdout.strip(), "cwd").exists(), START)


def test_two_at_once(short_path: Path, tiny_dir: Path) -> None:
    """They share nothing: one ends, the other goes on."""
    (short_path / "b").mkdir()
    with running(short_path, tiny_dir) as first:
        second = spawn(short_path / "b", tiny_dir)
        eventually(lambda: is_ready(second), START)
        assert second.terminate() == 0
        assert is_ready(first)


def test_what_imports_would_see_makes_it_fresh(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.can_fork({**os.environ, "UMBEL_MODEL": "x", "XDG_CONFIG_HOME": "/x"})
    assert not server.can_fork({**os.environ, "OPENBLAS_NUM_THREADS": "7"})
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert not server.can_fork(os.environ)
