"""What is forgotten first. Pure.

What was used longest ago goes first, of equals the deepest. Pinned nodes stay. Beyond that:

- a span goes from the deep end of a leaf, and after the checkpoint that stands there, which is
  worth nothing without it;
- a checkpoint where paths part, or the first one on its path, ages with whatever is below it:
  it is what a new conversation would resume at, however long ago the last one did.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

from .node import TrieNode
from .trie import RadixTrie


class Victim(NamedTuple):
    """State that may go, in the order in which it shall.

    Attributes:
        used: its recency.
        height: its node's end, negated.
        serial: keeps the order total.
        trie: where it is.
        node: whose it is.
        checkpoint: whether it is the node's checkpoint, else its span.
    """

    used: int
    height: int
    serial: int
    trie: RadixTrie
    node: TrieNode
    checkpoint: bool


def _every(_trie: RadixTrie) -> bool:
    return True


def victims(
    tries: Iterable[RadixTrie],
    *,
    persisted: bool = False,
    wanted: Callable[[RadixTrie], bool] = _every,
) -> Iterator[Victim]:
    """Yield what may be evicted, least valuable first, in one pass over the tries.

    The caller evicts a victim, a span wholly or in part, before it asks for the next one;
    nothing else may change the tries meanwhile.

    Args:
        tries: where.
        persisted: only what is on disk: losing it costs a read, and no prefill.
        wanted: whether a trie is to be evicted from still; asked anew for each victim.
    """
    serial = count()
    heap: list[Victim] = []
    for trie in tries:
        nodes = list(trie.nodes())
        heap += [
            Victim(used, -node.end, next(serial), trie, node, checkpoint=True)
            for node, used in _checkpoints(nodes)
            if not persisted or node.persisted_checkpoint is not None
        ]
        heap += [
            _span_of(node, trie, next(serial))
            for node in nodes
            if _exposed(node, persisted=persisted)
        ]
    heapq.heapify(heap)
    while heap:
        victim = heapq.heappop(heap)
        if not wanted(victim.trie):
            continue
        yield victim
        node, trie = victim.node, victim.trie
        if node.span is None and node.parent is not None:
            node = node.parent  # it has gone, and was perhaps the last child in memory
        if _exposed(node, persisted=persisted):
            heapq.heappush(heap, _span_of(node, trie, next(serial)))


def persisted_victims(
    tries: Iterable[RadixTrie], wanted: Callable[[RadixTrie], bool] = _every
) -> Iterator[tuple[RadixTrie, TrieNode]]:
    """Yield nodes whose files may go, least valuable first: ends of paths, and oldest first.

    The caller drops a node's files before it asks for the next one.

    Args:
        tries: where.
        wanted: as in `victims`.
    """
    serial = count()
    heap = [
        (_recency(node), -node.end, next(serial), trie, node)
        for trie in tries
        for node in trie.nodes()
        if _last_on_disk(node)
    ]
    heapq.heapify(heap)
    while heap:
        *_, trie, node = heapq.heappop(heap)
        if not wanted(trie):
            continue
        parent = node.parent
        yield trie, node
        if parent is not None and parent.parent is not None and _last_on_disk(parent):
            heapq.heappush(heap, (_recency(parent), -parent.end, next(serial), trie, parent))


def _recency(node: TrieNode) -> int:
    return max(node.last_used, node.checkpoint_used)


def _last_on_disk(node: TrieNode) -> bool:
    """Whether files end with a node: it has some, nothing below it has, and nobody holds it."""
    return (
        not node.ref_count
        and _has_files(node)
        and not any(_has_files(child) for child in node.children.values())
    )


def _has_files(node: TrieNode) -> bool:
    return bool(node.extents) or node.persisted_checkpoint is not None


def shortened(node: TrieNode, over: int) -> int:
    """Say where a leaf must end to free `over` bytes, and little more."""
    if node.span is None or node.span.nbytes <= over:
        return node.start
    tokens = -(-over * len(node.tokens) // node.span.nbytes)
    return node.end - max(1, tokens)


def _span_of(node: TrieNode, trie: RadixTrie, serial: int) -> Victim:
    return Victim(node.last_used, -node.end, serial, trie, node, checkpoint=False)


def _exposed(node: TrieNode, *, persisted: bool) -> bool:
    """Whether a span is the end of what is in memory of its path, so that it can be cut."""
    if node.ref_count or node.span is None or node.writing or node.checkpoint is not None:
        return False
    if node.persisted_end == node.end:
        return all(child.span is None for child in node.children.values())
    return not persisted and not node.children


def _checkpoints(nodes: list[TrieNode]) -> Iterator[tuple[TrieNode, int]]:
    """Checkpoints that may go, and their recency; `nodes` has parents before children."""
    newest: dict[TrieNode, int] = {}
    for node in reversed(nodes):
        below = [newest[child] for child in node.children.values()]
        newest[node] = max(node.last_used, node.checkpoint_used, *below)
    below_one: set[TrieNode | None] = set()
    for node in nodes:
        first = node.parent not in below_one
        if not first or node.checkpoint is not None:
            below_one.add(node)
        if node.checkpoint is not None and not (node.ref_count or node.writing):
            shared = first or len(node.children) > 1
            yield node, newest[node] if shared else node.checkpoint_used
