"""Asserts the invariants at the top of `trie.py`; `umbel cache verify` and the tests call it."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from .ledger import Kind
from .node import Totals, TrieNode, size_in_memory
from .prefix_cache import PrefixCache
from .record import digest
from .spans import size_of
from .state import Layout
from .trie import RadixTrie

_AT_ONCE = 256  # nodes that are checked in one piece


def problems(cache: PrefixCache) -> list[str]:
    """Describe every broken invariant; empty when the cache is sound."""
    return [problem for piece in examine(cache) for problem in piece]


def examine(cache: PrefixCache) -> Iterator[list[str]]:
    """Yield the broken invariants, piece by piece; the cache may change between two pieces."""
    for number, trie in enumerate(cache.tries):
        where = f"trie {number}"
        nodes = list(trie.nodes())
        for first in range(0, len(nodes), _AT_ONCE):
            yield [
                f"{where}: {problem}"
                for node in nodes[first : first + _AT_ONCE]
                if not _has_gone(node)
                for problem in _node_problems(node, cache.layout)
            ]
        for of_trie in (_trie_problems, _storage_problems):
            yield [f"{where}: {problem}" for problem in of_trie(trie)]
    for among in (_retain_problems, _lease_problems, _shared_problems, _sum_problems):
        yield list(among(cache))


def _has_gone(node: TrieNode) -> bool:
    first = node.tokens[:1].tolist()
    return bool(first) and node.parent is not None and node.parent.children.get(*first) is not node


def _trie_problems(trie: RadixTrie) -> Iterator[str]:
    root, nodes, found = trie.root, set(trie.nodes()), Totals()
    if root.extents or root.span is not None or root.checkpoint is not None:
        yield "the root has state"
    for node in trie.persistence.dirty.keys() - nodes:
        yield f"node [{node.start}, {node.end}) waits to be written and is gone"
    for node in nodes:
        found.nodes += 1
        found.known_tokens += len(node.tokens)
        found.whole_states += node.checkpoint is not None
        found.stored_tokens += node.persisted_end - node.start
        found.held_bytes += size_in_memory(node).nbytes if node.ref_count else 0
    if found != trie.totals:
        yield f"the nodes add up to {found} and {trie.totals} is counted"
    spans, counted = size_of(*(node.span for node in nodes)).nbytes, trie.spans.size.nbytes
    if spans != counted:
        yield f"spans hold {spans} bytes and {counted} are counted"
    whole, counted = size_of(*(n.checkpoint for n in nodes)).nbytes, trie.checkpoints.size.nbytes
    if whole != counted:
        yield f"checkpoints hold {whole} bytes and {counted} are counted"


def _storage_problems(trie: RadixTrie) -> Iterator[str]:
    owners = {id(node.span): node for node in trie.nodes() if node.span is not None}
    storages = {node.span.storage for node in owners.values() if node.span is not None}
    for storage in storages:
        where = f"a storage of {storage.length} tokens"
        held = [owners.get(id(view)) for view in storage.views]
        if sum(view.length for view in storage.views) != storage.length:
            yield f"{where} has some that no span views"
        if None in held:
            yield f"{where} is viewed by what is in no node"
        if any(node is not None and node.parent is not before for before, node in pairwise(held)):
            yield f"{where} is viewed by nodes that do not follow one another"
    buffers, counted = sum(storage.buffers for storage in storages), trie.spans.size.buffers
    if buffers != counted:
        yield f"spans have {buffers} buffers and {counted} are counted"


def _node_problems(node: TrieNode, layout: Layout) -> Iterator[str]:
    where = f"node [{node.start}, {node.end})"
    if not len(node.tokens):
        yield f"{where} has an empty edge"
    if node.parent is not None and node.parent.end != node.start:
        yield f"{where} does not start where its parent ends"
    for first, child in node.children.items():
        if child.tokens[:1].tolist() != [first] or child.parent is not node:
            yield f"{where} has a child under a wrong token or parent"
    if layout.spans and node.span is None and not (node.extents and node.persisted_end == node.end):
        yield f"{where} has no span, here or on disk"
    yield from _disk_problems(node, where)
    if node.span is not None and node.span.length != len(node.tokens):
        yield f"{where} has a span of {node.span.length} tokens"
    if node.empty:
        yield f"{where} is a leaf without state"
    if node.checkpoint is not None and node.checkpoint.offset != node.end:
        yield f"{where} has a checkpoint of offset {node.checkpoint.offset}"
    if node.ref_count < sum(child.ref_count for child in node.children.values()):
        yield f"{where} is retained less often than its children"


def _disk_problems(node: TrieNode, where: str) -> Iterator[str]:
    at = node.start
    for extent in node.extents:
        record = extent.record
        if extent.start != at or extent.stop <= at or extent.stop > node.end:
            yield f"{where} has an extent [{extent.start}, {extent.stop}) at {at}"
        if not record.start <= extent.start < extent.stop <= record.end:
            yield f"{where} has an extent that its file [{record.start}, {record.end}) lacks"
        at = extent.stop
    if node.persisted_checkpoint is not None and node.persisted_checkpoint.end != node.end:
        yield f"{where} has a file of the state at {node.persisted_checkpoint.end}"
    parent = node.parent
    if parent is None or parent.parent is None:
        return
    if node.span is not None and parent.span is None:
        yield f"{where} is in memory and its parent is not"
    if node.extents and parent.persisted_end != parent.end:
        yield f"{where} is on disk and its parent is not"


def _sum_problems(cache: PrefixCache) -> Iterator[str]:
    uses: Counter[int] = Counter()
    for node in (node for trie in cache.tries for node in trie.nodes()):
        uses.update(extent.record.id for extent in node.extents)
        if node.persisted_checkpoint is not None:
            uses[node.persisted_checkpoint.id] += 1
    if uses != cache.tries.files.counts:
        yield "files are used other than it is counted"
    kv, held = cache.ledger.held(Kind.KV), cache.ledger.held(Kind.CHECKPOINT)
    captured = sum(c.checkpoint.nbytes for lease in cache.leases for c in lease.captured)
    every = [trie for tries in cache.pool.tries for trie in tries]
    if kv.nbytes != sum(trie.spans.size.nbytes for trie in every):
        yield f"the ledger has {kv.nbytes} bytes of spans, and the tries another sum"
    unknown = held.nbytes - captured - sum(trie.checkpoints.size.nbytes for trie in every)
    others = len(cache.pool.tries) > 1  # what their requests have captured is not known here
    if unknown < 0 or (unknown and not others):
        yield f"the ledger has {held.nbytes} bytes of checkpoints, and their owners another sum"


def _retain_problems(cache: PrefixCache) -> Iterator[str]:
    retained: Counter[int] = Counter()
    for lease in cache.leases:
        retained.update(id(node) for node in lease.deepest.path())
    leased = Counter(lease.trie for lease in cache.leases)
    for trie in cache.tries:
        if trie.root.ref_count != leased[trie]:
            yield f"a root is retained {trie.root.ref_count} times, not as often as leased"
        for node in trie.nodes():
            if node.ref_count != retained.pop(id(node), 0):
                where = f"node [{node.start}, {node.end})"
                yield f"{where} is retained {node.ref_count} times, not as often as leased"
    if retained:
        yield "a lease holds a node that is in no trie"


def _shared_problems(cache: PrefixCache) -> Iterator[str]:
    for namespace, trie in cache.tries.items():
        known = cache.pins.ending_at(trie.root.end, namespace.base)
        if namespace.base and known is None and not trie.root.ref_count:
            yield "a trie follows a prompt that is not shared"
        if namespace.base != (digest(trie.root.tokens) if len(trie.root.tokens) else b""):
            yield "a trie follows another prompt than its namespace says"


def _lease_problems(cache: PrefixCache) -> Iterator[str]:
    tries = list(cache.tries)
    used = {lease.trie for lease in cache.leases}
    for number, trie in enumerate(tries):
        if not trie.root.children and trie not in used:
            yield f"trie {number}: an empty trie without leases"
    for lease in cache.leases:
        where = f"a lease of [0, {lease.held})"
        if lease.trie not in tries:
            yield f"{where} belongs to a trie that was dropped"
        length = sum(span.length for span in lease.spans())
        if cache.layout.spans and length != lease.held:
            yield f"{where} has spans of {length} tokens"
        restored = cache.layout.checkpoints and 0 < lease.cached == lease.reached
        if restored and lease.checkpoint is None:
            yield f"{where} has no checkpoint"
        held = [node.checkpoint for node in lease.deepest.path()]
        if lease.base is not None:
            held.append(lease.base.checkpoint)
        if lease.checkpoint is not None and not any(lease.checkpoint is one for one in held):
            yield f"{where} has a checkpoint that it does not retain"
