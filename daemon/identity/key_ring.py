"""The keys that a daemon knows, which are those in the file at any time."""

import errno
import os
from pathlib import Path

import structlog

from ..errors import ConfigError
from .key_file import Key, digest, read_keys

_Version = tuple[int, ...]
_UNREAD: _Version = ()

_GONE = "TCP asks for keys, and nobody has one: put the file back, or restart to do without"

log = structlog.get_logger()


class KeyRing:
    """Finds keys by their digests. Belongs to the event loop.

    Each search looks whether the file is another one than before, which is one `stat`; it is read
    again only then. So a new key works at once, and a revoked one no more. Where the file has a
    fault, the keys of before stay, and the log says so once. Where it is gone, nobody has a key,
    and still they are asked for, until a file is back.

    Attributes:
        path: of the file.

    Args:
        path: as above.
        wanted: whether keys are asked for without this file, as there was another one.
    """

    def __init__(self, path: Path, *, wanted: bool = False) -> None:
        self.path = path
        self._wanted = wanted
        self._keys: dict[str, Key] = {}
        self._version: _Version | None = _UNREAD

    def read(self) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, or is none of keys.
        """
        self._version = _version(self.path)
        self._wanted = self._wanted or self._version is not None
        self._keys = {key.sha256: key for key in read_keys(self.path, check_owner=True)}

    def wanted(self) -> bool:
        """Whether keys are asked for: there is a file, or this daemon has seen one.

        It may be without keys: who made one wants them to be asked for. One that went may have
        gone by mistake, and nothing is opened to everybody by that.
        """
        self._refresh()
        return self._wanted

    def find(self, key: str) -> Key | None:
        """Find what is kept of a key; None if nobody has been given it.

        How long the search takes tells of digests only, and from them nobody can tell a key.
        """
        self._refresh()
        return self._keys.get(digest(key)) if key else None

    def _refresh(self) -> None:
        if self._version == _version(self.path):
            return
        try:
            self.read()
        except ConfigError as error:
            log.error("keys not read", reason=str(error))  # noqa: TRY400  (no fault of the code)
        else:
            if self._version is None:
                if self._wanted:
                    log.warning("the file of keys is gone", path=str(self.path), advice=_GONE)
            else:
                log.info("keys read", keys=len(self._keys))


def _version(path: Path) -> _Version | None:
    """What differs when a file is another one, or was changed; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  (many requests a second)
    except FileNotFoundError:
        return (errno.ENOENT,) if path.is_symlink() else None
    except OSError as error:
        return (error.errno or 0,)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
