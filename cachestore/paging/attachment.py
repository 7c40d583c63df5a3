"""Notes in a trie which of its state a new file has: the trie may have changed meanwhile."""

from ..extents import Extent
from ..node import Tokens
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
    ends = known == len(path) == node.end
    if ends and node.persisted_checkpoint is None and node.tokens_persisted:
        trie.persistence.set_checkpoint(node, record)
