"""The memory that the state of all loaded models shares: one budget, one ledger, one recency."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from .bounds import Bounds, unbounded
from .ledger import Ledger, Size

if TYPE_CHECKING:
    from .tries import Tries

_LEAST_SHARE = 8  # of the budget, one part in this many is used however short memory is
_RESERVE = 16  # a part of the budget is kept for copies: one in this many


class Governing(Protocol):
    """Makes room for one model; `Governor` is the real one."""

    def evict_excess(self) -> None:
        """Evict what is held over the budget."""
        ...


class Recency:
    """Tells what was used before what, whichever model's it is.

    Args:
        clock: counts up, across restarts too: recency then is the time of a use, in its units.
            Without one it counts uses.
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


class Pinning(Protocol):
    """A model's pins; `Pins` is the real one."""

    def held_by(self, tenant: str) -> int:
        """Bytes that a tenant's hold in memory."""
        ...

    @property
    def tenants(self) -> set[str]:
        """Whose there are."""
        ...


class MemoryPool:
    """What state may take, and whose it is. Belongs to the MLX thread.

    Models come and go: the budget is what their weights leave. The part of it that is kept for
    copies is that of the least budget, so that a model's longest copy stays as long as it is.

    Attributes:
        least: bytes that the budget never falls below; None before it is known.
        ledger: where all state is recorded.
        recency: of all state.
        tries: of each model that is loaded.
        governors: of each model that is loaded.
        busy: governors of the models that have requests at work.
        pins: of each model that is loaded.
        bounds: of each tenant's state.

    Args:
        clock: see `Recency`.
    """

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.ledger = Ledger()
        self.recency = Recency(clock)
        self.tries: list[Tries] = []
        self.governors: list[Governing] = []
        self.busy: set[Governing] = set()
        self.pins: list[Pinning] = []
        self.least: int | None = None
        self.bounds: Bounds = unbounded
        self._floors = 0
        self._whole = Size()
        self._base = 0
        self._share = 1.0

    def resize(self, budget: Size, least: int | None = None) -> None:
        """Say anew what all state may take.

        Args:
            budget: at present.
            least: bytes that it never falls below; all of it, if it is None.
        """
        self._whole = budget
        self.least = budget.nbytes if least is None else least
        self._check_floors()

    def bound_tenants(self, bounds: Bounds, floors: int) -> None:
        """Bound what tenants' state takes otherwise from now on.

        Args:
            bounds: of each tenant.
            floors: the sum of all floors that are configured. That it is over what is left by the
                weights of the models is logged, once.
        """
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
        """What all state may take at present."""
        return Size(self._bytes(), self._whole.buffers)

    def _bytes(self) -> int:
        whole = self._whole.nbytes
        if self._share == 1.0:
            return whole
        return max(int(min(self._base, whole) * self._share), whole // _LEAST_SHARE)

    @property
    def limit(self) -> Size:
        """What may be held, so that there is room for a copy still."""
        return self.budget - Size(max_copy_bytes(self.least or 0))

    @property
    def room(self) -> Size:
        """What is free, without making any; negative where too much is held."""
        return self.limit - self.ledger.total

    @property
    def stored(self) -> Size:
        """What the tries of all models hold in memory."""
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
        """Evict what is held over the budget, which has become smaller."""
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
