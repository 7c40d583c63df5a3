"""Binding a Unix socket that no other process can take over, or be robbed of.

asyncio, uvloop and anyio all unlink a path before they bind it, also under the feet of a
daemon that still serves there. Here a lock decides who may, and a rename publishes.
"""

import errno
import fcntl
import os
import re
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

from ...ownership import ADVICE, folder_fault, is_trusted
from ..errors import SocketError

# sun_path less its final NUL, in bytes: 108 on Linux, 104 on the BSDs and macOS.
MAX_PATH = 107 if sys.platform == "linux" else 103
BACKLOG = 1024
"""Connections that may wait to be accepted: agents come in bursts."""


_LOCK_CONTENT = re.compile(rb"(\d{1,20}\n)?")


class UnixListener:
    """A listening Unix socket, the lock on its path, and the duty to remove the socket.

    Args:
        path: where to listen. Missing folders are made, with mode 0700.
        temporary: no other daemon will ever listen here: the lock and the folder go too.

    Raises:
        SocketError: another daemon serves on this path, something else is there or in the
            place of the lock, other users could replace the socket, or the path is too long
            or cannot be written.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        self.path = path.absolute()
        self._is_temporary = temporary
        self._temporary = self.path.with_name(f".{os.getpid():x}")
        _check_length(self.path, self._temporary)
        try:
            _check_links(self.path.parent)
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
        _refuse_foreign(self._temporary)
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
        if self._is_temporary:
            _lock_path(self.path).unlink(missing_ok=True)
            with suppress(OSError):  # not empty: another program has put something there
                self.path.parent.rmdir()
        os.close(self._lock)
        self._lock = -1


def _check_length(*paths: Path) -> None:
    for path in paths:
        length = len(os.fsencode(path))
        if length > MAX_PATH:
            raise SocketError(
                f"the socket path {path} has {length} bytes and the system allows {MAX_PATH}; "
                "choose a shorter one"
            )


def _check_links(folder: Path) -> None:
    """Refuse a way to the folder that another user can turn elsewhere: a link of theirs."""
    seen: set[Path] = set()
    ahead = [folder]
    while ahead:
        path = ahead.pop()
        for step in (path, *path.parents):
            if step in seen or not step.is_symlink():
                continue
            seen.add(step)
            if not is_trusted(step.lstat()):
                raise SocketError(f"{step} is another user's link; choose another --socket")
            ahead.append(step.parent / step.readlink())


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which other users could put another socket in this one's place."""
    if (fault := folder_fault(folder)) is not None:
        raise SocketError(f"{fault}; {ADVICE}, or choose another --socket")


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def lock_holder(path: Path) -> int | None:
    """Find the process that holds the lock on a socket's path; None without one.

    Raises:
        PermissionError: the lock is another user's, who could have written any number into it.
        OSError: the lock cannot be read.
    """
    try:
        lock = os.open(_lock_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        content = os.pread(lock, 32, 0)
        return int(content or 0) or None if _LOCK_CONTENT.fullmatch(content) else None
    finally:
        os.close(lock)
    return None


def _lock(path: Path) -> int:
    """Open and lock the file beside the path, and write this process's id into it."""
    lock = _open_lock(_lock_path(path))
    try:
        _take_lock(lock, path)
        _check_lock(lock, _lock_path(path))
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _open_lock(path: Path) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_NONBLOCK, 0o600)  # or a FIFO could keep us waiting
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO):
            raise _foreign_lock(path) from error
        raise


def _take_lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        raise SocketError(
            f"another daemon (pid {owner if owner.isdecimal() else 'unknown'}) already serves "
            f"on {path}; stop it first, or choose another --socket"
        ) from error


def _check_lock(lock: int, path: Path) -> None:
    """Refuse to write into what no daemon of this user's has made."""
    info = os.fstat(lock)
    is_own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and info.st_nlink == 1
    if not is_own or _LOCK_CONTENT.fullmatch(os.pread(lock, 32, 0)) is None:
        raise _foreign_lock(path)


def _foreign_lock(path: Path) -> SocketError:
    return SocketError(
        f"{path} is there already and is no lock file of this user's daemons; "
        "remove it, or choose another --socket"
    )


def _refuse_foreign(path: Path) -> None:
    """Allow replacing a socket that this user's dead daemon left, and nothing else."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise SocketError(f"{path} is there already and is not a socket; choose another path")
    if info.st_uid != os.geteuid():
        raise SocketError(
            f"{path} is another user's socket (uid {info.st_uid}); choose another path"
        )
