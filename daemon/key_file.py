"""API keys at rest: a file that has, of each key, its digest and whose it is.

A key has 256 random bits, so that nobody finds one from its SHA-256, however fast that is. The
slow, salted digests that passwords need would add nothing here.
"""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from .config import check_tenant_name
from .errors import ConfigError
from .quoting import quote

KEY_PREFIX = "umbel-"
"""What every key begins with, and what nobody else's does."""

_KEY_BYTES = 32
_ID_BYTES = 4


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


def read_keys(path: Path) -> list[Key]:
    """Read all keys; none where there is no file.

    Raises:
        ConfigError: the file cannot be read, or is none of keys.
    """
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=_KeyFile).keys
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the keys in {path}: {error}") from error
    for key in keys:
        check_tenant_name(key.tenant, f"{path}: key {quote(key.id)}")
    return keys


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
