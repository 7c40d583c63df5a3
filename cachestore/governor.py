"""Budget of model state: room is made before anything is allocated.

Everything that takes memory asks here first. Room is made by paging out and evicting unused state
(see `Evictor`). If there is no room, the engine computes less at a time, holds new requests or
preempts a sequence. The allocator is never asked for more: on Metal that would end the process.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .ledger import Kind, Ledger, Size

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache
    from .shared import Pins
    from .tries import Tries


class TenantBounds(NamedTuple):
    """Bounds of a tenant's stored state over all models, in bytes. None is no bound.

    Attributes:
        floor: below it nothing is taken, in memory or on disk, while others exceed theirs.
        ceiling: above it in memory, the tenant is evicted from first.
        disk: above it in files, the tenant's files go first.
    """

    floor: int = 0
    ceiling: int | None = None
    disk: int | None = None


Bounds = Callable[[str], TenantBounds]
"""Says what bounds a tenant has."""


class Share(NamedTuple):
    """Of memory or of the disk: bytes that a tenant keeps, and over which it goes first."""

    floor: int
    most: int | None


def stages(shares: Mapping[str, Share], room: int) -> list[dict[str, int]]:
    """Bytes that tenants keep in each stage of eviction; a tenant that is not named loses nothing.

    First go tenants above their ceiling; then state above the floors; then, as a running request
    needs room more than one that may come, the floors. Floors that exceed `room` together are
    scaled down to it.
    """
    wanted = sum(share.floor for share in shares.values())
    scale = min(1.0, max(0, room) / wanted) if wanted else 0.0
    floors = {tenant: int(share.floor * scale) for tenant, share in shares.items()}
    most = {
        tenant: max(share.most, floors[tenant])
        for tenant, share in shares.items()
        if share.most is not None
    }
    last = [dict.fromkeys(floors, 0)] if any(floors.values()) else []
    return [*([most] if most else []), floors, *last]


_LEAST_SHARE = 8  # of the budget, one part in this many is used however short memory is
_RESERVE = 16  # a part of the budget is kept for copies: one in this many


class Recency:
    """Orders uses of state, of all models.

    With a clock that counts up across restarts, recency is the time of a use, in its units; without
    one it counts uses.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self._tick = 0
        self._clock = clock

    def next(self) -> int:
        """The recency of what is used now: more than that of all that was used before."""
        self._tick = max(self._tick + 1, self._clock())
        return self._tick

    def remember(self, tick: int) -> None:
        """Count on from what was used before a restart."""
        self._tick = max(self._tick, tick)


class MemoryPool:
    """Budget of all state, and its owners. Belongs to the MLX thread.

    Models come and go: the budget is what their weights leave. The part of it that is kept for
    copies is that of the smallest budget, so that a model's longest copy stays as long as it is.

    Attributes:
        least: bytes that the budget never falls below; None before it is known.
        busy: governors of the models that have requests at work.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.ledger = Ledger()
        self.recency = Recency(clock)
        self.tries: list[Tries] = []
        self.governors: list[Governor] = []
        self.busy: set[Governor] = set()
        self.pins: list[Pins] = []
        self.least: int | None = None
        self.bounds: Bounds = lambda _: TenantBounds()
        self._floors = 0
        self._whole = Size()
        self._base = 0
        self._share = 1.0

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
            import structlog  # noqa: PLC0415  (commands use this module, and are quick)

            structlog.get_logger().warning(
                "the cache floors of tenants are scaled down: they are over the budget",
                floors=self._floors,
                budget=self._whole.nbytes,
            )
            self._floors = 0  # it has been said

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
    def stored(self) -> Size:
        """State that the tries of all models hold in memory."""
        return sum((tries.size for tries in self.tries), Size())

    @property
    def spare(self) -> int:
        """Bytes that are free, or that no lease retains: the most that could be."""
        return self.room.nbytes + sum(tries.unheld for tries in self.tries)

    @property
    def stored_on_disk(self) -> int:
        """Bytes of the files that the tries of all models refer to."""
        return sum(tries.files.nbytes for tries in self.tries)

    def evict_excess(self) -> None:
        """Evict state over the budget, which has become smaller."""
        for governor in self.governors[:1]:  # each has all models' state to choose from
            governor.evict_excess()

    def shrink(self, share: float) -> None:
        """Use only a share of the budget, and evict the rest: the system is short of memory.

        Where less was held than the budget when that began, it is a share of what was: else a
        cache that is half full would give nothing back.
        """
        if self._share == 1.0:
            self._base = min(self._whole.nbytes, self.ledger.total.nbytes)
        self._share = share
        self.evict_excess()


def max_copy_bytes(budget: int) -> int:
    """The most bytes of state that are copied at a time, under a budget."""
    return budget // _RESERVE


class Governor:
    """Makes room for one model in the budget of all. Belongs to the MLX thread.

    A copy of state (to cut, join or pack it) needs memory while both exist. No copy exceeds
    `max_copy_bytes`, and that much is kept free, so that freeing memory never needs any that is not
    there.
    """

    def __init__(self, cache: "PrefixCache") -> None:
        self.pool = cache.pool
        self.ledger = cache.ledger
        self._cache = cache
        self._transient = self.ledger.account(Kind.TRANSIENT)
        self.pool.governors.append(self)

    def close(self) -> None:
        """Leave the pool: the model is unloaded."""
        self.release()
        self.pool.busy.discard(self)
        self.pool.governors.remove(self)

    def note(self, *, busy: bool) -> None:
        """Note that requests of this model are at work, or not."""
        (self.pool.busy.add if busy else self.pool.busy.discard)(self)

    @property
    def others_busy(self) -> bool:
        """True if requests of another model are at work, which will give memory back."""
        return bool(self.pool.busy - {self})

    def evict_excess(self) -> None:
        """Evict state over the budget, which has become smaller."""
        self._free(Size())

    def fits(self, need: Size) -> bool:
        """True if there is room, or could be made."""
        room = self.pool.room
        if need.within(room):
            return True
        if need.nbytes > self.pool.spare:
            return False
        return need.within(room + self._cache.evictor.evictable(need - room))

    def make_room(self, need: Size) -> bool:
        """Page out and evict until `need` fits; False, with nothing evicted, if it cannot."""
        if need.within(self.pool.room):
            return True
        if not self.fits(need):
            return False
        self._free(need)
        return need.within(self.pool.room)

    def _free(self, need: Size) -> None:
        over = need - self.pool.room
        self._cache.evictor.evict_from_all(
            self.pool.stored - Size(max(0, over.nbytes), max(0, over.buffers))
        )

    def reserve(self, need: Size) -> bool:
        """Make room for a step's temporaries, kept until the next step; False if there is none."""
        self._transient.close()
        if not self.make_room(need):
            return False
        self._transient.set(need)
        return True

    def release(self) -> None:
        """Give back what was reserved: the step is over."""
        self._transient.close()
