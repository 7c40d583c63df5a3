"""API keys at rest: a file that has, of each key, its digest and whose it is.

A key has 256 random bits, so that nobody finds one from its SHA-256, however fast that is. The
slow, salted digests that passwords need would add nothing here.
"""

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
"""What every key begins with, and what nobody else's does."""

_KEY_BYTES = 32
_ID_BYTES = 4

log = structlog.get_logger()


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key.

    Attributes:
        id: what people call it.
        tenant: whose requests it makes them.
        sha256: of the key, in hexadecimal digits.
        created: when, in UTC.
        proxy: whether who has it may name other tenants.
    """

    id: str
    tenant: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: datetime
    proxy: bool = False


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key] = []


def digest(key: str) -> str:
    """Digest a key as the file has it."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def read_keys(path: Path, *, check_owner: bool = False) -> list[Key]:
    """Read all keys; none where there is no file.

    Args:
        path: of the file.
        check_owner: the keys are to let clients in, so that no other user may change the file.

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
        What is kept, and the key itself, which nobody can find out again.

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
    """Give the keys, and write what became of them; nobody else changes them meanwhile.

    Nothing is written where the block raises.
    """
    path = path.resolve()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # a file of its own would have to stay for ever
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
            _give_to_owner(file.fileno(), path)
        new.replace(path)
    finally:
        with suppress(FileNotFoundError):
            new.unlink()


def _give_to_owner(file: int, path: Path) -> None:
    """Leave a file that root writes to whoever has the old one, or the folder: a daemon's user."""
    if os.geteuid() == 0:
        owner = (path if path.exists() else path.parent).stat()
        os.fchown(file, owner.st_uid, owner.st_gid)
