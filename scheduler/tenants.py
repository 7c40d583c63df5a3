"""Tenants over the queues of all models: terms, tokens a minute, places to run and to wait."""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..cachestore.tries import SHARED

_MINUTE = 60.0
_MOST = 1024  # buckets beyond which those that are full are looked for
# seconds: a client told to come after so much less than a whole one might find nothing yet
_ROUNDING = 1e-6
_STARTS = 32  # starts by which the rate of a queue is known
_LONGEST = 60.0  # seconds after which a client is told to come again, at the most
_SEVERAL = 2


class Terms(NamedTuple):
    """Terms that are agreed with a tenant. `None` is no bound."""

    weight: float = 1.0  # its share, positive
    running: int | None = None  # the most requests of it that run at once
    waiting: int | None = None  # the most requests of it that wait
    tokens_per_minute: int | None = None  # the most that it is charged for, in the long run


class Share(NamedTuple):
    """Service that a tenant was given."""

    tenant: str  # its name
    service: float  # tokens per weight that it was charged, lifts included
    weight: float = 1.0  # its share, positive


Agreed = Callable[[str], Terms]  # the terms of a tenant, by its name. They may change


@dataclass
class _Bucket:
    left: float  # tokens of a minute's; negative if more were charged
    at: float


class Quotas:
    """Tokens a minute of each tenant that has a bound: a bucket that holds those of one minute.

    The queues of all models share it; safe to call from any thread. Running requests go on when
    their tenant's bucket is empty, and are charged; waiting ones start when it has something again.
    """

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._buckets: dict[str, _Bucket] = {}
        self._lock = threading.Lock()
        self._dropped_at = -math.inf

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Take tokens out; less than nothing gives some back."""
        with self._lock:
            if (most := self._agreed(tenant).tokens_per_minute) is not None:
                self._filled(tenant, most, now).left -= tokens

    def refills_in(self, tenant: str, now: float) -> int:
        """Return the whole seconds until a tenant has tokens; 0 if it has some."""
        with self._lock:
            most = self._agreed(tenant).tokens_per_minute
            if most is None:
                self._buckets.pop(tenant, None)
                return 0
            left = self._filled(tenant, most, now).left
            return 0 if left > 0 else math.floor(-left * _MINUTE / most + _ROUNDING) + 1

    def _filled(self, tenant: str, most: int, now: float) -> _Bucket:
        """Fill a tenant's bucket as time has passed."""
        bucket = self._buckets.setdefault(tenant, _Bucket(most, now))
        bucket.left = min(most, bucket.left + max(0.0, now - bucket.at) * most / _MINUTE)
        bucket.at = now
        if len(self._buckets) > _MOST and now - self._dropped_at > 1:
            self._dropped_at = now
            for name, each in list(self._buckets.items()):
                if now - each.at > _MINUTE and each.left >= 0:
                    del self._buckets[name]  # it would be full by now
        return bucket


class DrainRates:
    """Times at which the last requests left the queues: of each tenant, and of all together."""

    def __init__(self) -> None:
        self._left: dict[str | None, deque[float]] = {None: deque(maxlen=_STARTS)}

    def note(self, tenant: str, now: float) -> None:
        """One of a tenant has left."""
        for key in (None, tenant):
            self._left.setdefault(key, deque(maxlen=_STARTS)).append(now)

    def next_place_in(self, now: float, unknown: int, tenant: str | None = None) -> int:
        """Return the whole seconds until the next leaves, at the rate of the last ones; 1 to 60.

        Without any that left it is `unknown`. Only a tenant's requests count, or all.
        """
        left = self._left.get(tenant)
        if not left:
            return unknown
        return math.ceil(min(max((now - left[0]) / len(left), 1.0), _LONGEST))

    def forget(self, tenant: str) -> None:
        """Keep a tenant's own no longer. Idempotent."""
        self._left.pop(tenant, None)


