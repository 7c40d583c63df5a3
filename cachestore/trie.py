"""A compressed radix trie over token ids whose nodes own model state.

Invariants, asserted by `check.problems` and by the tests after every operation:

1. A node's edge holds at least one token. A node starts where its parent ends. The root's
   tokens are those of a shared prompt, whose state is in another trie; mostly there are none.
2. Siblings never share a first token.
3. A span is exactly as long as its node's edge. Where spans are kept at all, every node has
   one or is wholly on disk: the state of a path has no holes. What is in memory has its
   parent in memory, and what is on disk, even in part, has its parent wholly there.
4. A checkpoint's offset is its node's end, in memory and on disk.
5. A node is retained as often as open leases lie on it, so its parent is retained at least
   as often as all its children together.
6. The ledger's accounts are the sums over the nodes, and so are the counts of file uses and the
   trie's totals.
7. A leaf holds state or is retained: tokens that lead to nothing are forgotten.

The trie alone writes its nodes' fields, by itself and by its `Persistence`; a test sees to it.

Pure data: no clock (recency is a counter that the owner passes in), no MLX.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from .ledger import Kind, Ledger
from .node import (
    FileUse,
    Match,
    Persistence,
    Tokens,
    Totals,
    TrieNode,
    common_length,
    has_checkpoint,
    size_in_memory,
)
from .spans import Spans, size_of
from .state import Checkpoint, Span


class RadixTrie:
    """Trie of one namespace. Belongs to the MLX thread.

    Methods raise a ValueError for a node or offset that would break an invariant: a root, a
    retained node, an offset outside the edge. `splits` counts cuts of edges; readers of spans must
    then ask for them again.
    """

    def __init__(
        self, ledger: Ledger | None = None, files: FileUse | None = None, base: Tokens | None = None
    ) -> None:
        ledger = Ledger() if ledger is None else ledger
        self.root = TrieNode(np.empty(0, np.int32) if base is None else base, 0, None)
        self.spans = Spans(ledger.account(Kind.KV))
        self.checkpoints = ledger.account(Kind.CHECKPOINT)
        self.totals = Totals()
        self.persistence = Persistence(FileUse() if files is None else files, self.totals)
        self.splits = 0

    def match(self, tokens: Tokens) -> Match:
        """Follow a prompt as far as it is known, also into the middle of an edge."""
        node, length = self.root, common_length(self.root.tokens, tokens)
        while node.end <= length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            common = common_length(child.tokens, tokens[length:])
            node, length = child, length + common
        return Match(node, length)

    def append(self, parent: TrieNode, tokens: Tokens, span: Span | None) -> TrieNode:
        """Add an edge below `parent`. Takes ownership of `span`."""
        if not len(tokens) or int(tokens[0]) in parent.children:
            raise ValueError("an edge must differ from its siblings in its first token")
        node = TrieNode(tokens, parent.end, parent)
        parent.children[int(tokens[0])] = node
        self.totals.nodes += 1
        self.totals.known_tokens += len(tokens)
        if span is not None:
            self.set_span(node, span)
        return node

    def set_span(self, node: TrieNode, span: Span) -> None:
        """Give a node without one its span. Takes ownership."""
        node.span = span
        self.spans.add(span)
        if node.ref_count:
            self.totals.held_bytes += span.nbytes
        if node.persisted_end < node.end:
            self.persistence.mark_dirty(node)

    def split(self, node: TrieNode, offset: int) -> TrieNode:
        """Cut an edge at an absolute offset inside it; return the new upper node.

        The lower one stays the same object and keeps the checkpoint: leases that end in it stay
        valid, and lie on the upper one too.
        """
        self.splits += 1
        at = offset - node.start
        if not 0 < at < len(node.tokens):
            raise ValueError(f"{offset} is not inside the edge [{node.start}, {node.end})")
        parent = _parent(node)
        upper = TrieNode(node.tokens[:at].copy(), node.start, parent, ref_count=node.ref_count)
        upper.last_used = node.last_used
        if node.span is not None:
            upper.span, node.span = node.span.split(at)
        self.persistence.split(upper, node)
        self.totals.nodes += 1
        upper.children[int(node.tokens[at])] = node
        parent.children[int(node.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[at:].copy(), offset, upper
        return upper

    def merge(self, node: TrieNode) -> TrieNode:
        """Join a node, without a checkpoint, with its only child; return that child.

        Copies their spans unless they adjoin. Neither is retained; both are in memory, or neither.
        """
        parent, (child,) = _parent(node), node.children.values()
        differ = (node.span is None) != (child.span is None)
        if node.ref_count or child.ref_count or has_checkpoint(node) or differ:
            raise ValueError("a node that is retained or has a checkpoint is not merged")
        if node.span is not None and child.span is not None:
            child.span, node.span = self.spans.merge(node.span, child.span), None
        self.persistence.merge(node, child)
        self.totals.nodes -= 1
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.start, child.parent = node.start, parent
        parent.children[int(child.tokens[0])] = child
        child.last_used = max(child.last_used, node.last_used)
        return child

    def join(self, nodes: Sequence[TrieNode]) -> None:
        """Move the state of a path's consecutive nodes into one storage. Copies it."""
        spans = [node.span for node in nodes if node.span is not None and not node.ref_count]
        if len(spans) < len(nodes):
            raise ValueError("a node that is retained, or without a span, is not moved")
        self.spans.join(spans)

    def shorten(self, leaf: TrieNode, end: int) -> None:
        """Forget a leaf's tokens from `end` on, or all of it. Call `spans.trim` afterwards."""
        parent = _parent(leaf)
        if leaf.children or leaf.ref_count or not leaf.start <= end < leaf.end:
            raise ValueError("only a leaf without leases is shortened, and only on its edge")
        self.drop_checkpoint(leaf)
        self.persistence.drop_checkpoint(leaf)
        self.persistence.drop_extents(leaf, end)
        self.totals.known_tokens -= leaf.end - end
        if end > leaf.start:
            if leaf.span is not None:
                leaf.span, gone = leaf.span.split(end - leaf.start)
                self.spans.close(gone)
            leaf.tokens = leaf.tokens[: end - leaf.start].copy()
            return
        self._close_span(leaf)
        self.persistence.mark_clean(leaf)
        self.totals.nodes -= 1
        del parent.children[int(leaf.tokens[0])]

    def page_out(self, node: TrieNode) -> None:
        """Drop a node's state of tokens, all on disk, from memory. Call `spans.trim` afterwards."""
        if node.ref_count or node.span is None or node.persisted_end < node.end:
            raise ValueError("a node that is retained, or not on disk, is not paged out")
        self._close_span(node)
        if node.persisted:
            self.persistence.mark_clean(node)

    def forget(self, node: TrieNode) -> None:
        """Forget a node and all that goes on from it; none is retained."""
        parent = _parent(node)
        if node.ref_count:
            raise ValueError("a retained node is not forgotten")
        below, pending = [], [node]
        while pending:  # paths may be deeper than Python's stack
            below.append(pending.pop())
            pending.extend(below[-1].children.values())
        for gone in reversed(below):
            self.shorten(gone, gone.start)
        self.spans.trim()
        self.prune(parent)

    def _close_span(self, node: TrieNode) -> None:
        if node.span is not None:
            self.spans.close(node.span)
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
        self._count_checkpoint(node, checkpoint, 1)
        if node.persisted_checkpoint is None:
            self.persistence.mark_dirty(node)

    def drop_checkpoint(self, node: TrieNode) -> None:
        """Close a node's checkpoint in memory, if it has one."""
        if node.checkpoint is not None:
            for writer in node.writers:
                writer.left(node.checkpoint)
            self.checkpoints.add(-size_of(node.checkpoint))
            self._count_checkpoint(node, node.checkpoint, -1)
            node.checkpoint.close()
            node.checkpoint = None

    def _count_checkpoint(self, node: TrieNode, checkpoint: Checkpoint, count: int) -> None:
        self.totals.whole_states += count
        if node.ref_count:
            self.totals.held_bytes += count * checkpoint.nbytes

    def retain(self, node: TrieNode) -> None:
        """Hold a node and all above it: none of them is evicted, paged out or merged."""
        held: TrieNode | None = node
        while held is not None:
            if not held.ref_count:
                self.totals.held_bytes += size_in_memory(held).nbytes
            held.ref_count += 1
            held = held.parent

    def release(self, node: TrieNode) -> None:
        """Hold a node and all above it once less. Empty nodes stay until `prune`."""
        held: TrieNode | None = node
        while held is not None:
            held.ref_count -= 1
            if not held.ref_count:
                self.totals.held_bytes -= size_in_memory(held).nbytes
            held = held.parent

    @staticmethod
    def touch(node: TrieNode, tick: int) -> None:
        """Note that a node's span was used at a tick."""
        node.last_used = tick

    @staticmethod
    def touch_checkpoint(node: TrieNode, tick: int) -> None:
        """Note that a node's checkpoint was used at a tick, wherever it is."""
        node.checkpoint_used = tick

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


