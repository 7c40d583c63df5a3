"""The budget of all models' state: room is made before anything is allocated.

Room is made by paging out and evicting unused state (see `evict`). If there is none, the engine
computes less at a time, holds new requests or preempts a sequence. The allocator is never asked for
more: on Metal that would end the process.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import structlog

from . import evict
from .evict import Share
from .ledger import NOTHING, Account, Ledger, Size, max_copy_bytes
from .trie import RadixTrie
from .tries import Tries

if TYPE_CHECKING:
    from .pins import Pins


class TenantBounds(NamedTuple):
    """Bounds of a tenant's stored state over all models, in bytes. None is no bound."""

    floor: int = 0  # below it nothing is taken, in memory or on disk, while others exceed theirs
    ceiling: int | None = None  # above it in memory, the tenant is evicted from first
    disk: int | None = None  # above it in files, the tenant's files go first


Bounds = Callable[[str], TenantBounds]  # by tenant
Excess = Callable[[RadixTrie], int]  # bytes that a trie's tenant has beyond what it keeps

_LEAST_SHARE = 8  # of the budget, one part in this many is used however short memory is

log = structlog.get_logger()


class MemoryPool:
    """Budget of all state, and its owners. Belongs to the MLX thread.

    Models come and go: the budget is what their weights leave. A copy of state (to cut, join or
    pack it) needs memory while both exist. No copy exceeds `max_copy_bytes` of the smallest budget,
    and that much is kept free, so that freeing memory never needs any that is not there. State that
    leases retain, or that is being written, is never evicted.

    Uses of state are ordered by their tick. With a `clock` that counts up across restarts it is the
    time of the use, in its units; without one, ticks count uses.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.ledger = Ledger()
        self.tries: list[Tries] = []
        self.busy: set[object] = set()  # planners of models that have requests at work
        self.pins: list[Pins] = []
        self.least: int | None = None  # bytes that the budget never falls below, once known
        self.bounds: Bounds = lambda _: TenantBounds()
        self._clock = clock
        self._tick = 0
        self._floors = 0
        self._whole = Size()
        self._base = 0
        self._share = 1.0

    def tick(self) -> int:
        """The tick of a use now: later than all that was used before."""
        self._tick = max(self._tick + 1, self._clock())
        return self._tick

    def remember(self, tick: int) -> None:
        """Count on from a use before a restart."""
        self._tick = max(self._tick, tick)

    def resize(self, budget: Size, least: int | None = None) -> None:
        """Set the budget, and the bytes that it never falls below: all of it without `least`."""
        self._whole = budget
        self.least = budget.nbytes if least is None else least
        self._check_floors()

    def bound_tenants(self, bounds: Bounds, floors: int) -> None:
        """Set the bounds of tenants. Floors that exceed the budget together are logged, once."""
        self.bounds = bounds
        self._floors = floors
        self._check_floors()

    def _check_floors(self) -> None:
        if self.least is not None and self._floors > self._whole.nbytes:
            log.warning(
                "cache floors of tenants scaled down: they exceed the budget",
                floors=self._floors,
                budget=self._whole.nbytes,
            )
            self._floors = 0  # it is logged once

    def shrink(self, share: float) -> None:
        """Use only a share of the budget, and evict the rest: the system is short of memory.

        Where less was held than the budget when that began, it is a share of what was: else a
        cache that is half full would give nothing back.
        """
        if self._share == 1.0:
            self._base = min(self._whole.nbytes, self.ledger.total.nbytes)
        self._share = share
        self.evict_excess()

    # -- room --------------------------------------------------------------------------

    @property
    def budget(self) -> Size:
        """Memory that all state may take at present."""
        if self._share == 1.0:
            return self._whole
        nbytes = int(min(self._base, self._whole.nbytes) * self._share)
        return Size(max(nbytes, self._whole.nbytes // _LEAST_SHARE), self._whole.buffers)

    @property
    def limit(self) -> Size:
        """Memory that may be held so that a copy still fits."""
        return self.budget - Size(max_copy_bytes(self.least or 0))

    @property
    def room(self) -> Size:
        """Free memory, without eviction; negative if too much is held."""
        return self.limit - self.ledger.total

    @property
    def spare(self) -> int:
        """Bytes that are free, or that no lease retains: the most that could be."""
        return self.room.nbytes + sum(tries.unheld for tries in self.tries)

    def fits(self, need: Size) -> bool:
        """True if there is room, or could be made."""
        room = self.room
        if need.within(room):
            return True
        return need.nbytes <= self.spare and need.within(room + self.evictable(need - room))

    def make_room(self, need: Size) -> bool:
        """Page out and evict until `need` fits; False, with nothing evicted, if it cannot."""
        if need.within(self.room):
            return True
        if not self.fits(need):
            return False
        self.evict_excess(need)
        return need.within(self.room)

    def reserve(self, account: Account, need: Size) -> bool:
        """Make room, and record it in an account in place of what it held; False without room."""
        account.close()
        fits = self.make_room(need)
        account.set(need if fits else NOTHING)
        return fits

    def evictable(self, enough: Size | None = None) -> Size:
        """Size of state that is neither leased nor being written; counting stops at `enough`."""
        free = Size()
        for size in chain.from_iterable(map(evict.evictable, chain.from_iterable(self.tries))):
            free += size
            if enough is not None and enough.within(free):
                break
        return free

    # -- eviction ----------------------------------------------------------------------

    def evict_excess(self, need: Size = NOTHING) -> None:
        """Evict the oldest state of all models until the budget has room for `need`."""
        over = need - self.room
        excess = Size(max(0, over.nbytes), max(0, over.buffers))
        self.evict(self.tries, evict.stored(self.tries) - excess)

    def evict(self, models: list[Tries], limit: Size) -> None:
        """Page out or forget models' oldest state down to a limit, or until the rest is leased."""
        if not evict.stored(models).within(limit):
            owned: dict[str, list[RadixTrie]] = defaultdict(list)
            for trie, tenant in self._owners().items():
                owned[tenant].append(trie)

            def held(tenant: str) -> int:
                sizes = ((trie.spans.size, trie.checkpoints.size) for trie in owned[tenant])
                return sum(spans.nbytes + whole.nbytes for spans, whole in sizes)

            shares = {tenant: self.bounds(tenant)[:2] for tenant in owned}
            on_disk = any(tries.files.counts for tries in models)
            for excess, is_last in self._stages(shares, limit.nbytes, held):
                for persisted in (True, False) if on_disk else (False,):
                    evict.evict_excess(models, limit, excess, persisted=persisted, sparing=is_last)
        for tries in models:
            for trie in tries:
                trie.spans.trim()
            tries.drop_empty()

    def forget_persisted(self, goal: int) -> int:
        """Forget the oldest files until `goal` bytes are left; return the number of nodes."""

        def held(tenant: str) -> int:
            return sum(tries.files.by_tenant[tenant] for tries in self.tries)

        bounds = {tenant: self.bounds(tenant) for tenant in set(self._owners().values())}
        shares = {tenant: (bound.floor, bound.disk) for tenant, bound in bounds.items()}
        has_spans = {trie: tries.layout.spans for tries in self.tries for trie in tries}
        forgotten = 0
        for excess, _ in self._stages(shares, goal, held):
            for victim in evict.persisted_victims(has_spans, excess):
                if self.stored_on_disk <= goal:
                    break
                evict.forget_files(victim.trie, victim.node, has_spans=has_spans[victim.trie])
                forgotten += 1
        for tries in self.tries:
            tries.drop_empty()
        return forgotten

    @property
    def stored_on_disk(self) -> int:
        """Bytes of the files that the tries of all models refer to."""
        return sum(tries.files.nbytes for tries in self.tries)

    def _owners(self) -> dict[RadixTrie, str]:
        return {trie: name.tenant for tries in self.tries for name, trie in tries.items()}

    def _stages(
        self, shares: dict[str, Share], limit: int, held: Callable[[str], int]
    ) -> Iterator[tuple[Excess, bool]]:
        """Yield each stage of eviction, and True if it takes from floors."""
        owners, floored = self._owners(), any(floor for floor, _ in shares.values())
        for kept in evict.stages(shares, limit):

            def excess(trie: RadixTrie, kept: dict[str, int] = kept) -> int:
                tenant = owners[trie]
                return held(tenant) - kept[tenant] if tenant in kept else 0

            yield excess, floored and not any(kept.values())
