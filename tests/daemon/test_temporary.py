"""The daemon of `umbel chat` and `umbel demo`: it ends with its parent and leaves nothing."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from umbel.daemon.cli import private
from umbel.daemon.errors import ClientError

from .command import environment
from .running import START, STOP, eventually


@contextmanager
def command(*words: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command whose temporary files lie in a folder, until the block ends."""
    (folder / "tmp").mkdir()
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "umbel", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment(folder) | {"TMPDIR": str(folder / "tmp")},
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=STOP)


def left_over(folder: Path) -> list[str]:
    """Files of umbel in the temporary folder; MLX keeps its compiled kernels there."""
    return sorted(str(path) for path in (folder / "tmp").rglob("*") if "mlx" not in path.parts)


def listens(folder: Path) -> bool:
    """True if a temporary daemon has made its socket."""
    return any(name.endswith("u.sock") for name in left_over(folder))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, check=True)
    pairs = (line.split() for line in listed.stdout.decode().splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def runs(pid: int) -> bool:
    """True if a process is there and has not ended."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    state = listed.stdout.decode().strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (("chat", "--private"), "starting"),
        pytest.param(("chat", "--private"), "loading", marks=pytest.mark.slow),  # as the demo's
        (("chat", "--private"), "ready"),
        (("demo", "--agents", "1"), "loading"),
    ],
)
def test_killed_parent(
    short_path: Path, long_tiny_dir: Path, words: tuple[str, ...], state: str
) -> None:
    """`kill -9` of the command ends its daemon, in any state, and nothing stays on disk."""
    if state == "ready":  # the tiny model is it sooner; the embedded one loads long enough to see
        words += ("--model", str(long_tiny_dir), "--lines", "--max-tokens", "2")
    with command(*words, folder=short_path) as process:
        daemon: int = eventually(lambda: children(process.pid), START)[0]
        if state == "loading":
            eventually(lambda: listens(short_path), START)
        if state == "ready":
            assert process.stdin is not None
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            eventually(lambda: "cut off after 2" in (short_path / "errors").read_text(), START)
        assert runs(daemon)
        process.kill()
        process.wait(STOP)
        eventually(lambda: not runs(daemon), STOP)
        assert left_over(short_path) == []


def test_killed_daemon(short_path: Path) -> None:
    """A daemon that is killed leaves its folder to its parent, which ends in words."""
    with command("chat", "--private", folder=short_path) as process:
        daemon: int = eventually(lambda: children(process.pid), START)[0]
        eventually(lambda: listens(short_path), START)
        os.kill(daemon, signal.SIGKILL)
        assert process.wait(STOP) == 1
        assert left_over(short_path) == []
        errors = (short_path / "errors").read_text()
        assert "the private daemon did not start" in errors
        assert "Traceback" not in errors


async def test_a_daemon_that_is_not_ready_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends in words, and so does the daemon."""
    monkeypatch.setattr(private, "_START", 0.2)
    with pytest.raises(ClientError, match=r"not ready within 0\.2 seconds, downloads not counted"):
        async with private.private_daemon("smollm2"):
            pytest.fail("it was ready before its imports ended")


@pytest.mark.parametrize("arrives", [True, False])
async def test_the_bound_counts_from_the_last_byte(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, arrives: bool
) -> None:
    """A download that gets on may take longer than the bound; one that stalls may not."""
    monkeypatch.setattr(private, "_START", 1.0)
    monkeypatch.setattr(private, "_POLL", 0.25)
    told: list[int] = []

    async def get(_route: str) -> dict[str, Any]:
        if len(told) == 8:
            return {"status": "ready"}
        return {"status": "loading", "download": {"done": 1 + arrives * len(told), "total": 8}}

    client: Any = SimpleNamespace(path=tmp_path, get=get)
    process: Any = SimpleNamespace(returncode=None)
    log = io.BytesIO()
    wait = private._wait_ready(
        client, process, log, lambda ready: told.append(ready["download"]["done"])
    )
    if arrives:
        await wait
        assert told == [1, 2, 3, 4, 5, 6, 7, 8]
    else:
        with pytest.raises(ClientError, match="not ready within 1 seconds"):
            await wait
        assert set(told) == {1}


def test_storm_on_the_parent(short_path: Path) -> None:
    """Many signals end the command with the status of the first, and its daemon with it."""
    with command("chat", "--private", folder=short_path) as process:
        daemon: int = eventually(lambda: children(process.pid), START)[0]
        eventually(lambda: listens(short_path), START)
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert process.returncode == 128 + signal.SIGTERM
        eventually(lambda: not runs(daemon), STOP)
        assert left_over(short_path) == []
        assert "Traceback" not in (short_path / "errors").read_text()
