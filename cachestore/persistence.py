"""State of a trie's nodes that the disk has, that it lacks, and that is being written."""

from collections import Counter
from collections.abc import Iterable

from .node import Extent, Totals, TrieNode, Writer
from .record import Record, RecordKind


class FileUse:
    """Counts references to files, so that a file without any can be deleted."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.by_kind = {"kv": 0, "checkpoint": 0}
        self.by_tenant = Counter[str]()
        self.counts = Counter[int]()  # by record id
        self._unused: dict[int, Record] = {}

    def hold(self, records: Iterable[Record]) -> None:
        """Refer to files once more."""
        for record in records:
            if not self.counts[record.id]:
                self._count(record, record.nbytes)
                self._unused.pop(record.id, None)
            self.counts[record.id] += 1

    def drop(self, records: Iterable[Record]) -> None:
        """Refer to files once less."""
        for record in records:
            self.counts[record.id] -= 1
            if not self.counts[record.id]:
                del self.counts[record.id]
                self._count(record, -record.nbytes)
                self._unused[record.id] = record

    def _count(self, record: Record, nbytes: int) -> None:
        self.nbytes += nbytes
        self.by_kind["kv" if record.kind is RecordKind.SPAN else "checkpoint"] += nbytes
        self.by_tenant[record.tenant] += nbytes
        if not self.by_tenant[record.tenant]:
            del self.by_tenant[record.tenant]

    def unused(self) -> list[Record]:
        """Take the files without any reference."""
        taken, self._unused = list(self._unused.values()), {}
        return taken


class Persistence:
    """A trie's own part that knows of the disk. The trie keeps it true when its shape changes."""

    def __init__(self, files: FileUse, totals: Totals) -> None:
        self.files = files  # of all tries
        self._totals = totals
        self.dirty: dict[TrieNode, None] = {}  # nodes that the disk may lack, oldest first

    def mark_dirty(self, node: TrieNode) -> None:
        """Note that the disk may lack some of a node's state."""
        self.dirty[node] = None

    def mark_clean(self, node: TrieNode) -> None:
        """Note that nothing of a node is to be written."""
        self.dirty.pop(node, None)

    def postpone(self, node: TrieNode) -> None:
        """Move a dirty node behind all others."""
        if node in self.dirty:
            del self.dirty[node]
            self.dirty[node] = None

    @staticmethod
    def begin_write(node: TrieNode, writer: Writer, until: int) -> None:
        """Note that a node's state is being written; its tokens up to the offset `until`."""
        node.writers[writer] = until

    @staticmethod
    def end_write(node: TrieNode, writer: Writer) -> None:
        """Note that a writer is done with a node, if it had begun."""
        node.writers.pop(writer, None)

    def add_extent(self, node: TrieNode, extent: Extent) -> None:
        """Note that the disk has more of a node's tokens; a ValueError if it leaves a gap."""
        if extent.start != node.persisted_end or not extent.start < extent.stop <= node.end:
            raise ValueError("the disk has a node's tokens from the first on, without gaps")
        self.files.hold([extent.record])
        node.extents.append(extent)
        self._totals.stored_tokens += extent.stop - extent.start

    def drop_extents(self, node: TrieNode, offset: int) -> None:
        """Note that the disk has none of a node's tokens from an offset on."""
        kept, gone = cut(node.extents, offset)
        self.files.drop([extent.record for extent in gone[_in_one_file(kept, gone) :]])
        self._totals.stored_tokens -= sum(extent.stop - extent.start for extent in gone)
        node.extents = kept

    def set_checkpoint(self, node: TrieNode, record: Record) -> None:
        """Note that the disk has the whole state at a node's end."""
        self.drop_checkpoint(node)
        self.files.hold([record])
        node.persisted_checkpoint = record

    def drop_checkpoint(self, node: TrieNode) -> None:
        """Note that the disk lacks the whole state at a node's end."""
        if node.persisted_checkpoint is not None:
            self.files.drop([node.persisted_checkpoint])
            node.persisted_checkpoint = None

    def split(self, upper: TrieNode, lower: TrieNode) -> None:
        """Give a new upper node its part of what is known of the lower, which had it all."""
        upper.writers = dict(lower.writers)
        upper.extents, lower.extents = cut(lower.extents, upper.end)
        if _in_one_file(upper.extents, lower.extents):
            self.files.hold([lower.extents[0].record])
        if lower in self.dirty and upper.persisted_end < upper.end:
            del self.dirty[lower]  # what comes first is written first
            self.dirty.update({upper: None, lower: None})

    def merge(self, upper: TrieNode, lower: TrieNode) -> None:
        """Give the lower node what is known of the upper, which is about to go."""
        before, after = upper.extents, lower.extents
        if _in_one_file(before, after):
            self.files.drop([after[0].record])
            before = [*before[:-1], before[-1]._replace(stop=after[0].stop)]
            after = after[1:]
        lower.extents = before + after
        lower.writers |= upper.writers
        if upper in self.dirty:
            del self.dirty[upper]
            self.mark_dirty(lower)


def cut(extents: Iterable[Extent], offset: int) -> tuple[list[Extent], list[Extent]]:
    """Divide extents at an offset; one that lies across it is in both parts."""
    before = [p._replace(stop=min(p.stop, offset)) for p in extents if p.start < offset]
    after = [p._replace(start=max(p.start, offset)) for p in extents if p.stop > offset]
    return before, after


def _in_one_file(before: list[Extent], after: list[Extent]) -> bool:
    """True if the extents of neighbours meet within one file."""
    return bool(before and after) and before[-1].record is after[0].record
