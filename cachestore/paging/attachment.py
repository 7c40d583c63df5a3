"""Notes in a trie which of its state a new file has: the trie may have changed meanwhile."""

from ..extents import Extent
from ..node import Tokens, TrieNode
from ..record import Record, RecordKind
from ..trie import RadixTrie


def attach(trie: RadixTrie, path: Tokens, record: Record) -> None:
    """Note what a file has, as far as the trie still has it.

    Args:
        trie: whose state was written.
        path: tokens that lead to its end, from the trie's root on.
        record: of the file.
    """
    if record.kind is RecordKind.SPAN:
        _attach_span(trie, path, record)
    else:
        _attach_checkpoint(trie, path, record)


def _attach_span(trie: RadixTrie, path: Tokens, record: Record) -> None:
    """Note in the nodes that a file has their tokens; they may have been cut or joined."""
    deepest, known = trie.match(path)
    if known < len(path):
        return  # the rest was forgotten, and shall not come back with the file
    for node in deepest.path():
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.persisted_end < parent.end:
            return
        start, stop = node.persisted_end, min(node.end, known)
        if record.start <= start < stop:
            trie.persistence.add_extent(node, Extent(record, start, stop))


def _attach_checkpoint(trie: RadixTrie, path: Tokens, record: Record) -> None:
    node, known = trie.match(path)
    if known == len(path) == node.end and node.persisted_checkpoint is None and _on_disk(node):
        trie.persistence.set_checkpoint(node, record)


def _on_disk(node: TrieNode) -> bool:
    """Whether a node's tokens are on disk, if their state is kept at all."""
    return node.span is None or node.persisted_end == node.end
