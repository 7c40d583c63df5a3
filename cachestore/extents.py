"""Which tokens of a node's edge the disk has, and in which files. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .record import Record, RecordKind


class Extent(NamedTuple):
    """Tokens `[start, stop)` of a path, in one file.

    Offsets are absolute, so that cutting and joining edges leaves them as they are.
    """

    record: Record
    start: int
    stop: int


class FileUse:
    """Counts references to files, so that a file without any can be deleted."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.by_kind = {"kv": 0, "checkpoint": 0}
        self.by_tenant = Counter[str]()
        self._counts: Counter[int] = Counter()
        self._unused: dict[int, Record] = {}

    def hold(self, records: Iterable[Record]) -> None:
        """Refer to files once more."""
        for record in records:
            if not self._counts[record.id]:
                self._count(record, record.nbytes)
                self._unused.pop(record.id, None)
            self._counts[record.id] += 1

    def drop(self, records: Iterable[Record]) -> None:
        """Refer to files once less."""
        for record in records:
            self._counts[record.id] -= 1
            if not self._counts[record.id]:
                del self._counts[record.id]
                self._count(record, -record.nbytes)
                self._unused[record.id] = record

    def _count(self, record: Record, nbytes: int) -> None:
        self.nbytes += nbytes
        self.by_kind["kv" if record.kind is RecordKind.SPAN else "checkpoint"] += nbytes
        self.by_tenant[record.tenant] += nbytes
        if not self.by_tenant[record.tenant]:
            del self.by_tenant[record.tenant]

    def unused(self) -> list[Record]:
        """Take the files that nobody refers to any more."""
        taken, self._unused = list(self._unused.values()), {}
        return taken

    def counts(self) -> Counter[int]:
        """How many refer to each file, by its record's id."""
        return self._counts

    def __len__(self) -> int:
        """How many files are referred to."""
        return len(self._counts)


def cut(extents: Iterable[Extent], offset: int) -> tuple[list[Extent], list[Extent]]:
    """Divide extents at an offset; one that lies across it is in both parts."""
    before = [p._replace(stop=min(p.stop, offset)) for p in extents if p.start < offset]
    after = [p._replace(start=max(p.start, offset)) for p in extents if p.stop > offset]
    return before, after


def join(before: list[Extent], after: list[Extent]) -> tuple[list[Extent], list[Record]]:
    """Join the extents of neighbours, the reverse of `cut`.

    The second result is a record that was in both parts, to be dropped once.
    """
    if not (before and after and before[-1].record is after[0].record):
        return before + after, []
    across = before[-1]._replace(stop=after[0].stop)
    return [*before[:-1], across, *after[1:]], [across.record]
