"""Builds the tries anew from what the disk's index knows, after a restart."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..extents import Extent
from ..node import Tokens, TrieNode, path_tokens
from ..prefix_cache import PrefixCache
from ..record import Record, RecordKind, hasher, record_digest
from ..shared_prompts import SharedPrompt
from ..trie import RadixTrie
from ..tries import SHARED, Namespace

_SIZE = 4  # bytes of a token
_Place = tuple[str, int, bytes]  # tenant, offset, digest of the tokens before it


def recover_index(cache: PrefixCache, records: Iterable[Record], fingerprint: str) -> list[Record]:
    """Put what is on disk into a cache's tries. Nothing is read but the index.

    A record says by a digest which tokens come before its own. They are those of some other
    record, or the path has a hole, and the record is of no use. By another digest it says
    what the whole path is, its own tokens included: nothing is placed where that differs.

    Args:
        cache: empty, but that it knows which prompts are shared.
        records: ascending by where they start.
        fingerprint: of the model.

    Returns:
        The records of no use.
    """
    records = list(records)
    places = _Places(cache, records, fingerprint)
    orphans = []
    for record in records:
        before = places.find(record)
        tokens = _tokens(record)
        if before is None or tokens is None or not _is_whole(record, before, fingerprint):
            orphans.append(record)
            continue
        path = np.concatenate([path_tokens(before.node)[: before.offset], tokens])
        trie = before.trie
        if not (record.start or cache.layout.spans):  # the path is in one record, all of it
            trie = places.trie_of(record, path)
        node = _place(cache, trie, path, record)
        if node is None:
            orphans.append(record)
            continue
        places.reach(record, before, node)
    cache.tries.drop_empty()
    return orphans


def _tokens(record: Record) -> Tokens | None:
    """A record's own tokens; None if they are not as many as it says."""
    if not record.end or len(record.tokens) != _SIZE * (record.end - record.start):
        return None
    return np.frombuffer(record.tokens, np.int32)


def _is_whole(record: Record, before: "_Before", fingerprint: str) -> bool:
    """Whether a record is the one that was written, tokens, tenant and offsets."""
    hashed = before.hashed.copy()
    hashed.update(record.tokens)
    path = hashed.digest()
    kind, start, end = record.kind.value, record.start, record.end
    return record_digest(fingerprint, record.tenant, kind, start, end, path) == record.digest


class _Before(NamedTuple):
    """What comes before an offset.

    Attributes:
        trie: where they are. The tokens are not kept: those of thousands of long paths are
            gigabytes.
        node: one that ends there or later, when it was noted.
        offset: how many tokens.
        hashed: has them all.
    """

    trie: RadixTrie
    node: TrieNode
    offset: int
    hashed: Any


class _Places:
    """Where records start, and what leads there as far as it is known."""

    def __init__(self, cache: PrefixCache, records: Iterable[Record], fingerprint: str) -> None:
        self._cache = cache
        self._fingerprint = fingerprint
        starts: dict[str, set[int]] = defaultdict(set)
        for record in records:
            starts[record.tenant].add(record.start)
        self._starts = {tenant: sorted(own) for tenant, own in starts.items()}
        self._wanted = {(record.tenant, record.start, record.prefix) for record in records}
        self._known: dict[_Place, _Before] = {}

    def find(self, record: Record) -> _Before | None:
        """What comes before a record; None if nobody has it."""
        if not record.start:
            trie = self._cache.tries.open(Namespace(record.tenant, self._fingerprint))
            return _Before(trie, trie.root, 0, hasher())
        shared = self._cache.shared.ending_at(record.start, record.prefix)
        if shared is not None and record.tenant != SHARED and record.end > record.start:
            return self._after(shared, record.tenant)
        return self._known.get((record.tenant, record.start, record.prefix))

    def _after(self, shared: SharedPrompt, tenant: str) -> _Before:
        namespace = shared.namespace(Namespace(tenant, self._fingerprint))
        trie, hashed = self._cache.tries.open(namespace, shared.tokens), hasher()
        hashed.update(shared.tokens.tobytes())
        return _Before(trie, trie.root, len(shared.tokens), hashed)

    def trie_of(self, record: Record, path: Tokens) -> RadixTrie:
        """The trie in which a whole path is looked for."""
        namespace = Namespace(record.tenant, self._fingerprint)
        shared = self._cache.shared.longest(namespace, path)
        if shared is None:
            return self._cache.tries.open(namespace)
        return self._cache.tries.open(shared.namespace(namespace), shared.tokens)

    def reach(self, record: Record, before: _Before, node: TrieNode) -> None:
        """Note that a record's tokens, to the end of `node`, are there to go on from."""
        starts, hashed, done = self._starts[record.tenant], before.hashed.copy(), 0
        first, last = bisect_right(starts, record.start), bisect_right(starts, record.end)
        for start in starts[first:last]:
            at = _SIZE * (start - record.start)
            hashed.update(record.tokens[done:at])
            done = at
            place = (record.tenant, start, hashed.digest())
            if place in self._wanted:
                self._known.setdefault(place, _Before(before.trie, node, start, hashed.copy()))


def _place(cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record) -> TrieNode | None:
    """Put one record into a trie; return the last node, or None if another has the same."""
    if record.kind is RecordKind.SPAN:
        return _place_span(cache, trie, path, record)
    return _place_checkpoint(cache, trie, path, record)


def _place_span(
    cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record
) -> TrieNode | None:
    node, known = trie.match(path)
    if known == len(path) or known < record.start:
        return None
    if known < node.end:
        node = trie.split(node, known)
    while known < len(path):  # a node is read in one go, and copied when it is cut
        stop = min(len(path), known + cache.longest)
        node = trie.append(node, path[known:stop].copy(), None)
        trie.persistence.add_extent(node, Extent(record, known, stop))
        trie.touch(node, record.used)
        known = stop
    cache.pool.recency.remember(record.used)
    return node


def _place_checkpoint(
    cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record
) -> TrieNode | None:
    node, known = trie.match(path)
    if known < len(path) and cache.layout.spans:
        return None
    if known < node.end:
        node = trie.split(node, known)
    if known < len(path):
        node = trie.append(node, path[known:].copy(), None)
    if node.persisted_checkpoint is not None:
        return None
    trie.persistence.set_checkpoint(node, record)
    trie.touch_checkpoint(node, record.used)
    cache.pool.recency.remember(record.used)
    return node
