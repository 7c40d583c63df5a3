"""A compressed radix trie over token ids whose nodes own model state.

Invariants, asserted by `check.problems` and by the tests after every operation:

1. A node's edge holds at least one token; the root's holds none. A node starts where its
   parent ends.
2. Siblings never share a first token.
3. A span is exactly as long as its node's edge. Where spans are kept at all, every node has
   one: the state of a path has no holes.
4. A checkpoint's offset is its node's end.
5. A node is pinned as often as open leases lie on it, so its parent is pinned at least as
   often as all its children together.
6. The byte counts are the sums over the nodes.
7. A leaf holds state or is pinned: tokens that lead to nothing are forgotten.

Pure data: no clock (recency is a counter that the owner passes in), no MLX.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .state import Checkpoint, Span

Tokens = NDArray[np.int32]


@dataclass(eq=False)
class TrieNode:
    """One edge of the trie, and the state of its tokens.

    Attributes:
        tokens: of the edge that leads here.
        start: offset of the first of them.
        span: their token-addressable state, if the stack has such layers.
        checkpoint: whole state at `end`, if one was taken there.
        pins: open leases on this node.
        last_used: recency of the span.
        checkpoint_used: recency of the checkpoint; the two age separately.
    """

    tokens: Tokens
    start: int
    parent: "TrieNode | None"
    span: Span | None = None
    checkpoint: Checkpoint | None = None
    pins: int = 0
    last_used: int = 0
    checkpoint_used: int = 0
    children: dict[int, "TrieNode"] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Offset after the last token of the edge."""
        return self.start + len(self.tokens)

    @property
    def bare(self) -> bool:
        """Whether it holds nothing, leads to nothing, and nobody holds it."""
        holds = self.span is not None or self.checkpoint is not None
        return not (holds or self.children or self.pins)

    def path(self) -> "list[TrieNode]":
        """The nodes from below the root down to this one."""
        nodes: list[TrieNode] = []
        node: TrieNode | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


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
        span_bytes: of all spans.
        checkpoint_bytes: of all checkpoints.
        splits: how often an edge was cut; what reads spans must then ask for them anew.
    """

    def __init__(self) -> None:
        self.root = TrieNode(np.empty(0, np.int32), 0, None)
        self.span_bytes = 0
        self.checkpoint_bytes = 0
        self.splits = 0

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
        node = TrieNode(tokens, parent.end, parent, span)
        parent.children[int(tokens[0])] = node
        self.span_bytes += _size(span)
        return node

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
        if node.span is not None:
            before = node.span.nbytes
            upper.span, node.span = node.span.split(at)
            self.span_bytes += upper.span.nbytes + node.span.nbytes - before
        upper.children[int(node.tokens[at])] = node
        parent.children[int(node.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[at:].copy(), offset, upper
        return upper

    def merge(self, node: TrieNode) -> TrieNode:
        """Join a node with its only child; return the joined node, which is the child.

        Raises:
            ValueError: it is the root or has several children, or one of the two is pinned,
                or it has a checkpoint, whose place would be lost.
        """
        parent, (child,) = _parent(node), node.children.values()
        if node.pins or child.pins or node.checkpoint is not None:
            raise ValueError("what is pinned or has a checkpoint is not merged away")
        if node.span is not None and child.span is not None:
            before = node.span.nbytes + child.span.nbytes
            child.span, node.span = node.span.merge(child.span), None
            self.span_bytes += child.span.nbytes - before
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
        if end > leaf.start:
            if leaf.span is not None:
                before = leaf.span.nbytes
                leaf.span, rest = leaf.span.split(end - leaf.start)
                rest.close()
                self.span_bytes += leaf.span.nbytes - before
            leaf.tokens = leaf.tokens[: end - leaf.start].copy()
            return
        if leaf.span is not None:
            self.span_bytes -= leaf.span.nbytes
            leaf.span.close()
            leaf.span = None
        del parent.children[int(leaf.tokens[0])]

    def prune(self, node: TrieNode) -> TrieNode:
        """Forget a node if it is bare, then what that bares above it; return what stays."""
        while node.parent is not None and node.bare:
            self.shorten(node, node.start)
            node = node.parent
        return node

    def set_checkpoint(self, node: TrieNode, checkpoint: Checkpoint) -> None:
        """Put a checkpoint at a node's end. Takes ownership; an older one there stays."""
        if node.checkpoint is not None:
            checkpoint.close()
            return
        node.checkpoint = checkpoint
        self.checkpoint_bytes += checkpoint.nbytes

    def drop_checkpoint(self, node: TrieNode) -> None:
        """Close a node's checkpoint, if it has one."""
        if node.checkpoint is not None:
            self.checkpoint_bytes -= node.checkpoint.nbytes
            node.checkpoint.close()
            node.checkpoint = None

    def nodes(self) -> Iterator[TrieNode]:
        """All nodes but the root, parents before children."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node


def as_tokens(tokens: Any) -> Tokens:
    """Copy token ids into the trie's own form."""
    return np.array(tokens, np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """Length of the longest common beginning."""
    shortest = min(len(a), len(b))
    different = a[:shortest] != b[:shortest]
    first = int(different.argmax()) if shortest else 0
    return first if shortest and different[first] else shortest


def _parent(node: TrieNode) -> TrieNode:
    if node.parent is None:
        raise ValueError("the root has no parent")
    return node.parent


def _size(span: Span | None) -> int:
    return 0 if span is None else span.nbytes
