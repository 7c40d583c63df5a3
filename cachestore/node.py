"""Node of the trie: one edge, and the state of its tokens.

`trie` states the invariants. The trie and its `Persistence` alone change nodes; others read.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .ledger import Size
from .record import Record
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
