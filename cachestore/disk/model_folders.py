"""State of many models below one root: a folder `<name>-<fingerprint>` for each, in one budget.

The fingerprint identifies the model; the name is for people, and follows a model that gets another
one. Folders of models that are not loaded lose files only where all together exceed the budget.

Older releases kept the default model's files in the root itself, and those of others in
`models/<name>`: these move into folders at the start.
"""

import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import structlog

from ..errors import DiskTierError
from ..record import TOKEN_BYTES, Paths, Pin, Record, hasher
from .files import INDEX, INDEX_FILES, LOCK, claim, own_files
from .index import DiskIndex, UnusableIndexError
from .recovery import Opened, open_folder, reason_of, unusable

_DEFAULT_SHARE = 4  # of what is free on disk, one part in this many
_NAME = 100  # characters of a model's name in its folder's: a name may have 255 bytes
_FOLDER = re.compile(r"(.+)-([0-9a-f]{32})")
_AT_ONCE = 64  # files in one transaction; a load that wants the folder waits for one at most
_TRIM_ENDS = 10.0  # seconds for which a load waits until its folder is no longer trimmed

log = structlog.get_logger()


class StoredModel(NamedTuple):
    """A model's state on disk, under the name last served; last use in seconds since 1970."""

    name: str
    fingerprint: str
    folder: Path
    nbytes: int
    used: float


def stored_models(root: Path) -> list[StoredModel]:
    """Models with state below a root, the last used first; unreadable folders count as empty."""
    with suppress(OSError):
        found = filter(None, map(_described, root.iterdir()))
        return sorted(found, key=lambda each: -each.used)
    return []


def _described(folder: Path) -> StoredModel | None:
    parts = _FOLDER.fullmatch(folder.name)
    if parts is None or not folder.is_dir():
        return None
    nbytes, used = 0, 0.0
    with suppress(OSError):
        nbytes = sum(size or 0 for _, size in own_files(folder))
        used = (folder / INDEX).stat().st_mtime
    return StoredModel(unquote(parts[1]), parts[2], folder, nbytes, used)


