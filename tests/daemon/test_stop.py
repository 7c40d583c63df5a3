"""`umbel stop` and `umbel logs`: the end of the daemon that runs, and its log."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from umbel.daemon.http import sockets

from .command import TIMEOUT, environment, umbel
from .running import running


def test_stop(short_path: Path, long_tiny_dir: Path) -> None:
    """It ends when the daemon has ended, in order; then there is none to stop."""
    with running(short_path, long_tiny_dir) as daemon:
        pid = daemon.process.pid
        done = umbel("stop", "--socket", str(daemon.socket), folder=short_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"stopped the daemon on {daemon.socket} (pid {pid})\n"
        assert daemon.process.wait(TIMEOUT) == 0
        assert "event=stopped" in daemon.log()
        again = umbel("stop", "--socket", str(daemon.socket), folder=short_path)
    assert again.returncode == 1
    assert f"no daemon runs on {daemon.socket}" in again.stderr


def test_a_socket_of_a_service_manager_is_not_asked(short_path: Path) -> None:
    """A connection would start its daemon; the answer says what keeps it down."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_path / "u.sock"))
        listening.listen()
        listening.setblocking(False)
        done = umbel("stop", "--socket", str(short_path / "u.sock"), folder=short_path)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert done.returncode == 1
    assert "the next client would start that daemon again" in done.stderr


def test_a_lock_of_another_user_names_nobody(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is not believed, whatever it is."""
    path = short_path / "u.sock"
    with closing(sockets.UnixListener(path)) as listener:
        assert sockets.lock_holder(path) == os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: -1)
            with pytest.raises(PermissionError):
                sockets.lock_holder(path)
        listener.close()
        assert sockets.lock_holder(path) is None


@pytest.mark.parametrize("words", [("logs",), ("service", "logs")])
def test_logs_follow_the_log_file(words: tuple[str, ...], short_path: Path) -> None:
    """The file of the settings is shown, and what comes, also where systemd does not run."""
    log, config = short_path / "log", short_path / ".config" / "umbel" / "umbel.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'log_file = "{log}"\n')
    log.write_text("first\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "umbel", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(short_path),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        with log.open("a") as file:
            file.write("second\n")
        assert process.stdout.readline() == "second\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT)
