"""What the cache holds, in numbers."""

from collections.abc import Collection
from dataclasses import dataclass

from .evictor import Evictor
from .node import TrieNode, size_in_memory
from .trie import RadixTrie


@dataclass(frozen=True)
class CacheStatistics:
    """The tries' shape, all that are described together. Sizes in bytes.

    Attributes:
        tokens: that are recognised.
        stored_tokens: of these, whose state is on disk (too).
        held_bytes: of what is in memory, what running requests and pins hold.
        evictions: states that were forgotten.
        page_outs: states that were left to the disk.
    """

    namespaces: int = 0
    nodes: int = 0
    tokens: int = 0
    checkpoints: int = 0
    leases: int = 0
    span_bytes: int = 0
    checkpoint_bytes: int = 0
    stored_tokens: int = 0
    held_bytes: int = 0
    evictions: int = 0
    page_outs: int = 0


def describe(tries: Collection[RadixTrie], evictor: Evictor) -> CacheStatistics:
    """Count what is in tries, and what went from all. Costs a walk over their nodes."""
    nodes = [node for trie in tries for node in trie.nodes()]
    return CacheStatistics(
        namespaces=len(tries),
        nodes=len(nodes),
        tokens=sum(len(node.tokens) for node in nodes),
        checkpoints=sum(node.checkpoint is not None for node in nodes),
        leases=sum(trie.root.ref_count for trie in tries),
        span_bytes=sum(trie.spans.size.nbytes for trie in tries),
        checkpoint_bytes=sum(trie.checkpoints.size.nbytes for trie in tries),
        stored_tokens=sum(node.persisted_end - node.start for node in nodes),
        held_bytes=sum(_held(trie.root) for trie in tries),
        evictions=evictor.evictions,
        page_outs=evictor.page_outs,
    )


def _held(root: TrieNode) -> int:
    """Bytes of what somebody holds: whoever holds a node holds all above it."""
    total, nodes = 0, [root]
    while nodes:
        node = nodes.pop()
        if node.ref_count:
            total += size_in_memory(node).nbytes
            nodes += node.children.values()
    return total
