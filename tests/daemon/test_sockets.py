"""Binding the Unix socket: private, exclusive, and never at another's cost."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from umbel.daemon.errors import SocketError
from umbel.daemon.http import sockets
from umbel.daemon.http.sockets import MAX_PATH, UnixListener

from .running import RunningDaemon


def connects(path: Path) -> bool:
    """Return True if a process listens on the path."""
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
        with closing(UnixListener(short_path / "run" / "u.sock")) as listener:
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
    with closing(UnixListener(path)):
        with pytest.raises(SocketError, match=rf"pid {os.getpid()}\) already serves on .*--socket"):
            UnixListener(path)
        assert connects(path)


def test_path_is_free_after_close(short_path: Path) -> None:
    """A closed listener leaves nothing in the way of the next."""
    for _ in range(3):
        with closing(UnixListener(short_path / "u.sock")) as listener:
            assert connects(listener.path)


def test_stale_socket_is_replaced(short_path: Path) -> None:
    """The socket of a killed daemon does not keep the next one from starting."""
    path = short_path / "u.sock"
    program = (
        "import os, sys; from pathlib import Path;"
        "from umbel.daemon.http.sockets import UnixListener;"
        "UnixListener(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=30)
    assert path.exists()
    assert not connects(path)
    with closing(UnixListener(path)):
        assert connects(path)


def test_close_leaves_a_foreign_socket(short_path: Path) -> None:
    """A path that another process took is not removed."""
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
    with closing(UnixListener(short_path / ("s" * room))) as listener:
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
    with closing(UnixListener(folder / "u.sock")) as listener:
        assert connects(listener.path)


@pytest.fixture
def make_foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make a path another user's: really if we are root, else by being another user."""

    def make(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 4321, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: 4321)

    return make


def test_folder_of_another_user_is_refused(
    short_path: Path, make_foreign: Callable[[Path], None]
) -> None:
    """Its owner could put another socket in this one's place, whatever its mode is."""
    folder = short_path / "theirs"
    folder.mkdir(mode=0o700)
    make_foreign(folder)
    with pytest.raises(SocketError, match="theirs belongs to another user"):
        UnixListener(folder / "u.sock")
    assert list(folder.iterdir()) == []


def test_link_of_another_user_is_refused(
    short_path: Path, make_foreign: Callable[[Path], None]
) -> None:
    """A way that leads to the folder through our own links is good, through theirs it is not."""
    (short_path / "real").mkdir(mode=0o700)
    (short_path / "first").symlink_to("second")
    (short_path / "second").symlink_to("real")
    path = short_path / "first" / "u.sock"
    with closing(UnixListener(path)):
        assert connects(path)
    make_foreign(short_path / "second")
    with pytest.raises(SocketError, match="is another user's link"):
        UnixListener(path)
    assert [entry.name for entry in (short_path / "real").iterdir()] == ["u.sock.lock"]


def test_socket_of_another_user_is_refused(
    short_path: Path, make_foreign: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not replaced, and what it is for still reaches it."""
    path = short_path / "u.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        make_foreign(path)
        monkeypatch.setattr(sockets, "folder_fault", lambda _folder: None)
        monkeypatch.setattr(sockets, "_check_lock", lambda *_: None)
        with pytest.raises(SocketError, match="another user's socket"):
            UnixListener(path)
        assert connects(path)


def test_lock_follows_no_link(short_path: Path) -> None:
    """A link in the lock's place is refused, and where it leads to nothing happens."""
    precious, new = short_path / "precious", short_path / "new"
    precious.write_text("4321\n")  # looks like a lock
    lock = short_path / "u.sock.lock"
    for target in (precious, new):
        lock.symlink_to(target)
        with pytest.raises(SocketError, match="no lock file of this user's"):
            UnixListener(short_path / "u.sock")
        lock.unlink()
    assert precious.read_text() == "4321\n"
    assert not new.exists()


@pytest.mark.parametrize("content", ["precious", "12 34\n", "1234\nand more", "1234", " "])
def test_lock_spares_files_of_others(short_path: Path, content: str) -> None:
    """A file that holds anything but a process's id is not written into."""
    lock = short_path / "u.sock.lock"
    lock.write_text(content)
    with pytest.raises(SocketError, match="no lock file of this user's"):
        UnixListener(short_path / "u.sock")
    assert lock.read_text() == content


def test_lock_spares_a_file_with_two_names(short_path: Path) -> None:
    """A file of another name belongs to something else, even if it looks like a lock."""
    other = short_path / "other"
    other.write_text("4321\n")
    (short_path / "u.sock.lock").hardlink_to(other)
    with pytest.raises(SocketError, match="no lock file of this user's"):
        UnixListener(short_path / "u.sock")
    assert other.read_text() == "4321\n"


def test_lock_is_a_regular_file(short_path: Path) -> None:
    """A FIFO, a folder or a socket in its place is refused, and does not make anybody wait."""
    lock = short_path / "u.sock.lock"

    def refuse() -> None:
        with pytest.raises(SocketError, match="no lock file of this user's"):
            UnixListener(short_path / "u.sock")

    os.mkfifo(lock)
    refuse()
    lock.unlink()
    lock.mkdir()
    refuse()
    lock.rmdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(lock))
        refuse()


def test_lock_of_another_user_is_refused(
    short_path: Path, make_foreign: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could hold it for ever, or let it go."""
    lock = short_path / "u.sock.lock"
    lock.write_text("4321\n")
    make_foreign(lock)
    monkeypatch.setattr(sockets, "folder_fault", lambda _folder: None)
    with pytest.raises(SocketError, match="no lock file of this user's"):
        UnixListener(short_path / "u.sock")
    assert lock.read_text() == "4321\n"


def test_stale_lock_is_taken(short_path: Path) -> None:
    """The content that a killed daemon wrote, or was about to write, is no obstacle."""
    for content in ("4194304\n", ""):
        (short_path / "u.sock.lock").write_text(content)
        with closing(UnixListener(short_path / "u.sock")):
            assert (short_path / "u.sock.lock").read_text() == f"{os.getpid()}\n"


def test_temporary_name_is_not_cleared(short_path: Path) -> None:
    """A file that happens to have the name under which the socket is made stays."""
    hidden = short_path / f".{os.getpid():x}"
    hidden.write_text("precious")
    with pytest.raises(SocketError, match="is not a socket"):
        UnixListener(short_path / "u.sock")
    assert hidden.read_text() == "precious"


def test_temporary_listener_leaves_nothing(short_path: Path) -> None:
    """Its lock and its folder go as well, unless there is something else in the folder."""
    folder = short_path / "run"
    with closing(UnixListener(folder / "u.sock", temporary=True)) as listener:
        assert connects(listener.path)
    assert not folder.exists()
    with closing(UnixListener(folder / "u.sock", temporary=True)):
        (folder / "precious").write_text("")
    assert [path.name for path in folder.iterdir()] == ["precious"]


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
