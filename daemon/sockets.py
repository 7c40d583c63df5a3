"""Binding a Unix socket that no other process can take over, or be robbed of.

asyncio, uvloop and anyio all unlink a path before they bind it, also under the feet of a
daemon that still serves there. Here a lock decides who may, and a rename publishes.
"""

import fcntl
import os
import socket
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from .errors import SocketError

# sun_path less its final NUL, in bytes: 108 on Linux, 104 on the BSDs and macOS.
MAX_PATH = 107 if sys.platform == "linux" else 103
BACKLOG = 1024
"""Connections that may wait to be accepted: agents come in bursts."""


class UnixListener:
    """A listening Unix socket, the lock on its path, and the duty to remove both.

    Args:
        path: where to listen. Missing folders are made, with mode 0700.

    Raises:
        SocketError: another daemon serves on this path, something else is there, or the
            path is too long or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._temporary = self.path.with_name(f".{os.getpid():x}")
        _check_length(self.path, self._temporary)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(self.path.parent)
            self._lock = _lock(self.path)
            try:
                self.socket = self._publish()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise SocketError(f"cannot listen on {self.path}: {error.strerror}") from error
        self._inode = self.path.lstat().st_ino

    def _publish(self) -> socket.socket:
        _refuse_foreign(self.path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o177)  # or the name would be open to others until the chmod
        try:
            self._temporary.unlink(missing_ok=True)
            bound.bind(str(self._temporary))
            self._temporary.chmod(0o600)
            bound.listen(BACKLOG)
            self._temporary.rename(self.path)
        except BaseException:
            bound.close()
            raise
        finally:
            os.umask(umask)
        bound.setblocking(False)
        return bound

    def close(self) -> None:
        """Stop listening, remove the socket if it is still this one, free the lock."""
        if self._lock < 0:
            return
        self.socket.close()
        try:
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        except FileNotFoundError:
            pass
        # The lock file stays: removing it would let two daemons lock two files.
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_length(*paths: Path) -> None:
    for path in paths:
        length = len(os.fsencode(path))
        if length > MAX_PATH:
            raise SocketError(
                f"the socket path {path} has {length} bytes and the system allows {MAX_PATH}; "
                "choose a shorter one"
            )


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which other users could put another socket in this one's place."""
    mode = folder.stat().st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise SocketError(
            f"other users can write to {folder} (mode {stat.S_IMODE(mode):04o}); "
            f"run chmod go-w on it, or choose another --socket"
        )


def _lock(path: Path) -> int:
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise SocketError(
            f"another daemon (pid {owner or 'unknown'}) already serves on {path}; "
            "stop it first, or choose another --socket"
        ) from error
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _refuse_foreign(path: Path) -> None:
    """Allow replacing a socket that a dead daemon left, and nothing else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"{path} is there already and is not a socket; choose another path")
