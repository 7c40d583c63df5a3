"""A file of log lines that other programs may rename, as newsyslog and logrotate do."""

import os
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError


class LogFile:
    """A file of log lines, only its owner's. Any thread may write.

    Where another file, or none, has its name, the next line begins a new one. A line that the disk
    has no room for is lost: it ends no request.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise ConfigError(f"log_file: cannot write {path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def msg(self, line: str) -> None:
        """Write a line."""
        with self._lock, suppress(OSError):
            if not self._has_its_name():
                self._open_again()
            os.write(self._descriptor, f"{line}\n".encode(errors="backslashreplace"))

    debug = info = warning = error = critical = exception = log = msg

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _open_again(self) -> None:
        """Open the file under its name; where that fails, the old one takes the lines."""
        with suppress(OSError):
            opened = _open(self._path)
            os.dup2(opened, self._descriptor, inheritable=False)
            os.close(opened)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    return os.open(path, flags, 0o600)
