"""How computed state becomes part of a trie."""

from .node import Tokens, TrieNode, has_checkpoint
from .state import Checkpoint, Span
from .trie import RadixTrie


def insert(trie: RadixTrie, tokens: Tokens, start: int, span: Span | None) -> None:
    """Add what a trie lacks of some tokens. Takes ownership of `span`.

    Args:
        trie: where.
        tokens: all of a path.
        start: offset of the span's first token; a node starts there, or one is appended.
        span: the state of `tokens[start:]`, if the stack has such.
    """
    node, known = trie.match(tokens)
    if known == len(tokens):
        if span is not None and known < node.end and node.span is None:
            node = trie.split(node, known)
        _revive(trie, node, start, span)
        return
    if known < node.end:
        node = trie.split(node, known)
    span = _revive(trie, node, start, span)
    trie.append(node, tokens[known:].copy(), span)


def attach(trie: RadixTrie, tokens: Tokens, checkpoint: Checkpoint, tick: int) -> None:
    """Put a checkpoint where it belongs, if the trie reaches that far. Takes ownership.

    Args:
        trie: where.
        tokens: of a path; the checkpoint's offset lies on it.
        checkpoint: the whole state there.
        tick: its recency.
    """
    node, known = trie.match(tokens[: checkpoint.offset])
    if not 0 < checkpoint.offset == known:
        checkpoint.close()
        return
    if known < node.end:
        node = trie.split(node, known)
    trie.touch_checkpoint(node, tick)
    trie.set_checkpoint(node, checkpoint)


def node_at(trie: RadixTrie, node: TrieNode, offset: int) -> TrieNode:
    """Make an offset on the path of a node the end of one; return that."""
    while node.start >= offset and node.parent is not None:
        node = node.parent
    return trie.split(node, offset) if node.end > offset else node


def compact(trie: RadixTrie, node: TrieNode, longest: int) -> None:
    """Join small neighbours without siblings, so that paths stay short.

    A node joins its parent when that is at most twice its size: sizes then grow
    geometrically and a token is copied O(log n) times, not once a turn. Both are in
    memory then: the leaf was just used, and its parents are where it is.

    Args:
        trie: where.
        node: a leaf.
        longest: tokens that a joined node may have: what is joined is copied.
    """
    parent = node.parent
    while (
        parent is not None
        and parent.parent is not None
        and len(parent.children) == 1
        and not has_checkpoint(parent)
        and (parent.span is None) == (node.span is None)
        and not parent.ref_count  # so neither is the node: a lease lies on all of its path
        and len(parent.tokens) <= 2 * len(node.tokens)
        and len(parent.tokens) + len(node.tokens) <= longest
    ):
        node = trie.merge(parent)
        parent = node.parent


def _revive(trie: RadixTrie, node: TrieNode, start: int, span: Span | None) -> Span | None:
    """Give nodes that are on disk only what was computed again; return what is left.

    Args:
        trie: where.
        node: the last one whose tokens `span` may have.
        start: offset of the span's first token; a node starts there, or later.
        span: its last tokens, after the node's, are left.
    """
    for had in node.path():
        if span is None or had.end <= start:
            continue
        own, rest = span, None
        if span.length > had.end - start:
            own, rest = span.split(had.end - start)
        if had.span is None:
            trie.set_span(had, own)
        else:
            own.close()
        start, span = had.end, rest
    return span