class TenantUse:
    """Places and tokens that tenants use, over all queues. Each queue has its part.

    Safe to call from any thread. Its lock is held for a few additions, and meanwhile nothing is
    called but `agreed`. What may wait is looked at before it is counted; a daemon's requests are
    queued by one thread. If terms are `named` for tenants, several are expected.
    """

    def __init__(
        self, agreed: Agreed = lambda _: Terms(), named: Callable[[], bool] = lambda: False
    ) -> None:
        self.agreed = agreed  # a tenant's terms
        self._named = named
        self.quotas = Quotas(agreed)  # the tokens that are left of a minute's
        # how fast requests start; of a tenant that has none, nothing is kept
        self.drained = DrainRates()
        self._lock = threading.Lock()
        self._parts: tuple[Places, ...] = ()  # replaced as a whole, so that it is read without lock
        self._met: frozenset[str] = frozenset()  # the first tenants, as many as make several

    @property
    def waiting(self) -> int:
        """Number of requests that wait, of all tenants."""
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
        """Return the number of requests of a tenant that wait."""
        return sum(part.waits[tenant] for part in self._parts)

    def has_place(self, tenant: str) -> bool:
        """Return True if a tenant has fewer requests running than it may have."""
        most = self.agreed(tenant).running
        return most is None or sum(part.runs[tenant] for part in self._parts) < most

    def join(self, wake: Callable[[], object] | None = None) -> "Places":
        """Count the requests of a queue from now on.

        `wake` is called when a tenant for which requests wait there has a place again; None where
        what waits needs no place to run.
        """
        with self._lock:
            part = Places(self, self._lock, wake)
            self._parts = (*self._parts, part)
        return part

    def leave(self, part: "Places") -> None:
        """Count the requests of a queue no more: it is gone. Idempotent."""
        with self._lock:
            self._parts = tuple(each for each in self._parts if each is not part)
            tenants = {*part.waits, *part.runs}
        for tenant in tenants:
            self.forget_idle(tenant)
            self.tell(tenant)

    def forget_idle(self, tenant: str) -> None:
        """Keep nothing of a tenant of whom nothing waits or runs."""
        if not any(part.waits[tenant] or part.runs[tenant] for part in self._parts):
            self.drained.forget(tenant)

    def tell(self, tenant: str, besides: "Places | None" = None) -> None:
        """Tell queues where requests of a tenant wait that it may have a place; wake them if so."""
        if self.agreed(tenant).running is None:
            return
        with self._lock:
            told = [p for p in self._parts if p is not besides and p.wake and p.waits[tenant]]
            for each in told:
                each.changes += 1
        if told and self.has_place(tenant):
            _wake(told)

    def terms_changed(self) -> None:
        """Tell all queues that terms have changed."""
        with self._lock:
            parts = self._parts
            for each in parts:
                each.changes += 1
        _wake(parts)


class Places:
    """One queue's requests that wait and run, by tenant.

    Attributes:
        changes: grows when a tenant whose requests wait here may have a place elsewhere.
    """

    def __init__(
        self, use: TenantUse, lock: threading.Lock, wake: Callable[[], object] | None
    ) -> None:
        self.wake = wake  # wakes the engine that starts what waits here
        self.waiting = self.changes = 0  # number of requests that wait
        self._use = use
        self._lock = lock
        self.waits = Counter[str]()  # requests that wait, by tenant
        self.runs = Counter[str]()

    def wait(self, tenant: str) -> None:
        """Count a request that waits."""
        with self._lock:
            self._add_waiting(tenant, 1)

    def leave(self, tenant: str) -> None:
        """Count a waiting request no more: it has neither started nor will."""
        with self._lock:
            self._add_waiting(tenant, -1)
        self._use.forget_idle(tenant)

    def start(self, tenant: str) -> bool:
        """Count a waiting request as running; False, and nothing is changed, without a place."""
        with self._lock:
            if not self._use.has_place(tenant):
                return False
            self._add_waiting(tenant, -1)
            self.runs[tenant] += 1
        self._use.tell(tenant, self)
        return True

    def stop(self, tenant: str) -> None:
        """Count a running request no more."""
        with self._lock:
            _add(self.runs, tenant, -1)
        self._use.forget_idle(tenant)
        self._use.tell(tenant, self)

    def _add_waiting(self, tenant: str, number: int) -> None:
        self.waiting += number
        _add(self.waits, tenant, number)


def _add(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] += number
    if not counts[tenant]:
        del counts[tenant]


def _wake(parts: Iterable[Places]) -> None:
    for each in parts:
        if each.wake is not None:
            each.wake()
