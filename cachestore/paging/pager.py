"""Moves state between the tries and the disk tier, and builds the tries after a restart."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import structlog

from ..disk.model_folders import ModelFolders
from ..disk.tier import DiskTier
from ..node import Extent, Tokens, TrieNode, path_tokens
from ..prefix_cache import PrefixCache
from ..record import TOKEN_BYTES, Paths, Record, RecordKind, hasher, record_digest
from ..state import Codec
from ..trie import RadixTrie, node_at
from ..tries import SHARED, Namespace
from .page_in import PageIn
from .page_out import PageOut

_SPARE = 20  # of the disk's budget, one part in this many is freed once it was exceeded

log = structlog.get_logger()


class Pager:
    """Pages one cache out and in, within the disk's budget. Belongs to the MLX thread.

    At start the cache learns which state and which pins the disk has. `budget` is for the files of
    all models; those in `folders`, of models that are not loaded, go first.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tier: DiskTier,
        codec: Codec,
        *,
        budget: int,
        folders: ModelFolders | None = None,
    ) -> None:
        self.budget = budget
        self.tier = tier
        self.page_out = PageOut(cache, tier, codec)
        self.page_in = PageIn(cache, tier, codec)
        self._cache = cache
        self._folders = folders
        self._given_up = False
        cache.pins.tier = tier
        for pin in tier.pins:
            cache.pins.put(pin.tenant, pin.name, np.frombuffer(pin.tokens, np.int32), None)
        orphans = recover_index(cache, tier.records, tier.fingerprint)
        tier.delete(orphans)
        log.info("disk tier", folder=str(tier.folder), records=len(tier.records) - len(orphans))

    def step(self, *, busy: bool = False) -> None:
        """Take in finished writes and reads, and hand over the next; see `PageOut.step`."""
        self._cache.pins.restore(self.page_in)
        self._step(busy=busy)

    def _step(self, *, busy: bool = False) -> None:
        self.page_out.step(busy=busy)
        self.page_in.step()
        self._keep_within_budget()
        self.tier.delete(self._cache.tries.files.unused())

    def _keep_within_budget(self) -> None:
        resting = 0 if self._folders is None else self._folders.resting_bytes
        over = self._cache.pool.stored_on_disk + resting - self.budget
        if over <= 0:
            return
        spare = self.budget // _SPARE
        if self._folders is not None and self._folders.make_room(over + spare):
            return
        forgotten = self._cache.pool.forget_persisted(self.budget - spare)
        log.debug("disk budget was exceeded", forgotten=forgotten, budget=self.budget)

    def give_up(self, reason: str) -> None:
        """Turn the disk tier off for good; nothing waits for it any longer."""
        self._given_up = True
        self.tier.leave("off", reason)
        self.page_out.give_up()
        self.page_in.give_up()

    def write_all(self) -> bool:
        """Write on, with pauses between calls; False when no more can be written."""
        if self._given_up:
            return False
        self._step()
        if self.page_out.writing or self.page_out.unwritten:
            return True
        self._touch()
        return False

    def _touch(self) -> None:
        """Update in the index when files were last used: they were written before that."""
        newest: dict[Record, int] = {}
        for trie in self._cache.tries:
            for node in trie.nodes():
                used = [(extent.record, node.last_used) for extent in node.extents]
                if node.persisted_checkpoint is not None:
                    used.append((node.persisted_checkpoint, node.checkpoint_used))
                for record, tick in used:
                    newest[record] = max(tick, newest.get(record, record.used))
        self.tier.touch({record.id: tick for record, tick in newest.items() if tick > record.used})

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of files, by what is in them. Safe to call from any thread."""
        return dict(self._cache.tries.files.by_kind)


# The trie of a record, and a node that ended, when it was noted, where the record does or later.
_Place = tuple[RadixTrie, TrieNode]


def recover_index(cache: PrefixCache, records: Iterable[Record], fingerprint: str) -> list[Record]:
    """Put the state on disk into a cache's tries; return the records of no use.

    `records` ascend by start. The cache is empty, except that it knows which prompts are shared. A
    record is of no use if its path has a hole, or if its own digest differs.
    """
    records = list(records)
    paths = Paths[_Place](records)
    orphans = []
    for record in records:
        found = _before(cache, paths, record)
        if found is None or not _is_whole(record, found[1], fingerprint):
            orphans.append(record)
            continue
        (trie, before), hashed = found
        own = np.frombuffer(record.tokens, np.int32)
        path = np.concatenate([path_tokens(before)[: record.start], own])
        if not (record.start or cache.layout.spans):  # the path is in one record, all of it
            shared = cache.pins.declared(Namespace(record.tenant), path)
            trie = cache.pins.trie(Namespace(record.tenant), shared)
        node = _place(cache, trie, path, record)
        if node is None:
            orphans.append(record)
        else:
            paths.reach(record, hashed, (trie, node))
    cache.tries.drop_empty()
    return orphans


def _before(cache: PrefixCache, paths: Paths[_Place], record: Record) -> tuple[_Place, Any] | None:
    """Find where a record starts, and a digest of the tokens before it; None in a hole."""
    shared = cache.pins.ending_at(record.start, record.prefix)
    if record.tenant == SHARED or record.end == record.start:
        shared = None
    if record.start and shared is None:
        return paths.before(record)
    trie = cache.pins.trie(Namespace(record.tenant), shared)
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
