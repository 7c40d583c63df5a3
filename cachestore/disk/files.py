"""Files of the disk tier: writing, verifying, listing; and the lock of their folder.

A file is immutable and in the safetensors format: eight bytes with the header's length, a JSON
header, the tensors' bytes one after the other. It appears whole: temporary name, fsync, rename,
fsync of the folder. On macOS `fsync` does not empty the drive's own cache, so a power cut may
damage a file; the checksum shows it.

Verification has three results: whole, damaged, unreadable at present. Only damage costs a file: a
process without descriptors, a temporary disk failure or a changed mode say nothing of its contents.

`safetensors.serialize_file` writes to a temporary whose name cannot be recognised after a kill,
hides `errno`, and makes no checksum; so it is not used.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ...ownership import ForeignFolderError, folder_fault, is_trusted
from ..errors import DamagedFileError, DiskTierError, FolderInUseError, UnreadableFileError

LOCK = "lock"
DIGEST = "digest"  # in a file's metadata: a record's digest, in hexadecimal
INDEX = "index.sqlite"
INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal")

# Strict, so that a model's own *.safetensors are safe in a folder that was given by mistake.
_OWN = re.compile(r"[0-9a-f]{32}\.(safetensors|tmp)")
_SUFFIX, _TEMPORARY = ".safetensors", ".tmp"
LENGTH = 8  # bytes at a file's start that say how long its header is
BLOCK = 4 << 20  # bytes summed and written at a time: large enough to be done without the GIL
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class HostTensor(NamedTuple):
    """One array that the host can read; `dtype` is a safetensors name, as "BF16".

    Parts are buffers, in order, which the writer's thread reads; they must not change until then. A
    NumPy array with gaps is copied when written: keep it short.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class Payload(NamedTuple):
    """Contents of one file."""

    tensors: dict[str, HostTensor]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def release(self) -> None:
        """Let go of the tensors, also for others that have the payload."""
        self.tensors.clear()


def new_name() -> str:
    """A file name that nothing else has."""
    return secrets.token_hex(16) + _SUFFIX


def write_file(
    folder: Path, name: str, payload: Payload, stopped: Callable[[], bool] = lambda: False
) -> tuple[int, bytes]:
    """Write a file, mode 0600, whole or not at all; return its bytes and xxh3_128 checksum.

    Raises:
        OSError: it cannot be written. Nothing of it is left, unless that too failed.
        ValueError: a tensor is not as long as its shape says.
        DiskTierError: `stopped`, asked before each block, returned True.
    """
    blocks = chain([_header(payload)], _blocks(payload))
    temporary = name.removesuffix(_SUFFIX) + _TEMPORARY
    # All through one descriptor: a folder put in this one's place meanwhile gets nothing.
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600, dir_fd=folder_fd)
        present = temporary
        try:
            written = _write_blocks(fd, blocks, stopped)
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            present = name
            os.fsync(folder_fd)
        except BaseException:
            with suppress(OSError):  # the first error says more; the next start removes it
                os.unlink(present, dir_fd=folder_fd)
            raise
    finally:
        os.close(folder_fd)
    return written


def _write_blocks(
    fd: int, blocks: Iterable[memoryview], stopped: Callable[[], bool]
) -> tuple[int, bytes]:
    checksum, nbytes = xxhash.xxh3_128(), 0
    try:
        for block in blocks:
            for start in range(0, len(block), BLOCK):
                if stopped():
                    raise DiskTierError("the disk tier was closed before this was written")
                rest = block[start : start + BLOCK]
                checksum.update(rest)
                nbytes += len(rest)
                while len(rest):
                    rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return nbytes, checksum.digest()


def _header(payload: Payload) -> memoryview:
    """Length and JSON header, padded to eight bytes."""
    header: dict[str, object] = {}
    if payload.metadata:
        header["__metadata__"] = payload.metadata
    end = 0
    for name, tensor in payload.tensors.items():
        start, end = end, end + tensor.nbytes
        if prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 0) != end - start:
            raise ValueError(f"{name}: {end - start} bytes are no {tensor.dtype} {tensor.shape}")
        described = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        header[name] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(LENGTH, "little") + text)


