"""Which tokens of a node's edge the disk has, and in which files. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .disk_index import Record


class Piece(NamedTuple):
    """Tokens `[start, stop)` of a path, in one file.

    Offsets are absolute, so that cutting and joining edges leaves them as they are.
    """

    record: Record
    start: int
    stop: int


class FileUse:
    """Counts who refers to a file, so that one that nobody refers to can be deleted.

    Attributes:
        nbytes: of the files that are referred to.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._counts: Counter[int] = Counter()
        self._unused: dict[int, Record] = {}

    def hold(self, records: Iterable[Record]) -> None:
        """Refer to files once more."""
        for record in records:
            if not self._counts[record.id]:
                self.nbytes += record.nbytes
                self._unused.pop(record.id, None)
            self._counts[record.id] += 1

    def drop(self, records: Iterable[Record]) -> None:
        """Refer to files once less."""
        for record in records:
            self._counts[record.id] -= 1
            if not self._counts[record.id]:
                del self._counts[record.id]
                self.nbytes -= record.nbytes
                self._unused[record.id] = record

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


def cut(pieces: Iterable[Piece], offset: int) -> tuple[list[Piece], list[Piece]]:
    """Divide pieces at an offset; one that lies across it is in both parts."""
    before = [p._replace(stop=min(p.stop, offset)) for p in pieces if p.start < offset]
    after = [p._replace(start=max(p.start, offset)) for p in pieces if p.stop > offset]
    return before, after
