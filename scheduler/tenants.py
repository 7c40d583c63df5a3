"""Tenants over the queues of all models: terms, tokens a minute, places to run and to wait."""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..cachestore.tries import SHARED

_MINUTE = 60.0

_MOST = 1024
"""Buckets beyond which those that are full are looked for."""


class Terms(NamedTuple):
    """Terms that are agreed with a tenant.

    Attributes:
        weight: its share, positive.
        running: the most requests of it that run at once; None for no bound.
        waiting: the most requests of it that wait; None for no bound.
        tokens_per_minute: the most tokens that it is charged in a minute, in the long run; None
            for no bound.
    """

    weight: float = 1.0
    running: int | None = None
    waiting: int | None = None
    tokens_per_minute: int | None = None


class Share(NamedTuple):
    """Service that a tenant was given.

    Attributes:
        tenant: its name.
        service: tokens per weight that it was charged, lifts included.
        weight: its share, positive.
    """

    tenant: str
    service: float
    weight: float = 1.0


Agreed = Callable[[str], Terms]
"""The terms of a tenant, by its name. They may change."""


@dataclass
class _Bucket:
    """Tokens that are left of a minute's; negative if more were charged."""

    most: int
    left: float
    at: float


_ROUNDING = 1e-6
"""Seconds: who is told to come after so much less than a whole one might find nothing yet."""


class Quotas:
    """Tokens a minute of each tenant that has a bound: a bucket that holds those of one minute.

    The queues of all models share it; safe to call from any thread.

    Running requests go on when their tenant's bucket is empty, and are charged; waiting ones start
    when it has something again.

    Args:
        agreed: with whom.
    """

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._buckets: dict[str, _Bucket] = {}
        self._lock = threading.Lock()
        self._dropped_at = -math.inf

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Take tokens out; less than nothing gives some back."""
        with self._lock:
            if (bucket := self._filled(tenant, now)) is not None:
                bucket.left -= tokens

    def refills_in(self, tenant: str, now: float) -> int:
        """Return the whole seconds until a tenant has tokens; 0 if it has some."""
        with self._lock:
            bucket = self._filled(tenant, now)
            if bucket is None or bucket.left > 0:
                return 0
            return math.floor(-bucket.left * _MINUTE / bucket.most + _ROUNDING) + 1

    def _filled(self, tenant: str, now: float) -> _Bucket | None:
        """Fill a tenant's bucket as time has passed; None where there is no bound."""
        most = self._agreed(tenant).tokens_per_minute
        if most is None:
            self._buckets.pop(tenant, None)
            return None
        bucket = self._buckets.setdefault(tenant, _Bucket(most, most, now))
        bucket.most = most
        passed = max(0.0, now - bucket.at)
        bucket.left = min(most, bucket.left + passed * most / _MINUTE)
        bucket.at = now
        if len(self._buckets) > _MOST and now - self._dropped_at > 1:
            self._dropped_at = now
            self._drop_full(now)
        return bucket

    def _drop_full(self, now: float) -> None:
        """Forget tenants that were away for a minute: their buckets would be full."""
        stale = [name for name, each in self._buckets.items() if now - each.at > _MINUTE]
        for name in stale:
            if self._buckets[name].left >= 0:
                del self._buckets[name]


_STARTS = 32
_LONGEST = 60.0


class DrainRate:
    """Times at which the last requests left a queue."""

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=_STARTS)

    def note(self, now: float) -> None:
        """One has left."""
        self._left.append(now)

    def next_place_in(self, now: float, unknown: int) -> int:
        """Return the whole seconds until the next leaves, at the rate of the last ones; 1 to 60.

        Args:
            now: the present time, in seconds.
            unknown: the answer where none has left yet.
        """
        if not self._left:
            return unknown
        took = now - self._left[0]
        return math.ceil(min(max(took / len(self._left), 1.0), _LONGEST))


class DrainRates:
    """Times at which the last requests left: of all tenants together, and of each.

    Attributes:
        of_all: of all tenants together.
    """

    def __init__(self) -> None:
        self.of_all = DrainRate()
        self._own: dict[str, DrainRate] = {}

    def of(self, tenant: str) -> DrainRate:
        """A tenant's own, which says nothing of others' requests."""
        return self._own.get(tenant) or DrainRate()

    def note(self, tenant: str, now: float) -> None:
        """One of a tenant has left."""
        self.of_all.note(now)
        self._own.setdefault(tenant, DrainRate()).note(now)

    def forget(self, tenant: str) -> None:
        """Keep a tenant's own no longer. Idempotent."""
        self._own.pop(tenant, None)

    def __len__(self) -> int:
        return len(self._own)


_SEVERAL = 2


class TenantUse:
    """Places and tokens that tenants use, over all queues. Each queue has its part.

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
        """True if requests of several tenants have come, or are expected."""
        return len(self._met) >= _SEVERAL or self._named()

    def meet(self, tenant: str) -> None:
        """Note the tenant of a request, let in or not; shared prompts belong to none."""
        if len(self._met) < _SEVERAL and tenant != SHARED:
            self._met |= {tenant}

    def waiting_of(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return sum(part.waiting_of(tenant) for part in self._parts)

    def has_place(self, tenant: str) -> bool:
        """Return True if a tenant has fewer requests running than it may have."""
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
        """Tell queues that a tenant may have a place, and wake those where it has one.

        Args:
            tenant: which requests must wait for; others' queues need not look.
            besides: who knows already.
        """
        if self.agreed(tenant).running is None:
            return
        with self._lock:
            told = [each for each in self._parts if each is not besides and each.change(tenant)]
        if told and self.has_place(tenant):
            for each in told:
                each.wake_owner()

    def terms_changed(self) -> None:
        """Tell all queues that terms have changed."""
        with self._lock:
            parts = self._parts
            for each in parts:
                each.changes += 1
        for each in parts:
            each.wake_owner()


class Places:
    """Which of them are one queue's: what waits and runs there, by tenant.

    Attributes:
        waiting: how many requests wait.
        changes: grows when a tenant whose requests wait here may have a place elsewhere.
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

    def waiting_of(self, tenant: str) -> int:
        """How many requests of a tenant wait here."""
        return self._waiting[tenant]

    def running_of(self, tenant: str) -> int:
        """How many requests of a tenant run here."""
        return self._running[tenant]

    def has_place(self, tenant: str) -> bool:
        """Return True if a tenant has fewer requests running, with all models, than it may have."""
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

    def change(self, tenant: str) -> bool:
        """Count a change if requests of a tenant wait here, and say so. Call it with the lock."""
        if self._wake is None or not self._waiting[tenant]:
            return False
        self.changes += 1
        return True

    def wake_owner(self) -> None:
        """Wake the engine that starts what waits here."""
        if self._wake is not None:
            self._wake()

    def _add_waiting(self, tenant: str, number: int) -> None:
        self.waiting += number
        _add(self._waiting, tenant, number)


def _add(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] += number
    if not counts[tenant]:
        del counts[tenant]
