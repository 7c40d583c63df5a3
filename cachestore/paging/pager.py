"""Moves state between the tries and the disk tier, behind the engine's back."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from ..disk.model_folders import ModelFolders
from ..disk.tier import DiskTier
from ..disk.writer import DiskStatistics
from ..ledger import Size
from ..node import Tokens
from ..prefix_cache import PrefixCache
from ..tries import SHARED, Namespace
from .codec import Codec
from .index_recovery import recover_index
from .page_in import PageIn, PageInStatus, Retries
from .page_out import PageOut

if TYPE_CHECKING:
    from ..record import Record

_SPARE = 20  # of the disk's budget, one part in this many is freed once it was exceeded

log = structlog.get_logger()


class Pager:
    """Pages one cache out and in, within the disk's budget. Belongs to the MLX thread.

    At start it puts what the disk has into the cache's tries.

    Args:
        cache: whose tries.
        tier: the disk.
        codec: knows what state is made of.
        budget: bytes that the files of all models may take.
        fingerprint: of the model.
        make_room: makes room in memory for what is read or copied; says whether there is.
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
        self._folders = folders
        self._given_up = False
        self._cache = cache
        self._tier = tier
        self._page_out = PageOut(cache, tier, codec, make_room)
        self._page_in = PageIn(cache, tier, codec, make_room)
        self._retries = Retries()
        for pin in tier.pins():
            if pin.tenant == SHARED:
                cache.shared.declare(pin.name, np.frombuffer(pin.tokens, np.int32), None)
        orphans = recover_index(cache, tier.records, fingerprint)
        self._tier.delete(orphans)
        log.info("disk tier", folder=str(tier.folder), records=len(tier.records) - len(orphans))

    @property
    def page_ins(self) -> int:
        """States that were read back."""
        return self._page_in.page_ins

    @property
    def asked_bytes(self) -> int:
        """Bytes of the files that requests have asked for."""
        return self._page_in.asked_bytes

    @property
    def ready(self) -> bool:
        """True if there is something to do at once."""
        return self._page_in.ready

    @property
    def writing(self) -> bool:
        """True if a write is under way."""
        return self._page_out.writing

    @property
    def unwritten(self) -> bool:
        """True if state is dirty and no write is under way."""
        return self._page_out.unwritten

    def step(self, *, busy: bool = False) -> None:
        """Take in finished writes and reads, and hand over the next ones.

        Args:
            busy: sequences run; see `PageOut.step`.
        """
        self._page_out.step(busy=busy)
        self._page_in.step()
        self._keep_within_budget()
        if unused := self._cache.tries.files.unused():
            self._tier.delete(unused)

    def _keep_within_budget(self) -> None:
        resting = 0 if self._folders is None else self._folders.resting_bytes
        over = self._cache.pool.stored_on_disk + resting - self.budget
        if over <= 0:
            return
        spare = self.budget // _SPARE
        if self._folders is not None and self._folders.make_room(over + spare):
            return
        forgotten = self._cache.evictor.forget_persisted(self.budget - spare)
        log.debug("disk budget was exceeded", forgotten=forgotten, budget=self.budget)

    def give_up(self, reason: str) -> None:
        """Turn the disk tier off for good; nothing waits for it any longer."""
        self._given_up = True
        self._tier.turn_off(reason)
        self._page_out.give_up()
        self._page_in.give_up()

    def request(self, namespace: Namespace, tokens: Tokens) -> PageInStatus:
        """Start to read what is on disk of a prompt, unless it is being read."""
        return self._page_in.request(namespace, tokens)

    def awaits(self, reader: object, namespace: Namespace, tokens: Tokens) -> bool:
        """Return True if a reader shall wait for a prompt's state. Nothing is read for it yet."""
        status = self._page_in.look(namespace, tokens)
        if status is PageInStatus.UNDER_WAY:
            return not self._retries.ended(reader)
        return status is PageInStatus.ON_DISK and self._retries.may_begin(reader)

    def wait_for(self, reader: object, namespace: Namespace, tokens: Tokens) -> bool:
        """Start to read what is on disk of a prompt; return whether its reader waits for that.

        Args:
            reader: what asks, again and again. State that is paged out again each time before
                the reader uses it is not waited for any more.
            namespace: whose prompt.
            tokens: of the prompt.
        """
        if self._retries.ended(reader):
            return False
        return self._retries.waits(reader, self.request(namespace, tokens))

    def write_all(self) -> bool:
        """Go on with writing all that is not on disk; False when no more can be written.

        Called again and again, with pauses in which the tier writes.
        """
        if self._given_up:
            return False
        self.step()
        if self._page_out.pending:
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
        for record, tick in newest.items():
            if tick > record.used:
                self._tier.touch([record.id], tick)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of files, by what is in them. Safe to call from any thread."""
        return dict(self._cache.tries.files.by_kind)

    def statistics(self) -> DiskStatistics:
        """Describe the disk tier. Safe to call from any thread."""
        return self._tier.statistics()