class ModelFolders:
    """Folders of all models, for one daemon, which locks the root. Any thread may call.

    `names` are of the configured models. Without a budget the files may take a quarter of the space
    that is free or theirs.

    Raises:
        FolderInUseError: another daemon has the root.
        DiskTierError: the root cannot be used.
    """

    def __init__(self, root: Path, names: Collection[str], budget: int | None = None) -> None:
        self.root = root.absolute()
        self._own = {_quoted(name) for name in names}
        self._condition = threading.Condition()  # guards all that follows
        self._taken: set[Path] = set()
        self._resting: dict[Path, StoredModel] = {}
        self._trimming: Path | None = None
        self._trimmer: threading.Thread | None = None
        self._closed = False
        try:
            self._lock_fd = claim(self.root)
            try:
                move_old_layout(self.root)
                self._resting = {each.folder: each for each in stored_models(self.root)}
                free = shutil.disk_usage(self.root).free
            except BaseException:
                os.close(self._lock_fd)
                raise
        except OSError as error:
            raise unusable(root, error) from error
        self.budget = (free + self.resting_bytes) // _DEFAULT_SHARE if budget is None else budget

    @property
    def resting(self) -> list[StoredModel]:
        """Models that are not loaded and have state, the last used first."""
        with self._condition:
            return sorted(self._resting.values(), key=lambda each: -each.used)

    @property
    def resting_bytes(self) -> int:
        """Bytes of their files."""
        with self._condition:
            return sum(each.nbytes for each in self._resting.values())

    def take(self, name: str, fingerprint: str) -> Path:
        """Choose the folder of a model that is being loaded; nothing is trimmed there meanwhile.

        A folder that another name has used is renamed, unless a configured model has that name.
        """
        own = self.root / f"{_quoted(name)}-{fingerprint}"
        with self._condition:
            found = own if own in self._resting else self._of_another_name(fingerprint) or own
            self._taken.add(found)
            self._resting.pop(found, None)
            if not self._condition.wait_for(lambda: self._trimming != found, _TRIM_ENDS):
                self._taken.discard(found)
                raise DiskTierError(f"{found} is still being trimmed")
            if found != own:
                self._taken.discard(found)
                try:
                    found.rename(own)
                except OSError as error:
                    log.warning("state on disk keeps its old name", reason=reason_of(error))
                    own = found
            self._taken.add(own)
        return own

    def _of_another_name(self, fingerprint: str) -> Path | None:
        found = (each for each in self._resting.values() if each.fingerprint == fingerprint)
        others = [each for each in found if _quoted(each.name) not in self._own]
        return max(others, key=lambda each: each.used).folder if others else None

    def give_back(self, folder: Path) -> None:
        """Let a folder rest, as its model is unloaded. Idempotent."""
        described = _described(folder)
        with self._condition:
            self._taken.discard(folder)
            if described is not None and not self._closed:
                self._resting[folder] = described

    def make_room(self, nbytes: int) -> bool:
        """Delete resting models' files in the background, oldest first; False if there are none."""
        with self._condition:
            if self._closed:
                return False
            if self._trimmer is not None and self._trimmer.is_alive():
                return True
            if not any(each.nbytes for each in self._resting.values()):
                return False
            self._trimmer = threading.Thread(
                target=self._trim, args=(nbytes,), name="umbel-disk-room", daemon=True
            )
            self._trimmer.start()
            return True

    def close(self) -> None:
        """Give the root up. Idempotent."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            trimmer = self._trimmer
        if trimmer is not None:
            trimmer.join(_TRIM_ENDS)
        os.close(self._lock_fd)

    def _trim(self, nbytes: int) -> None:
        for model in reversed(self.resting):
            with self._condition:
                if nbytes <= 0 or self._closed or model.folder not in self._resting:
                    continue
                self._trimming = model.folder
            left = None  # a folder that cannot be trimmed does not count any more
            try:
                if freed := trim(model.folder, model.fingerprint, nbytes, self._stops):
                    log.info("state of another model removed", model=model.name, bytes=freed)
                    nbytes -= freed
                left = _described(model.folder)
            except (DiskTierError, OSError) as error:
                log.warning("state of another model stays", model=model.name, reason=str(error))
            with self._condition:
                self._trimming = None
                if self._resting.pop(model.folder, None) is not None and left is not None:
                    self._resting[model.folder] = left
                self._condition.notify_all()

    def _stops(self) -> bool:
        with self._condition:
            return self._closed or self._trimming in self._taken


def _quoted(name: str) -> str:
    return quote(name, safe="")[:_NAME]


def trim(
    folder: Path, fingerprint: str, nbytes: int, stopped: Callable[[], bool] = lambda: False
) -> int:
    """Delete files until `nbytes` are free, in `removal_order`; return the bytes freed.

    A folder left with neither state nor pins is removed. Its time of last use stays. `stopped` is
    asked between transactions; True gives up.

    Raises:
        FolderInUseError: a tier has the folder.
        DiskTierError: it cannot be used.
    """
    used = None
    with suppress(OSError):
        status = (folder / INDEX).stat()
        used = status.st_atime_ns, status.st_mtime_ns
    opened = open_folder(folder, fingerprint)
    try:
        with closing(opened.index) as index:
            freed = opened.collected["nbytes"] + _delete(opened, nbytes, stopped)
            empty = not index.records() and not opened.pins
        with suppress(OSError):
            if empty:  # other things in the folder stay, and so does it then
                for name in (*INDEX_FILES, LOCK):
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()
            elif used is not None:
                os.utime(folder / INDEX, ns=used)
    finally:
        os.close(opened.lock_fd)
    return freed


def _delete(opened: Opened, nbytes: int, stopped: Callable[[], bool]) -> int:
    order, freed = removal_order(opened.records, opened.pins), 0
    while order and freed < nbytes and not stopped():
        some: list[Record] = []
        while order and freed < nbytes and len(some) < _AT_ONCE:
            some.append(order.pop(0))
            freed += some[-1].nbytes
        opened.index.remove(record.id for record in some)
        for record in some:
            (opened.folder / record.name).unlink(missing_ok=True)
    return freed


def removal_order(records: Iterable[Record], pins: Iterable[Pin]) -> list[Record]:
    """Order records, ascending by start, for removal: ends of paths and oldest first, pins last."""
    records = list(records)
    before = _parents(records)
    used = {record.id: record.used for record in records}
    pinned = {record.id for pin in pins for record in records if _is_on(record, pin)}
    for record in sorted(records, key=lambda each: (-each.start, -each.end)):
        if (parent := before.get(record.id)) is not None:
            used[parent] = max(used[parent], used[record.id])
            pinned |= {parent} if record.id in pinned else set()
    return sorted(
        records, key=lambda each: (each.id in pinned, used[each.id], -each.end, -each.start)
    )


def _parents(records: list[Record]) -> dict[int, int]:
    parents: dict[int, int] = {}
    paths = Paths[int](records)
    for record in records:
        if (found := paths.before(record)) is not None:
            parents[record.id] = found[0]
        if found is not None or not record.start:
            paths.reach(record, found[1] if found else hasher(), record.id)
    return parents


def _is_on(record: Record, pin: Pin) -> bool:
    start = TOKEN_BYTES * record.start
    if record.tenant != pin.tenant or start > len(pin.tokens):
        return False
    rest = pin.tokens[start : start + len(record.tokens)]
    if record.tokens and not (rest and record.tokens.startswith(rest)):
        return False
    hashed = hasher()
    hashed.update(pin.tokens[:start])
    digest: bytes = hashed.digest()
    return digest == record.prefix


_UNNAMED = "unnamed"  # older releases did not note the default model's name
_OTHERS = "models"


def move_old_layout(root: Path) -> None:
    """Move state of an older release into a folder of its model. The root is locked.

    State that cannot be moved stays; state with an unusable index is removed. Both are logged.
    """
    if (root / INDEX).exists():
        _move(root, root, _UNNAMED)
    with suppress(OSError):
        for folder in list((root / _OTHERS).iterdir()):
            if (folder / INDEX).exists():
                _move(folder, root, folder.name)
        (root / _OTHERS).rmdir()


def _move(folder: Path, root: Path, name: str) -> None:
    # The index moves last, so that a move that is cut short is done again.
    files, lock_fd = dict(own_files(folder)), None
    told = log.bind(folder=str(folder), bytes=sum(size or 0 for size in files.values()))
    try:
        lock_fd = None if folder == root else claim(folder)
        with closing(DiskIndex(folder, "")) as index:
            fingerprint = index.largest_model()
        if fingerprint is None:
            _remove(folder)
            return
        target = _free(root, name, fingerprint)
        target.mkdir(mode=0o700, exist_ok=True)
        for file in chain(files, reversed(INDEX_FILES)):
            with suppress(FileNotFoundError):
                (folder / file).rename(target / file)
        told.info("state of an older umbel moved", folder=str(target))
    except UnusableIndexError as error:
        if files:
            _remove(folder)
            told.warning("state of an older umbel is removed", reason=str(error))
        else:
            told.warning("an index that is not umbel's stays", reason=str(error))
    except (DiskTierError, sqlite3.Error, OSError) as error:
        told.warning("state of an older umbel stays", reason=str(error))
    finally:
        if lock_fd is not None:
            if not (folder / INDEX).exists():
                (folder / LOCK).unlink()
                folder.rmdir()
            os.close(lock_fd)


def _free(root: Path, name: str, fingerprint: str) -> Path:
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    folders = (root / f"{each}-{fingerprint}" for each in names)
    return next(folder for folder in folders if not (folder / INDEX).exists())


def _remove(folder: Path) -> None:
    for file in chain(dict(own_files(folder)), INDEX_FILES):
        (folder / file).unlink(missing_ok=True)
