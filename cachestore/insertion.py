"""How computed state becomes part of a trie."""

from .node import Tokens, TrieNode
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
    if not trie.root.end < checkpoint.offset == known:
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


def _revive(trie: RadixTrie, node: TrieNode, start: int, span: Span | None) -> Span | None:
    """Give nodes that are on disk only what was computed again; return what is left.

    Args:
        trie: where.
        node: the last one whose tokens `span` may have.
        start: offset of the span's first token; a node starts there, or later.
        span: its last tokens, after the node's, are left.
    """
    path = [had for had in node.path() if had.end > start]
    known = [had.end for had in path if had.span is not None]  # these come first
    if known:
        span, start = _without(span, known[-1] - start), known[-1]
    for had in path[len(known) :]:
        if span is None:
            break
        own, rest = span, None
        if span.length > had.end - start:
            own, rest = span.split(had.end - start)
        trie.set_span(had, own)
        start, span = had.end, rest
    return span


def _without(span: Span | None, count: int) -> Span | None:
    """Close a span's first tokens; return what is left of it."""
    if span is None:
        return None
    gone, left = span, None
    if span.length > count:
        gone, left = span.split(count)
    gone.close()
    return left
