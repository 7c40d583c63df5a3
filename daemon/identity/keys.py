"""API keys: the file that has their digests and tenants, and the keys that a daemon knows.

A key has 256 random bits, so that its SHA-256 gives it to no one, however fast that is. The slow,
salted digests that passwords need would add nothing here.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from ...ownership import ADVICE, file_fault, readable_by_all
from ..config import check_tenant_name
from ..errors import ConfigError
from ..quoting import quote

KEY_PREFIX = "umbel-"
"""The beginning of every key of umbel's, and of no other's."""

_KEY_BYTES = 32
_ID_BYTES = 4
_GONE = "TCP asks for keys, and no key is known: put the file back, or restart to do without"

_Version = tuple[int, ...]
_UNREAD: _Version = ()

log = structlog.get_logger()


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key as the file has it."""

    id: str  # its name for people
    tenant: str  # that requests with this key belong to
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # of the key
    created: datetime  # in UTC
    proxy: bool = False  # its holder may name other tenants


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key] = []


def digest(key: str) -> str:
    """Digest a key as the file has it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


class KeyRing:
    """Finds keys by their digests. Belongs to the event loop.

    Each search looks whether the file has changed, which is one `stat`, and reads it again only
    then: a new key works at once, and a revoked one no more. If the file has a fault, the keys
    read before stay, and the log says so once. If the file is gone, no key is known, and keys are
    still asked for, until a file is back.
    """

    def __init__(self, path: Path, *, wanted: bool = False) -> None:
        self.path = path
        self._wanted = wanted  # keys are asked for: there is a file, or was this one or another
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
        """Return True if keys are asked for: there is a file, or this daemon has seen one.

        An empty file asks for keys too. A file that went may have gone by mistake, which opens
        the daemon to no one.
        """
        self._refresh()
        return self._wanted

    def find(self, key: str) -> Key | None:
        """Find a key; None if it is not known.

        The time of the search depends on digests only, which give no key away.
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
            if self._version is not None:
                log.info("keys read", keys=len(self._keys))
            elif self._wanted:
                log.warning("the file of keys is gone", path=str(self.path), advice=_GONE)


def _version(path: Path) -> _Version | None:
    """Describe a file's present content without reading it; None if there is no file."""
    try:
        found = os.stat(path)  # noqa: PTH116  (many requests a second)
    except FileNotFoundError:
        return (errno.ENOENT,) if path.is_symlink() else None
    except OSError as error:
        return (error.errno or 0,)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def read_keys(path: Path, *, check_owner: bool = False) -> list[Key]:
    """Read all keys; none if there is no file.

    Args:
        path: of the file.
        check_owner: the keys let clients in, so that no other user may change the file.

    Raises:
        ConfigError: the file cannot be read, is none of keys, or another user can change it.
    """
    try:
        content, info = _read(path)
        if check_owner and (fault := file_fault(path, info)) is not None:
            raise ConfigError(f"{fault}, so that they could make keys; {ADVICE}")
        keys = msgspec.json.decode(content, type=_KeyFile).keys
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ConfigError(f"{path}, the file of keys, is a link to nothing") from error
        return []
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the keys in {path}: {error}") from error
    for key in keys:
        check_tenant_name(key.tenant, f"{path}: key {quote(key.id)}")
    if check_owner and readable_by_all(info):
        log.warning("all users can read the file of keys", path=str(path), advice="chmod 600")
    return keys


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    """Read a regular file: any other could keep the daemon waiting, or never end."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{path}, the file of keys, is no regular file")
        return file.read(), info


def add_key(path: Path, tenant: str, *, proxy: bool = False) -> tuple[Key, str]:
    """Make a key, and keep its digest in the file, which is made if need be.

    Returns:
        The file's entry, and the key itself, which cannot be found out again.

    Raises:
        ConfigError: the name is none, or the file cannot be read or written.
    """
    check_tenant_name(tenant, "the tenant")
    with _changing(path) as keys:
        text = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        taken = {key.id for key in keys}
        while (name := secrets.token_hex(_ID_BYTES)) in taken:
            pass
        now = datetime.now(UTC).replace(microsecond=0)
        key = Key(id=name, tenant=tenant, sha256=digest(text), created=now, proxy=proxy)
        keys.append(key)
    return key, text


def revoke_key(path: Path, name: str) -> Key:
    """Take a key out of the file.

    Raises:
        ConfigError: there is no such key, or the file cannot be read or written.
    """
    with _changing(path) as keys:
        found = next((key for key in keys if key.id == name), None)
        if found is None:
            raise ConfigError(f"there is no key {quote(name)} in {path}; umbel keys list has them")
        keys.remove(found)
    return found


@contextmanager
def _changing(path: Path) -> Iterator[list[Key]]:
    """Lock the file, give its keys, and write them when the block ends without an error."""
    path = path.resolve()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # a lock file would have to stay for ever
            keys = read_keys(path)
            yield keys
            _write(path, keys)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"cannot write the keys to {path}: {error.strerror}") from error


def _write(path: Path, keys: list[Key]) -> None:
    """Write the file at once or not at all; only its owner may read it."""
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    text = msgspec.json.format(msgspec.json.encode(_KeyFile(keys)), indent=2) + b"\n"
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            if os.geteuid() == 0:  # root writes for the daemon's user
                owner = (path if path.exists() else path.parent).stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        new.replace(path)
    finally:
        with suppress(FileNotFoundError):
            new.unlink()
