"""What is agreed with a tenant, and how much of its tokens a minute is spent."""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_MINUTE = 60.0

_MOST = 1024
"""Buckets beyond which those that are full are looked for."""


class Terms(NamedTuple):
    """What is agreed with a tenant.

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


Agreed = Callable[[str], Terms]
"""The terms of a tenant, by its name. They may change."""


@dataclass
class _Bucket:
    """What is left of a minute's tokens; less than nothing where more was charged."""

    most: int
    left: float
    at: float


_ROUNDING = 1e-6
"""Seconds: who is told to come after so much less than a whole one might find nothing yet."""


class Quotas:
    """Tokens a minute of each tenant that has a bound: a bucket that holds those of one minute.

    The queues of all models share it; safe to call from any thread.

    What runs goes on when its tenant's bucket is empty, and is charged; what waits does not start
    before it has something again.

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
        """Whole seconds until there is something to spend; 0 where there is."""
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
        """Forget whoever has been away for a minute: its bucket would be full."""
        stale = [name for name, each in self._buckets.items() if now - each.at > _MINUTE]
        for name in stale:
            if self._buckets[name].left >= 0:
                del self._buckets[name]