def _blocks(payload: Payload) -> Iterator[memoryview]:
    """Bytes of all parts, of any item type; copied only if not contiguous."""
    for part in chain.from_iterable(tensor.parts for tensor in payload.tensors.values()):
        if not part.nbytes:
            continue
        items: Any = part
        if not isinstance(part, np.ndarray):  # NumPy may not know the type
            held: Any = memoryview(part)
            items = np.ndarray(held.shape, f"u{held.itemsize}", held.obj, strides=held.strides)
        yield np.ascontiguousarray(items).reshape(-1).view(np.uint8).data


def claim(folder: Path) -> int:
    """Make the folder, private, and lock it; return the descriptor that holds the lock.

    Raises:
        FolderInUseError: another tier holds it.
        ForeignFolderError: another user could put state there, or has.
        OSError: it cannot be made or written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = list(folder.iterdir())
    if not is_trusted(folder.stat()) or entries:
        _refuse_foreign(folder)  # before its mode is changed: it may hold what others put there
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(folder))
    # A folder with other things in it, as a home, keeps its mode.
    if all(_is_own(entry.name) for entry in entries):
        folder.chmod(0o700)
        _refuse_foreign(folder)  # some file systems have one mode for all
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise FolderInUseError(
                f"the cache folder {folder} is in use: stop the other umbel, or give this one "
                "another folder"
            ) from None
        raise
    return fd


def _refuse_foreign(folder: Path) -> None:
    if (fault := folder_fault(folder, may_be_sticky=False)) is not None:
        raise ForeignFolderError(fault)


def _is_own(name: str) -> bool:
    return name == LOCK or name in INDEX_FILES or is_file_name(name)


def is_file_name(name: str) -> bool:
    """True if a file of this name, temporary or not, can only be ours."""
    return _OWN.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """True if one of our names is that of a file that was never finished."""
    return name.endswith(_TEMPORARY)


def own_files(folder: Path) -> Iterator[tuple[str, int | None]]:
    """List name and size of our plain files, None if unknown; an OSError from the folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_file_name(entry.name):
                continue
            try:
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                pass
            except OSError:
                yield entry.name, None


Identity = tuple[tuple[int, int], ...]


def identity(folder: Path) -> Identity | None:
    """Device and number of the folder's lock and index; None if one is missing, or an OSError."""
    try:
        found = [os.lstat(path) for path in (folder / LOCK, folder / INDEX)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return tuple((status.st_dev, status.st_ino) for status in found)


def verify_file(
    path: Path, nbytes: int, checksum: bytes, stopped: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """Read a file, compare it with what was written, and return its metadata.

    Raises:
        DamagedFileError: it is missing, no plain file, or differs in size or checksum.
        UnreadableFileError: it cannot be read at present.
        DiskTierError: `stopped`, asked between blocks, returned True.
    """
    try:
        return _compare(path, nbytes, checksum, stopped)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedFileError(f"{path} is missing") from error
    except MemoryError as error:
        raise UnreadableFileError(f"{path} cannot be read: out of memory") from error
    except OSError as error:
        with suppress(OSError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise DamagedFileError(f"{path} is no plain file") from error
        raise UnreadableFileError(f"{path} cannot be read: {error.strerror}") from error


def _compare(
    path: Path, nbytes: int, checksum: bytes, stopped: Callable[[], bool]
) -> dict[str, str]:
    # Without O_NONBLOCK a pipe in the file's place would keep us waiting for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFileError(f"{path} is no plain file")
        if status.st_size != nbytes:
            raise DamagedFileError(f"{path} has {status.st_size} bytes, not {nbytes}")
        found = xxhash.xxh3_128()
        block = memoryview(bytearray(min(BLOCK, max(nbytes, 1))))
        while count := file.readinto(block):
            if stopped():
                raise DiskTierError("the disk tier was closed before this was read")
            found.update(block[:count])
        if found.digest() != checksum:
            raise DamagedFileError(f"{path} is not what was written: its checksum differs")
        return _metadata(path, fd)


def _metadata(path: Path, fd: int) -> dict[str, str]:
    length = int.from_bytes(os.pread(fd, LENGTH, 0), "little")
    try:
        header = json.loads(os.pread(fd, min(length, os.fstat(fd).st_size), LENGTH))
        metadata: dict[str, str] = header.get("__metadata__", {})
    except (ValueError, AttributeError) as error:
        raise DamagedFileError(f"{path} has no header") from error
    return metadata
