"""Joins a path's state into a few long segments, however many nodes the path has.

A *segment* is the state of consecutive nodes that lies side by side in one storage. Nodes stay as
they are, because checkpoints and other paths need their ends. A token is copied O(log n) times: it
only moves to a storage that is half as long again as the one it leaves, or to one of 256 tokens.
"""

from .node import TrieNode, has_checkpoint
from .trie import RadixTrie

_ALWAYS = 256  # tokens up to which neighbours are joined: copies are cheaper than segments


def compact(trie: RadixTrie, node: TrieNode, longest: int) -> None:
    """Join a path's end so that it is a few segments; copy at most `longest` tokens."""
    segments = _segments(node)
    highest = _highest(segments, longest)
    if highest:
        trie.join([part for segment in segments[highest::-1] for part in segment])
    _merge(trie, node, longest)


def _segments(node: TrieNode) -> list[list[TrieNode]]:
    """Segments of a path's end whose state may move, deepest first."""
    segments: list[list[TrieNode]] = []
    for part in reversed(node.path()):
        if part.ref_count or part.span is None:
            break
        if segments and _adjoin(part, segments[-1][0]):
            segments[-1].insert(0, part)
        else:
            segments.append([part])
    return segments


def _adjoin(node: TrieNode, child: TrieNode) -> bool:
    """True if the spans are neighbours in one storage, or neither node has one."""
    if node.span is None or child.span is None:
        return node.span is child.span
    return node.span.adjoins(child.span)


def _highest(segments: list[list[TrieNode]], longest: int) -> int:
    """Last segment to join with those before it: the highest not much longer than they are."""
    highest = joined = copied = 0
    for number, segment in enumerate(segments):
        span, below = segment[0].span, joined
        stored = 0 if span is None else span.storage.length
        # Of whole storages: else two paths would take their common part from one another for ever.
        joined += sum(len(node.tokens) for node in segment)
        copied += stored
        if copied > longest:
            break
        if 3 * stored <= 2 * joined or below + stored <= _ALWAYS:
            highest = number
    return highest


def _merge(trie: RadixTrie, node: TrieNode, longest: int) -> None:
    """Merge nodes that are neighbours in one storage, where no place or branch is lost."""
    parent = node.parent
    while parent is not None and parent.parent is not None:
        if (
            len(parent.children) == 1
            and not has_checkpoint(parent)
            and not parent.ref_count  # so neither is the node: a lease lies on all of its path
            and _adjoin(parent, node)
            and len(parent.tokens) + len(node.tokens) <= longest
        ):
            node = trie.merge(parent)
        else:
            node = parent
        parent = node.parent
