"""Builds the tries anew from what the disk's index knows, after a restart."""

from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from .disk_index import Record, RecordKind
from .pieces import Piece
from .prefix_cache import Namespace, PrefixCache
from .trie import RadixTrie, Tokens

_Place = tuple[str, int, bytes]  # tenant, offset, digest of the tokens before it


def digest(tokens: Tokens) -> bytes:
    """Name a path of tokens, in 16 bytes."""
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def recall(cache: PrefixCache, records: Iterable[Record], fingerprint: str) -> list[Record]:
    """Put what is on disk into a cache's tries. Nothing is read but the index.

    A record says by a digest which tokens come before its own. They are those of some other
    record, or the path has a hole, and the record is of no use.

    Args:
        cache: empty.
        records: ascending by where they start.
        fingerprint: of the model.

    Returns:
        The records of no use.
    """
    records = list(records)
    places = _Places(records)
    orphans = []
    for record in records:
        before = places.find(record)
        if before is None:
            orphans.append(record)
            continue
        path = np.concatenate([before, np.frombuffer(record.tokens, np.int32)])
        trie = cache.open_trie(Namespace(record.tenant, fingerprint))
        if not (len(path) == record.end and _place(cache, trie, path, record)):
            orphans.append(record)
            continue
        places.reach(record, path)
    cache.drop_empty_tries()
    return orphans


class _Places:
    """Where records start, and the tokens that lead there as far as they are known."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._starts: dict[str, set[int]] = defaultdict(set)
        for record in records:
            self._starts[record.tenant].add(record.start)
        self._known: dict[_Place, Tokens] = {}

    def find(self, record: Record) -> Tokens | None:
        """The tokens before a record; None if nobody has them."""
        if not record.start:
            return np.empty(0, np.int32)
        return self._known.get((record.tenant, record.start, record.prefix))

    def reach(self, record: Record, path: Tokens) -> None:
        """Note that a path is there, for the records that go on from it."""
        for start in self._starts[record.tenant]:
            if record.start < start <= record.end:
                self._known[record.tenant, start, digest(path[:start])] = path[:start]


def _place(cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record) -> bool:
    """Put one record into a trie; False if another has the same."""
    if record.kind is RecordKind.SPAN:
        return _place_span(cache, trie, path, record)
    return _place_checkpoint(cache, trie, path, record)


def _place_span(cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record) -> bool:
    node, known = trie.match(path)
    if known == len(path) or known < record.start:
        return False
    if known < node.end:
        node = trie.split(node, known)
    while known < len(path):  # a node is read in one go, and copied when it is cut
        stop = min(len(path), known + cache.longest)
        node = trie.append(node, path[known:stop].copy(), None)
        trie.set_stored(node, Piece(record, known, stop))
        node.last_used = record.used
        known = stop
    cache.remember_tick(record.used)
    return True


def _place_checkpoint(cache: PrefixCache, trie: RadixTrie, path: Tokens, record: Record) -> bool:
    node, known = trie.match(path)
    if known < len(path) and cache.layout.spans:
        return False
    if known < node.end:
        node = trie.split(node, known)
    if known < len(path):
        node = trie.append(node, path[known:].copy(), None)
    if node.stored_checkpoint is not None:
        return False
    trie.set_stored_checkpoint(node, record)
    node.checkpoint_used = record.used
    cache.remember_tick(record.used)
    return True
