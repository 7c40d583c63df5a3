"""Moves state between the tries and the disk tier, behind the engine's back."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ..disk.model_folders import ModelFolders
from ..disk.tier import DiskTier
from ..ledger import Size
from ..prefix_cache import PrefixCache
from ..state import Codec
from .index_recovery import recover_index
from .page_in import PageIn
from .page_out import PageOut

if TYPE_CHECKING:
    from ..record import Record

_SPARE = 20  # of the disk's budget, one part in this many is freed once it was exceeded

log = structlog.get_logger()


class Pager:
    """Pages one cache out and in, within the disk's budget. Belongs to the MLX thread.

    At start it puts what the disk has into the cache's tries, and pins whose state is to be read.

    Args:
        cache: the cache whose tries are paged.
        tier: the disk.
        codec: knows what state is made of.
        budget: bytes that the files of all models may take.
        fingerprint: of the model.
        make_room: makes room in memory for what is read or copied; False if there is none.
        folders: have the files of models that are not loaded, which go first.
    """

    def __init__(
        self,
        cache: PrefixCache,
        tier: DiskTier,
        codec: Codec,
        *,
        budget: int,
        fingerprint: str,
        make_room: Callable[[Size], bool],
        folders: ModelFolders | None = None,
    ) -> None:
        self.budget = budget
        self.tier = tier
        self.page_out = PageOut(cache, tier, codec, make_room)
        self.page_in = PageIn(cache, tier, codec, make_room)
        self._cache = cache
        self._folders = folders
        self._given_up = False
        for pin in tier.pins:
            cache.pinned.put(pin.tenant, pin.name, np.frombuffer(pin.tokens, np.int32), None)
        orphans = recover_index(cache, tier.records, fingerprint)
        tier.delete(orphans)
        log.info("disk tier", folder=str(tier.folder), records=len(tier.records) - len(orphans))

    def step(self, *, busy: bool = False) -> None:
        """Take in finished writes and reads, and hand over the next; see `PageOut.step`."""
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
        forgotten = self._cache.governor.forget_persisted(self.budget - spare)
        log.debug("disk budget was exceeded", forgotten=forgotten, budget=self.budget)

    def give_up(self, reason: str) -> None:
        """Turn the disk tier off for good; nothing waits for it any longer."""
        self._given_up = True
        self.tier.leave("off", reason)
        self.page_out.give_up()
        self.page_in.give_up()

    def write_all(self) -> bool:
        """Go on with writing all that is not on disk; False when no more can be written.

        Called again and again, with pauses in which the tier writes.
        """
        if self._given_up:
            return False
        self.step()
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