def insert(trie: RadixTrie, tokens: Tokens, start: int, span: Span | None) -> None:
    """Add missing tokens of a path, and `span`, the state from a node's `start` on. Owns it."""
    node, known = trie.match(tokens)
    if known == len(tokens):
        if span is not None and known < node.end and node.span is None:
            node = trie.split(node, known)
        _revive(trie, node, start, span)
        return
    node = node_at(trie, node, known)
    span = _revive(trie, node, start, span)
    trie.append(node, tokens[known:].copy(), span)


def attach(trie: RadixTrie, tokens: Tokens, checkpoint: Checkpoint, tick: int) -> None:
    """Put a checkpoint on a path, if the trie reaches its offset. Takes ownership."""
    node, known = trie.match(tokens[: checkpoint.offset])
    if not trie.root.end < checkpoint.offset == known:
        checkpoint.close()
        return
    node = node_at(trie, node, known)
    trie.touch_checkpoint(node, tick)
    trie.set_checkpoint(node, checkpoint)


def node_at(trie: RadixTrie, node: TrieNode, offset: int) -> TrieNode:
    """Make an offset on the path of a node the end of one; return that."""
    while node.start >= offset and node.parent is not None:
        node = node.parent
    return trie.split(node, offset) if node.end > offset else node


def _revive(trie: RadixTrie, node: TrieNode, start: int, span: Span | None) -> Span | None:
    """Give nodes up to `node` that are on disk only their recomputed state; return the rest."""
    path = [had for had in node.path() if had.end > start]
    known = [had.end for had in path if had.span is not None]  # these come first
    if known and span is not None:
        gone, span = _cut(span, known[-1] - start)
        gone.close()
        start = known[-1]
    for had in path[len(known) :]:
        if span is None:
            break
        own, span = _cut(span, had.end - start)
        trie.set_span(had, own)
        start = had.end
    return span


def _cut(span: Span, at: int) -> tuple[Span, Span | None]:
    return span.split(at) if span.length > at else (span, None)
