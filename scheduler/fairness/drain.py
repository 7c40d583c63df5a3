"""How soon a place in a queue becomes free, by how fast it was left of late. Pure."""

import math
from collections import deque

_STARTS = 32
_LONGEST = 60.0


class DrainRate:
    """When the last requests left a queue."""

    def __init__(self) -> None:
        self._left: deque[float] = deque(maxlen=_STARTS)

    def note(self, now: float) -> None:
        """One has left."""
        self._left.append(now)

    def next_place_in(self, now: float, unknown: int) -> int:
        """Whole seconds in which the next one leaves, at the rate of the last ones; 1 to 60.

        Args:
            now: the present time, in seconds.
            unknown: the answer where none has left yet.
        """
        if not self._left:
            return unknown
        took = now - self._left[0]
        return math.ceil(min(max(took / len(self._left), 1.0), _LONGEST))


class DrainRates:
    """When the last requests left: of all tenants together, and of each.

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
