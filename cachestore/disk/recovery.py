"""The start of the disk tier: the folder is locked, the index read, useless files are removed."""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from ...ownership import ForeignFolderError
from ..errors import DiskTierError
from ..record import Pin, Record
from .files import INDEX_FILES, Identity, claim, identity, is_temporary, own_files
from .index import DiskIndex, UnusableIndexError

log = structlog.get_logger()


@dataclass(frozen=True)
class Opened:
    """A folder ready for use. Its owner closes the index and `lock_fd`, which holds the lock."""

    folder: Path
    identity: Identity | None
    index: DiskIndex
    lock_fd: int
    records: list[Record]
    pins: list[Pin]
    collected: Counter[str]


def open_folder(folder: Path, fingerprint: str) -> Opened:
    """Lock a folder, open its index, and remove files of no use to this model.

    `collected` counts them, and their bytes as "nbytes":

    - temporaries: files that were never finished;
    - orphans: files without a row: one after a kill between rename and insertion, all after the
      index was damaged or of an older format;
    - rows: of another fingerprint, or without a file of their size.

    Raises:
        FolderInUseError: another tier holds it.
        DiskTierError: it cannot be used.
    """
    try:
        lock_fd = claim(folder)
        try:
            return _open_locked(folder, fingerprint, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise
    except (OSError, MemoryError, sqlite3.Error, UnusableIndexError) as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: Exception) -> DiskTierError:
    """Explain why a folder cannot be used, and what to do."""
    if isinstance(error, ForeignFolderError):
        return DiskTierError(
            f"the cache folder {folder} is not used: {error}; choose another one, or a new one "
            "with mode 0700"
        )
    return DiskTierError(
        f"the cache folder {folder} cannot be used: {reason_of(error)}; make it writable "
        "for this user, free space on its disk, or choose another one"
    )


def reason_of(error: Exception) -> str:
    """Text of an error without its number."""
    if isinstance(error, OSError):
        said = error.strerror or str(error)
        return f"{said} ({error.filename})" if error.filename else said
    return str(error) or type(error).__name__


_Contents = tuple[DiskIndex, list[Record], list[Record], list[Pin]]  # own records, and others


def _open_locked(folder: Path, fingerprint: str, lock_fd: int) -> Opened:
    try:
        index, own, others, pins = _read_index(folder, fingerprint)
    except UnusableIndexError as error:
        log.warning("the disk cache starts empty", folder=str(folder), reason=str(error))
        for name in INDEX_FILES:
            (folder / name).unlink(missing_ok=True)
        index, own, others, pins = _read_index(folder, fingerprint)
    try:
        records, collected = _collect(index, own, others, folder)
        return Opened(folder, identity(folder), index, lock_fd, records, pins, collected)
    except BaseException:
        index.close()
        raise


def _read_index(folder: Path, fingerprint: str) -> _Contents:
    index = DiskIndex(folder, fingerprint)
    try:
        return index, index.records(), index.records(others=True), index.pins()
    except BaseException:
        index.close()
        raise


def _collect(
    index: DiskIndex, own: list[Record], others: list[Record], folder: Path
) -> tuple[list[Record], Counter[str]]:
    """Remove useless files and rows; return the records left, ascending by start, and the count."""
    files = dict(own_files(folder))
    sound = {r.id for r in own if files.get(r.name, -1) in (None, r.nbytes)}  # None may be whole
    kept = [record for record in own if record.id in sound]
    dropped = [*others, *(record for record in own if record.id not in sound)]
    sizes = {name: size for name, size in files.items() if size is not None}
    rowless = sizes.keys() - {record.name for record in (*kept, *dropped)}
    counts = Counter("temporaries" if is_temporary(name) else "orphans" for name in rowless)
    # Those without a row first: that may free what the transaction needs on a full disk.
    counts["nbytes"] = _remove(folder, rowless, sizes)
    if dropped:
        index.remove(record.id for record in dropped)
    counts["rows"] = len(dropped)
    counts["nbytes"] += _remove(folder, (record.name for record in dropped), sizes)
    return kept, counts


def _remove(folder: Path, names: Iterable[str], sizes: dict[str, int]) -> int:
    found = [name for name in names if name in sizes]
    for name in found:
        (folder / name).unlink(missing_ok=True)
    return sum(sizes[name] for name in found)
