"""What the cache holds, in numbers."""

from collections.abc import Collection
from dataclasses import dataclass

from .evict import Evictor
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
    """Add up the totals of tries, and count what went from all."""
    totals = [trie.totals for trie in tries]
    return CacheStatistics(
        namespaces=len(tries),
        nodes=sum(each.nodes for each in totals),
        tokens=sum(each.known_tokens for each in totals),
        checkpoints=sum(each.whole_states for each in totals),
        leases=sum(each.leases for each in totals),
        span_bytes=sum(trie.spans.size.nbytes for trie in tries),
        checkpoint_bytes=sum(trie.checkpoints.size.nbytes for trie in tries),
        stored_tokens=sum(each.stored_tokens for each in totals),
        held_bytes=sum(each.held_bytes for each in totals),
        evictions=evictor.evictions,
        page_outs=evictor.page_outs,
    )
