"""What tenants use with all models together: places to run and to wait, and tokens a minute."""

import threading
from collections import Counter
from collections.abc import Callable

from ...cachestore.tries import SHARED
from .drain import DrainRates
from .terms import Agreed, Quotas, Terms

_SEVERAL = 2


class TenantUse:
    """What tenants use, over all queues. Each, or whatever else requests wait in, has its part.

    Safe to call from any thread. Its lock is held for a few additions, and meanwhile nothing is
    called but `agreed`. What may wait is looked at before it is counted, so that two threads that
    queue at once may exceed a bound by one; a daemon's requests are queued by one thread.

    Attributes:
        agreed: a tenant's terms.
        quotas: what is spent of its tokens a minute.
        drained: how fast requests start; of a tenant that has none, nothing is kept.

    Args:
        agreed: as above.
        named: whether something is agreed with tenants by name, so that several are expected.
    """

    def __init__(
        self, agreed: Agreed = lambda _: Terms(), named: Callable[[], bool] = lambda: False
    ) -> None:
        self.agreed = agreed
        self._named = named
        self.quotas = Quotas(agreed)
        self.drained = DrainRates()
        self._lock = threading.Lock()
        self._parts: tuple[Places, ...] = ()  # replaced as a whole, so that it is read without lock
        self._met: frozenset[str] = frozenset()  # the first tenants, as many as make several

    @property
    def waiting(self) -> int:
        """How many requests wait, of all tenants."""
        return sum(part.waiting for part in self._parts)

    @property
    def shared(self) -> bool:
        """Whether requests of several tenants have come, or will."""
        return len(self._met) >= _SEVERAL or self._named()

    def meet(self, tenant: str) -> None:
        """Take note of whose request has come, be it let in or not; what all share is nobody's."""
        if len(self._met) < _SEVERAL and tenant != SHARED:
            self._met |= {tenant}

    def waiting_of(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return sum(part.waiting_of(tenant) for part in self._parts)

    def has_place(self, tenant: str) -> bool:
        """Whether a tenant has fewer requests running than it may have."""
        most = self.agreed(tenant).running
        return most is None or sum(part.running_of(tenant) for part in self._parts) < most

    def join(self, wake: Callable[[], object] | None = None) -> "Places":
        """Count what a queue has, from now on.

        Args:
            wake: called when a tenant for which requests wait there has a place again; None where
                what waits needs no place to run.
        """
        with self._lock:
            part = Places(self, self._lock, wake)
            self._parts = (*self._parts, part)
        return part

    def leave(self, part: "Places") -> None:
        """Count what a queue has no more: it is gone. Idempotent."""
        with self._lock:
            self._parts = tuple(each for each in self._parts if each is not part)
            tenants = part.tenants
        for tenant in tenants:
            self.forget_idle(tenant)
            self.tell(tenant)

    def forget_idle(self, tenant: str) -> None:
        """Keep nothing of a tenant of whom nothing waits or runs."""
        if not any(part.waiting_of(tenant) or part.running_of(tenant) for part in self._parts):
            self.drained.forget(tenant)

    def tell(self, tenant: str, besides: "Places | None" = None) -> None:
        """Have queues look anew whether a tenant has a place, and go on where it has one.

        Args:
            tenant: which requests must wait for; others' queues need not look.
            besides: who knows already.
        """
        if self.agreed(tenant).running is None:
            return
        with self._lock:
            told = [each for each in self._parts if each is not besides and each.look_at(tenant)]
        if told and self.has_place(tenant):
            for each in told:
                each.wake_owner()

    def terms_changed(self) -> None:
        """Have all queues look at all tenants anew."""
        with self._lock:
            parts = self._parts
            for each in parts:
                each.look_at_all()
        for each in parts:
            each.wake_owner()


class Places:
    """Which of them are one queue's: what waits and runs there, by tenant.

    Attributes:
        waiting: how many requests wait.
        changes: grows whenever there is another tenant to look at.
    """

    def __init__(
        self, use: TenantUse, lock: threading.Lock, wake: Callable[[], object] | None
    ) -> None:
        self._wake = wake
        self.waiting = self.changes = 0
        self._use = use
        self._lock = lock
        self._waiting: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._changed: set[str] = set()

    def waiting_of(self, tenant: str) -> int:
        """How many requests of a tenant wait here."""
        return self._waiting[tenant]

    def running_of(self, tenant: str) -> int:
        """How many requests of a tenant run here."""
        return self._running[tenant]

    def has_place(self, tenant: str) -> bool:
        """Whether a tenant has fewer requests running, anywhere, than it may have."""
        return self._use.has_place(tenant)

    @property
    def tenants(self) -> set[str]:
        """Those of whom anything waits or runs here."""
        return {*self._waiting, *self._running}

    def wait(self, tenant: str) -> None:
        """Count a request that waits."""
        with self._lock:
            self._add_waiting(tenant, 1)

    def leave(self, tenant: str) -> None:
        """Count it no more: it has neither started nor will."""
        with self._lock:
            self._add_waiting(tenant, -1)
        self._use.forget_idle(tenant)

    def start(self, tenant: str) -> bool:
        """Count a waiting request as running; False, and nothing is changed, without a place."""
        with self._lock:
            if not self._use.has_place(tenant):
                return False
            self._add_waiting(tenant, -1)
            self._running[tenant] += 1
        self._use.tell(tenant, self)
        return True

    def stop(self, tenant: str) -> None:
        """Count a running request no more."""
        with self._lock:
            _add(self._running, tenant, -1)
        self._use.forget_idle(tenant)
        self._use.tell(tenant, self)

    def look_at(self, tenant: str) -> bool:
        """Have a tenant looked at if requests of it wait here, and say so. For who has the lock."""
        if self._wake is None or not self._waiting[tenant]:
            return False
        self._changed.add(tenant)
        self.changes += 1
        return True

    def look_at_all(self) -> None:
        """Have all tenants looked at. For who has the lock."""
        if self._wake is not None:
            self._changed.update(self._waiting)
            self.changes += 1

    def wake_owner(self) -> None:
        """Have whoever starts what waits here look at it."""
        if self._wake is not None:
            self._wake()

    def take_changed(self) -> set[str]:
        """The tenants that are to be looked at since the last call."""
        if not self._changed:
            return set()
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def _add_waiting(self, tenant: str, number: int) -> None:
        self.waiting += number
        _add(self._waiting, tenant, number)


def _add(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] += number
    if not counts[tenant]:
        del counts[tenant]
