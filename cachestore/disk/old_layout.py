"""Moves state of an older umbel, which kept it elsewhere below the root, into models' folders.

The default model's files were in the root itself, those of others in `models/<name>`.
"""

import os
import sqlite3
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import structlog

from ..errors import DiskTierError, FolderInUseError
from .files import INDEX, INDEX_FILES, LOCK, claim, own_files
from .index import DiskIndex, UnusableIndexError

_UNNAMED = "unnamed"  # the older umbel did not note what the default model is called
_OTHERS = "models"

log = structlog.get_logger()


def move_old_layout(root: Path) -> None:
    """Give state that an older umbel left a folder of its model. The root is locked.

    State that cannot be moved stays where it is, and one whose index is of no use is removed;
    the log says so, and how many bytes that are.
    """
    if (root / INDEX).exists():
        _move(root, root, _UNNAMED)
    with suppress(OSError):
        for folder in list((root / _OTHERS).iterdir()):
            _move_other(folder, root)
        (root / _OTHERS).rmdir()


def _move_other(folder: Path, root: Path) -> None:
    if not (folder / INDEX).exists():
        return
    try:
        lock_fd = claim(folder)
    except (OSError, FolderInUseError) as error:
        log.warning("state of an older umbel stays", folder=str(folder), reason=str(error))
        return
    try:
        _move(folder, root, folder.name)
        if not (folder / INDEX).exists():
            (folder / LOCK).unlink()
            folder.rmdir()
    finally:
        os.close(lock_fd)


def _move(folder: Path, root: Path, name: str) -> None:
    """Move one model's state; the index last, so that a start that is cut short is done again."""
    nbytes = sum(size or 0 for _, size in own_files(folder))
    try:
        fingerprint = _fingerprint(folder)
    except UnusableIndexError as error:
        if not any(True for _ in own_files(folder)):
            log.warning("an index that is not umbel's stays", folder=str(folder), reason=str(error))
            return
        _remove(folder)
        log.warning(
            "state of an older umbel is removed",
            folder=str(folder),
            bytes=nbytes,
            reason=str(error),
        )
        return
    except (DiskTierError, sqlite3.Error, OSError) as error:
        log.warning(
            "state of an older umbel stays", folder=str(folder), bytes=nbytes, reason=str(error)
        )
        return
    if fingerprint is None:
        _remove(folder)
        return
    target = _free(root, name, fingerprint)
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        for file in chain(dict(own_files(folder)), reversed(INDEX_FILES)):
            with suppress(FileNotFoundError):
                (folder / file).rename(target / file)
    except OSError as error:
        log.warning(
            "state of an older umbel stays", folder=str(folder), bytes=nbytes, reason=str(error)
        )
        return
    log.info("state of an older umbel moved", folder=str(target), bytes=nbytes)


def _fingerprint(folder: Path) -> str | None:
    """Whose state an index describes; None if it describes none."""
    index = DiskIndex(folder)
    try:
        return index.fingerprint()
    finally:
        index.close()


def _free(root: Path, name: str, fingerprint: str) -> Path:
    """Find a folder without an index."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    folders = (root / f"{each}-{fingerprint}" for each in names)
    return next(folder for folder in folders if not (folder / INDEX).exists())


def _remove(folder: Path) -> None:
    for file in chain(dict(own_files(folder)), INDEX_FILES):
        (folder / file).unlink(missing_ok=True)
