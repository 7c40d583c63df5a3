"""Files of the disk tier: whether they are what was written.

Three answers, and no fourth: whole, damaged, or that it cannot be told at present. Only damage
costs a file. A process without descriptors, a disk that fails for a moment and a mode that was
changed say nothing of what a file holds.
"""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import xxhash

from ..errors import DamagedFileError, DiskTierError, UnreadableFileError
from .files import BLOCK, LENGTH


def verify_file(
    path: Path, nbytes: int, checksum: bytes, stopped: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """Read a file and compare it with what was written.

    Returns:
        Its metadata.

    Raises:
        DamagedFileError: it is missing, no plain file, or differs in size or checksum.
        UnreadableFileError: whether it is one of these cannot be told at present.
        DiskTierError: `stopped`, asked between blocks, said so.
    """
    try:
        return _compare(path, nbytes, checksum, stopped)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedFileError(f"{path} is missing") from error
    except MemoryError as error:
        raise UnreadableFileError(f"{path} cannot be read: out of memory") from error
    except OSError as error:
        if _is_something_else(path):
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
    """Read a file's metadata, of whose checksum it is known that it is right."""
    length = int.from_bytes(os.pread(fd, LENGTH, 0), "little")
    try:
        header = json.loads(os.pread(fd, min(length, os.fstat(fd).st_size), LENGTH))
        metadata: dict[str, str] = header.get("__metadata__", {})
    except (ValueError, AttributeError) as error:
        raise DamagedFileError(f"{path} has no header") from error
    return metadata


def _is_something_else(path: Path) -> bool:
    """Whether there is a link or the like in a file's place, so that the file is gone."""
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
