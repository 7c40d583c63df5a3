"""A compressed radix trie over token ids whose nodes own model state.

Invariants, asserted by `check.problems` and by the tests after every operation:

1. A node's edge holds at least one token; the root's holds none. A node starts where its
   parent ends.
2. Siblings never share a first token.
3. A span is exactly as long as its node's edge. Where spans are kept at all, every node has
   one or is wholly on disk: the state of a path has no holes. What is in memory has its
   parent in memory, and what is on disk, even in part, has its parent wholly there.
4. A checkpoint's offset is its node's end, in memory and on disk.
5. A node is pinned as often as open leases lie on it, so its parent is pinned at least as
   often as all its children together.
6. The ledger's accounts are the sums over the nodes, and so are the counts of file uses.
7. A leaf holds state or is pinned: tokens that lead to nothing are forgotten.

Pure data: no clock (recency is a counter that the owner passes in), no MLX.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .extents import Extent, FileUse, cut, join
from .ledger import Kind, Ledger
from .node import Tokens, TrieNode, common_length, has_checkpoint, size_of
from .record import Record
from .state import Checkpoint, Span


class Match(NamedTuple):
    """How far a prompt is known.

    Attributes:
        node: the deepest node that was entered; the root if none was.
        length: tokens recognised; inside `node`'s edge or at its end.
    """

    node: TrieNode
    length: int


class RadixTrie:
    """The trie of one namespace. One owner at a time; not thread-safe.

    Attributes:
        root: has no tokens, no state, and is never removed.
        spans: the account of all spans.
        checkpoints: the account of all checkpoints.
        files: who refers to which file.
        dirty: nodes with state that the disk may lack, oldest first.
        splits: how often an edge was cut; what reads spans must then ask for them anew.

    Args:
        ledger: where state is entered.
        files: shared with the tries of other namespaces.
    """

    def __init__(self, ledger: Ledger | None = None, files: FileUse | None = None) -> None:
        ledger = Ledger() if ledger is None else ledger
        self.root = TrieNode(np.empty(0, np.int32), 0, None)
        self.spans = ledger.account(Kind.KV)
        self.checkpoints = ledger.account(Kind.CHECKPOINT)
        self.files = FileUse() if files is None else files
        self.dirty: dict[TrieNode, None] = {}
        self.splits = 0

    @property
    def span_bytes(self) -> int:
        """Bytes of all spans."""
        return self.spans.size.nbytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return self.checkpoints.size.nbytes

    def match(self, tokens: Tokens) -> Match:
        """Follow a prompt as far as it is known, also into the middle of an edge.

        Costs one vectorised comparison an edge. Siblings differ in their first token, so
        there is one candidate at most: the full edge and the longest partial one are the
        same.
        """
        node, length = self.root, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            common = common_length(child.tokens, tokens[length:])
            node, length = child, length + common
            if common < len(child.tokens):
                break
        return Match(node, length)

    def append(self, parent: TrieNode, tokens: Tokens, span: Span | None) -> TrieNode:
        """Hang a new edge below `parent`. Takes ownership of `span`.

        Raises:
            ValueError: the edge is empty, or a sibling starts with the same token.
        """
        if not len(tokens) or int(tokens[0]) in parent.children:
            raise ValueError("an edge must differ from its siblings in its first token")
        node = TrieNode(tokens, parent.end, parent)
        parent.children[int(tokens[0])] = node
        if span is not None:
            self.set_span(node, span)
        return node

    def set_span(self, node: TrieNode, span: Span) -> None:
        """Give a node without one its span. Takes ownership."""
        node.span = span
        self.spans.add(size_of(span))
        if node.persisted_end < node.end:
            self.dirty[node] = None

    def split(self, node: TrieNode, offset: int) -> TrieNode:
        """Cut an edge at an absolute offset inside it; return the new upper node.

        The lower one stays the same object and keeps the checkpoint, so that leases that
        end in it stay valid; those leases lie on the upper one too.

        Raises:
            ValueError: the offset is not inside the edge.
        """
        self.splits += 1
        at = offset - node.start
        if not 0 < at < len(node.tokens):
            raise ValueError(f"{offset} is not inside the edge [{node.start}, {node.end})")
        parent = _parent(node)
        upper = TrieNode(node.tokens[:at].copy(), node.start, parent, pins=node.pins)
        upper.last_used = node.last_used
        upper.writers = dict(node.writers)
        if node.span is not None:
            before = size_of(node.span)
            self._give_up(node, node.span)
            upper.span, node.span = node.span.split(at)
            self.spans.add(size_of(upper.span) + size_of(node.span) - before)
        upper.extents, node.extents = cut(node.extents, offset)
        if upper.extents and node.extents and upper.extents[-1].record is node.extents[0].record:
            self.files.hold([node.extents[0].record])
        if node in self.dirty and upper.persisted_end < upper.end:
            del self.dirty[node]  # what comes first is written first
            self.dirty.update({upper: None, node: None})
        upper.children[int(node.tokens[at])] = node
        parent.children[int(node.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[at:].copy(), offset, upper
        return upper

    def merge(self, node: TrieNode) -> TrieNode:
        """Join a node with its only child; return the joined node, which is the child.

        Raises:
            ValueError: it is the root or has several children, or one of the two is pinned,
                or it has a checkpoint, whose place would be lost, or one of the two is in
                memory and the other is not.
        """
        parent, (child,) = _parent(node), node.children.values()
        if (
            node.pins
            or child.pins
            or has_checkpoint(node)
            or (node.span is None) != (child.span is None)
        ):
            raise ValueError("what is pinned or has a checkpoint is not merged away")
        if node.span is not None and child.span is not None:
            before = size_of(node.span) + size_of(child.span)
            self._give_up(node, node.span)
            self._give_up(child, child.span)
            child.span, node.span = node.span.merge(child.span), None
            self.spans.add(size_of(child.span) - before)
        child.extents, twice = join(node.extents, child.extents)
        self.files.drop(twice)
        child.writers |= node.writers
        if self.dirty.pop(node, self) is not self:
            self.dirty[child] = None
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.start, child.parent = node.start, parent
        parent.children[int(child.tokens[0])] = child
        child.last_used = max(child.last_used, node.last_used)
        return child

    def shorten(self, leaf: TrieNode, end: int) -> None:
        """Forget a leaf's tokens from the absolute offset `end` on, and their state.

        With `end` at its start the leaf itself goes.

        Raises:
            ValueError: it is the root, is pinned or is not a leaf, or `end` is not on its edge.
        """
        parent = _parent(leaf)
        if leaf.children or leaf.pins or not leaf.start <= end < leaf.end:
            raise ValueError("only a leaf that nobody holds is shortened, and only on its edge")
        self.drop_checkpoint(leaf)
        self.drop_persisted_checkpoint(leaf)
        self.drop_extents(leaf, end)
        if end > leaf.start:
            if leaf.span is not None:
                before = size_of(leaf.span)
                self._give_up(leaf, leaf.span)
                leaf.span = leaf.span.first(end - leaf.start)
                self.spans.add(size_of(leaf.span) - before)
            leaf.tokens = leaf.tokens[: end - leaf.start].copy()
            return
        self._close_span(leaf)
        self.dirty.pop(leaf, None)
        del parent.children[int(leaf.tokens[0])]

    def page_out(self, node: TrieNode) -> None:
        """Leave the state of a node's tokens to the disk.

        Raises:
            ValueError: it is pinned, or has no state in memory, or not all of it is on disk.
        """
        if node.pins or node.span is None or node.persisted_end < node.end:
            raise ValueError("what is pinned, or not on disk, or not there, is not paged out")
        self._close_span(node)
        if node.checkpoint is None or node.persisted_checkpoint is not None:
            self.dirty.pop(node, None)

    def forget(self, node: TrieNode) -> None:
        """Forget a node and all that goes on from it.

        Raises:
            ValueError: it is the root, or somebody holds it.
        """
        parent = _parent(node)
        if node.pins:
            raise ValueError("what somebody holds is not forgotten")
        below, pending = [], [node]
        while pending:  # paths may be deeper than Python's stack
            below.append(pending.pop())
            pending.extend(below[-1].children.values())
        for gone in reversed(below):
            self.shorten(gone, gone.start)
        self.prune(parent)

    @staticmethod
    def _give_up(node: TrieNode, state: Span | Checkpoint) -> None:
        for writer in node.writers:
            writer.left(state)

    def _close_span(self, node: TrieNode) -> None:
        if node.span is not None:
            self._give_up(node, node.span)
            self.spans.add(-size_of(node.span))
            node.span.close()
            node.span = None

    def prune(self, node: TrieNode) -> TrieNode:
        """Forget an empty node, then what that empties above it; return what stays."""
        while node.parent is not None and node.empty:
            self.shorten(node, node.start)
            node = node.parent
        return node

    def set_checkpoint(self, node: TrieNode, checkpoint: Checkpoint) -> None:
        """Put a checkpoint at a node's end. Takes ownership; an older one there stays."""
        if node.checkpoint is not None:
            checkpoint.close()
            return
        node.checkpoint = checkpoint
        self.checkpoints.add(size_of(checkpoint))
        if node.persisted_checkpoint is None:
            self.dirty[node] = None

    def drop_checkpoint(self, node: TrieNode) -> None:
        """Close a node's checkpoint in memory, if it has one."""
        if node.checkpoint is not None:
            self._give_up(node, node.checkpoint)
            self.checkpoints.add(-size_of(node.checkpoint))
            node.checkpoint.close()
            node.checkpoint = None

    def add_extent(self, node: TrieNode, extent: Extent) -> None:
        """Note that the disk has more of a node's tokens.

        Raises:
            ValueError: it would leave a gap, or reaches beyond the edge.
        """
        if extent.start != node.persisted_end or not extent.start < extent.stop <= node.end:
            raise ValueError("the disk has a node's tokens from the first on, without gaps")
        self.files.hold([extent.record])
        node.extents.append(extent)

    def drop_extents(self, node: TrieNode, offset: int) -> None:
        """Note that the disk has none of a node's tokens from an offset on."""
        kept, gone = cut(node.extents, offset)
        across = bool(kept and gone and kept[-1].record is gone[0].record)
        self.files.drop([extent.record for extent in gone[across:]])
        node.extents = kept

    def set_persisted_checkpoint(self, node: TrieNode, record: Record) -> None:
        """Note that the disk has the whole state at a node's end."""
        self.drop_persisted_checkpoint(node)
        self.files.hold([record])
        node.persisted_checkpoint = record

    def drop_persisted_checkpoint(self, node: TrieNode) -> None:
        """Note that the disk has not, or no more."""
        if node.persisted_checkpoint is not None:
            self.files.drop([node.persisted_checkpoint])
            node.persisted_checkpoint = None

    def nodes(self) -> Iterator[TrieNode]:
        """All nodes but the root, parents before children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node


def _parent(node: TrieNode) -> TrieNode:
    if node.parent is None:
        raise ValueError("the root has no parent")
    return node.parent
