"""Builds the tries anew from what the disk's index knows, after a restart."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..node import Extent, Tokens, TrieNode, path_tokens
from ..prefix_cache import PrefixCache
from ..record import TOKEN_BYTES, Paths, Record, RecordKind, hasher, record_digest
from ..trie import RadixTrie, node_at
from ..tries import SHARED, Namespace

# The trie of a record, and a node that ended, when it was noted, where the record does or later.
_Place = tuple[RadixTrie, TrieNode]


def recover_index(cache: PrefixCache, records: Iterable[Record], fingerprint: str) -> list[Record]:
    """Put what is on disk into a cache's tries; return the records of no use.

    `records` ascend by start. The cache is empty, except that it knows which prompts are shared.
    Nothing is read but the index. A record is of no use if its path has a hole, or if its own
    digest differs.
    """
    records = list(records)
    paths = Paths[_Place](records)
    orphans = []
    for record in records:
        found = _before(cache, paths, record, fingerprint)
        if found is None or not _is_whole(record, found[1], fingerprint):
            orphans.append(record)
            continue
        (trie, before), hashed = found
        own = np.frombuffer(record.tokens, np.int32)
        path = np.concatenate([path_tokens(before)[: record.start], own])
        if not (record.start or cache.layout.spans):  # the path is in one record, all of it
            shared = cache.pinned.longest(Namespace(record.tenant, fingerprint), path)
            trie = cache.pinned.trie(Namespace(record.tenant, fingerprint), shared)
        node = _place(cache, trie, path, record)
        if node is None:
            orphans.append(record)
        else:
            paths.reach(record, hashed, (trie, node))
    cache.tries.drop_empty()
    return orphans


def _before(
    cache: PrefixCache, paths: Paths[_Place], record: Record, fingerprint: str
) -> tuple[_Place, Any] | None:
    """Find where a record starts, and a digest of the tokens before it; None in a hole."""
    shared = cache.pinned.ending_at(record.start, record.prefix)
    if record.tenant == SHARED or record.end == record.start:
        shared = None
    if record.start and shared is None:
        return paths.before(record)
    trie = cache.pinned.trie(Namespace(record.tenant, fingerprint), shared)
    hashed = hasher()
    hashed.update(trie.root.tokens.tobytes())
    return (trie, trie.root), hashed


def _is_whole(record: Record, hashed: Any, fingerprint: str) -> bool:
    """True if a record is the one that was written: tokens, tenant and offsets."""
    if not record.end or len(record.tokens) != TOKEN_BYTES * (record.end - record.start):
        return False
    hashed = hashed.copy()
    hashed.update(record.tokens)
    kind, start, end = record.kind.value, record.start, record.end
    path = hashed.digest()
    return record_digest(fingerprint, record.tenant, kind, start, end, path) == record.digest


def _place(cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record) -> TrieNode | None:
    """Put one record into a trie; return the last node, or None if another has the same."""
    node, known = trie.match(path)
    is_span = record.kind is RecordKind.SPAN
    if is_span and not record.start <= known < len(path):
        return None
    if not is_span and known < len(path) and cache.layout.spans:
        return None
    node = node_at(trie, node, known)
    if not is_span:
        if known < len(path):
            node = trie.append(node, path[known:].copy(), None)
        if node.persisted_checkpoint is not None:
            return None
        trie.persistence.set_checkpoint(node, record)
        trie.touch_checkpoint(node, record.used)
    while is_span and known < len(path):  # a node is read in one go, and copied when it is cut
        stop = min(len(path), known + cache.longest)
        node = trie.append(node, path[known:stop].copy(), None)
        trie.persistence.add_extent(node, Extent(record, known, stop))
        trie.touch(node, record.used)
        known = stop
    cache.pool.remember(record.used)
    return node
