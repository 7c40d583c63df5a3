"""Binding the Unix socket: private, exclusive, and never at another's cost."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from umbel.daemon.errors import SocketError
from umbel.daemon.sockets import MAX_PATH, UnixListener

from .running import RunningDaemon


def connects(path: Path) -> bool:
    """Whether somebody listens on the path."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def test_modes(short_path: Path) -> None:
    """The folder is 0700 and the socket 0600, whatever the umask."""
    before = os.umask(0)
    try:
        with UnixListener(short_path / "run" / "u.sock") as listener:
            assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(listener.path.parent.stat().st_mode) == 0o700
            assert connects(listener.path)
            assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_close_removes_the_socket(short_path: Path) -> None:
    """Nothing but the lock file stays, and closing twice is closing once."""
    listener = UnixListener(short_path / "u.sock")
    listener.close()
    listener.close()
    assert [path.name for path in short_path.iterdir()] == ["u.sock.lock"]


def test_second_listener_is_refused(short_path: Path) -> None:
    """The first keeps serving; the message names its process and what to do."""
    path = short_path / "u.sock"
    with UnixListener(path):
        with pytest.raises(SocketError, match=rf"pid {os.getpid()}\) already serves on .*--socket"):
            UnixListener(path)
        assert connects(path)


def test_path_is_free_after_close(short_path: Path) -> None:
    """A closed listener leaves nothing in the way of the next."""
    for _ in range(3):
        with UnixListener(short_path / "u.sock") as listener:
            assert connects(listener.path)


def test_stale_socket_is_replaced(short_path: Path) -> None:
    """What a killed daemon left behind does not keep the next one from starting."""
    path = short_path / "u.sock"
    program = (
        "import os, sys; from pathlib import Path; from umbel.daemon.sockets import UnixListener;"
        "UnixListener(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=30)
    assert path.exists()
    assert not connects(path)
    with UnixListener(path):
        assert connects(path)


def test_close_leaves_a_foreign_socket(short_path: Path) -> None:
    """A path that has become somebody else's is not removed."""
    path = short_path / "u.sock"
    listener = UnixListener(path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        listener.close()
        assert path.exists()


def test_other_files_are_not_replaced(short_path: Path) -> None:
    """A file, or a link to a socket, is not ours to remove."""
    path = short_path / "u.sock"
    path.write_text("precious")
    with pytest.raises(SocketError, match="is not a socket"):
        UnixListener(path)
    assert path.read_text() == "precious"
    path.unlink()
    path.symlink_to(short_path / "elsewhere")
    with pytest.raises(SocketError, match="is not a socket"):
        UnixListener(path)


def test_long_path_is_refused(short_path: Path) -> None:
    """The limit is the system's, counted in bytes; the message has both figures."""
    room = MAX_PATH - len(os.fsencode(short_path)) - 1
    with UnixListener(short_path / ("s" * room)) as listener:
        assert connects(listener.path)
    with pytest.raises(SocketError, match=rf"has {MAX_PATH + 1} bytes .* allows {MAX_PATH}"):
        UnixListener(short_path / ("s" * (room + 1)))
    with pytest.raises(SocketError, match="choose a shorter one"):
        UnixListener(short_path / ("é" * (room // 2 + 1)))


def test_folder_open_to_others_is_refused(short_path: Path) -> None:
    """Where others can write they could put their own socket in this one's place."""
    folder = short_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(SocketError, match="other users can write"):
        UnixListener(folder / "u.sock")
    folder.chmod(0o1777)
    with UnixListener(folder / "u.sock") as listener:
        assert connects(listener.path)


def test_impossible_folder(short_path: Path) -> None:
    """A folder that cannot be made is an error in words."""
    (short_path / "file").write_text("")
    with pytest.raises(SocketError, match=r"cannot listen on .*: File exists"):
        UnixListener(short_path / "file" / "u.sock")


def test_second_daemon(tiny_daemon: RunningDaemon) -> None:
    """A second daemon on the path exits with a message before it loads anything."""
    second = subprocess.run(
        [sys.executable, "-m", "umbel", "serve", "--socket", str(tiny_daemon.socket)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert second.returncode == 1
    assert f"another daemon (pid {tiny_daemon.process.pid}) already serves" in second.stderr
    assert "loading" not in second.stderr
    assert tiny_daemon.request("GET", "/health").status == 200
