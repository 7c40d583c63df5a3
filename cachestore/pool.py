"""The budget of all models' state, its bounds by tenant, and how much of it is free."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .ledger import Ledger, Size, max_copy_bytes

if TYPE_CHECKING:
    from .governor import Governor
    from .shared import Pins
    from .trie import RadixTrie
    from .tries import Tries


class TenantBounds(NamedTuple):
    """Bounds of a tenant's stored state over all models, in bytes. None is no bound."""

    floor: int = 0  # below it nothing is taken, in memory or on disk, while others exceed theirs
    ceiling: int | None = None  # above it in memory, the tenant is evicted from first
    disk: int | None = None  # above it in files, the tenant's files go first


Bounds = Callable[[str], TenantBounds]  # by tenant

_LEAST_SHARE = 8  # of the budget, one part in this many is used however short memory is


class MemoryPool:
    """Budget of all state, and its owners. Belongs to the MLX thread.

    Models come and go: the budget is what their weights leave. The part of it that is kept for
    copies is that of the smallest budget, so that a model's longest copy stays as long as it is.

    Uses of state are ordered by their tick. With a `clock` that counts up across restarts it is the
    time of the use, in its units; without one, ticks count uses.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.ledger = Ledger()
        self.tries: list[Tries] = []
        self.governors: list[Governor] = []
        self.busy: set[Governor] = set()  # those of models that have requests at work
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
            import structlog  # noqa: PLC0415  (commands read figures of this module, and are quick)

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
    def spare(self) -> int:
        """Bytes that are free, or that no lease retains: the most that could be."""
        return self.room.nbytes + sum(tries.unheld for tries in self.tries)

    @property
    def stored_on_disk(self) -> int:
        """Bytes of the files that the tries of all models refer to."""
        return sum(tries.files.nbytes for tries in self.tries)

    def owners(self) -> "dict[RadixTrie, str]":
        """The tenants of all tries."""
        return {trie: name.tenant for tries in self.tries for name, trie in tries.items()}

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
