"""Takes the state that was used longest ago from a folder whose model is not loaded."""

import os
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path

from ..record import TOKEN_BYTES, Paths, Pin, Record, hasher
from .files import INDEX, INDEX_FILES, LOCK
from .recovery import Opened, open_folder

_AT_ONCE = 64  # files in one transaction; a load that wants the folder waits for one at most


def trim(
    folder: Path, fingerprint: str, nbytes: int, stopped: Callable[[], bool] = lambda: False
) -> int:
    """Delete files until `nbytes` are free, in `removal_order`; return the bytes freed.

    A folder left with neither state nor pins is removed. The time of the folder's last use stays as
    it was. `stopped` is asked between transactions; True gives up.

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
    """Order a model's records so that each goes after all that need it: oldest first, pinned last.

    A record was used when the last of those that go on from it was. `records` ascend by start.
    """
    records = list(records)
    before = _parents(records)
    used = {record.id: record.used for record in records}
    pinned = {record.id for pin in pins for record in records if _is_on(record, pin)}
    for record in sorted(records, key=lambda each: (-each.start, -each.end)):
        if (parent := before.get(record.id)) is not None:
            used[parent] = max(used[parent], used[record.id])
            pinned |= {parent} if record.id in pinned else set()
    return sorted(
        records,
        key=lambda each: (each.id in pinned, used[each.id], -each.end, -each.start),
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
