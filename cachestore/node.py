"""Node of the trie: one edge, and the state of its tokens in memory and on disk.

`trie` states the invariants. The trie and its `Persistence` alone change nodes; others read.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .ledger import Size
from .record import Record, RecordKind
from .spans import size_of
from .state import Checkpoint, Span

Tokens = NDArray[np.int32]


class Extent(NamedTuple):
    """Tokens `[start, stop)` of a path, in one file. Cuts and joins of edges change no offset."""

    record: Record
    start: int
    stop: int


class Writer(Protocol):
    """A write of a node's state to disk that is under way."""

    def left(self, checkpoint: Checkpoint) -> None:
        """The trie gives a checkpoint up; if it is being written, only the writer has it now."""


@dataclass(eq=False)
class TrieNode:
    """One edge of the trie, and the state of its tokens.

    `writers` are the writes under way, with the offset up to which each persists the tokens. Both
    parts of a cut node have them; a joined node has those of both.
    """

    tokens: Tokens  # of the edge that leads here
    start: int  # offset of the first of them
    parent: "TrieNode | None"
    span: Span | None = None  # their token-addressable state, if the stack has such layers
    checkpoint: Checkpoint | None = None  # whole state at `end`, if it is in memory
    extents: list[Extent] = field(default_factory=list)  # of its first tokens, without gaps
    persisted_checkpoint: Record | None = None  # file of the whole state at `end`
    writers: dict[Writer, int] = field(default_factory=dict)
    ref_count: int = 0  # leases on it and on nodes below it
    last_used: int = 0  # recency of the span; the checkpoint ages separately
    checkpoint_used: int = 0
    children: dict[int, "TrieNode"] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Offset after the last token of the edge."""
        return self.start + len(self.tokens)

    @property
    def persisted_end(self) -> int:
        """Offset up to which the disk has its tokens."""
        return self.extents[-1].stop if self.extents else self.start

    @property
    def writing(self) -> bool:
        """True if its state, or its storage, is being written: it cannot be freed yet."""
        return bool(self.writers) or (self.span is not None and self.span.storage.loan is not None)

    @property
    def tokens_persisted(self) -> bool:
        """True if the disk has the span, or there is none in memory."""
        return self.span is None or self.persisted_end == self.end

    @property
    def persisted(self) -> bool:
        """True if the disk has all of its state."""
        checkpoint = self.checkpoint is None or self.persisted_checkpoint is not None
        return self.tokens_persisted and checkpoint

    @property
    def persisted_soon(self) -> bool:
        """True if the disk has all of its tokens, or will when writes under way are done."""
        return max([self.persisted_end, *self.writers.values()]) >= self.end

    @property
    def paged_out(self) -> bool:
        """True if its tokens' state is on disk only."""
        return self.span is None and bool(self.extents)

    @property
    def empty(self) -> bool:
        """True if it has no state, no children and no leases."""
        has_state = self.span is not None or bool(self.extents) or has_checkpoint(self)
        return not (has_state or self.children or self.ref_count)

    def path(self) -> "list[TrieNode]":
        """The nodes from below the root down to this one."""
        nodes: list[TrieNode] = []
        node: TrieNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Match(NamedTuple):
    """Deepest node entered (the root if none), and the tokens recognised, into its edge."""

    node: TrieNode
    length: int


def as_tokens(tokens: Any) -> Tokens:
    """Copy token ids into the trie's own form."""
    return np.array(tokens, np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the longest common beginning."""
    shortest = min(len(a), len(b))
    different = a[:shortest] != b[:shortest]
    first = int(different.argmax()) if shortest else 0
    return first if shortest and different[first] else shortest


def path_tokens(node: TrieNode) -> Tokens:
    """All tokens up to a node's end, those of the root included."""
    path = node.path()
    root = path[0].parent if path else node
    return np.concatenate([part.tokens for part in (root, *path) if part is not None])


def has_checkpoint(node: TrieNode) -> bool:
    """True if the whole state at a node's end is in memory or on disk: it must stay an end."""
    return node.checkpoint is not None or node.persisted_checkpoint is not None


def size_in_memory(node: TrieNode) -> Size:
    """Size of a node's state in memory."""
    return size_of(node.span, node.checkpoint)


@dataclass
class Totals:
    """Sums over a trie's nodes, except the root."""

    nodes: int = 0
    known_tokens: int = 0
    whole_states: int = 0  # checkpoints in memory
    stored_tokens: int = 0  # on disk
    held_bytes: int = 0  # in memory, and retained


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
