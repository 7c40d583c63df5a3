"""Asserts the invariants at the top of `trie.py`; `umbel cache verify` and the tests call it."""

from collections.abc import Iterator

from .prefix_cache import Layout, PrefixCache
from .trie import RadixTrie, TrieNode


def problems(cache: PrefixCache) -> list[str]:
    """Describe every broken invariant; empty when the cache is sound."""
    found = [
        f"trie {number}: {problem}"
        for number, (_, trie) in enumerate(cache.tries())
        for problem in _trie_problems(trie, cache.layout)
    ]
    return found + list(_pin_problems(cache)) + list(_lease_problems(cache))


def _trie_problems(trie: RadixTrie, layout: Layout) -> Iterator[str]:
    root = trie.root
    if len(root.tokens) or root.span is not None or root.checkpoint is not None:
        yield "the root has tokens or state"
    spans = checkpoints = 0
    for node in trie.nodes():
        yield from _node_problems(node, layout)
        spans += node.span.nbytes if node.span is not None else 0
        checkpoints += node.checkpoint.nbytes if node.checkpoint is not None else 0
    if spans != trie.span_bytes:
        yield f"spans hold {spans} bytes and {trie.span_bytes} are counted"
    if checkpoints != trie.checkpoint_bytes:
        yield f"checkpoints hold {checkpoints} bytes and {trie.checkpoint_bytes} are counted"


def _node_problems(node: TrieNode, layout: Layout) -> Iterator[str]:
    where = f"node [{node.start}, {node.end})"
    if not len(node.tokens):
        yield f"{where} has an empty edge"
    if node.parent is not None and node.parent.end != node.start:
        yield f"{where} does not start where its parent ends"
    for first, child in node.children.items():
        if child.tokens[:1].tolist() != [first] or child.parent is not node:
            yield f"{where} has a child under a wrong token or parent"
    if layout.spans and node.span is None:
        yield f"{where} has no span"
    if node.span is not None and node.span.length != len(node.tokens):
        yield f"{where} has a span of {node.span.length} tokens"
    if node.bare:
        yield f"{where} is a leaf without state"
    if node.checkpoint is not None and node.checkpoint.offset != node.end:
        yield f"{where} has a checkpoint of offset {node.checkpoint.offset}"
    if node.pins < sum(child.pins for child in node.children.values()):
        yield f"{where} is pinned less often than its children"


def _pin_problems(cache: PrefixCache) -> Iterator[str]:
    pins: dict[int, int] = {}
    for lease in cache.leases():
        for node in lease.deepest.path():
            pins[id(node)] = pins.get(id(node), 0) + 1
    for _, trie in cache.tries():
        for node in trie.nodes():
            if node.pins != pins.pop(id(node), 0):
                yield f"node [{node.start}, {node.end}) has {node.pins} pins, not its leases'"
    if pins:
        yield "a lease holds a node that is in no trie"


def _lease_problems(cache: PrefixCache) -> Iterator[str]:
    for number, (_, trie) in enumerate(cache.tries()):
        if not trie.root.children and not cache.leases(trie):
            yield f"trie {number}: an empty trie that nobody uses"
    live = [lease for _, trie in cache.tries() for lease in cache.leases(trie)]
    for lease in cache.leases():
        where = f"a lease of [0, {lease.held})"
        if lease not in live:
            yield f"{where} belongs to a trie that was dropped"
        length = sum(span.length for span in lease.spans())
        if cache.layout.spans and length != lease.held:
            yield f"{where} has spans of {length} tokens"
        restored = cache.layout.checkpoints and 0 < lease.cached == lease.held
        if restored and lease.checkpoint is None:
            yield f"{where} has no checkpoint"
        held = [node.checkpoint for node in lease.deepest.path()]
        if lease.checkpoint is not None and not any(lease.checkpoint is one for one in held):
            yield f"{where} has a checkpoint that it does not pin"
