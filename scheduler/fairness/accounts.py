"""What each member of a level was served, and which members may be served next.

Virtual token counters (VTC: Sheng et al., OSDI 2024, arXiv 2401.00588) with deficits that are
refilled in quanta (DLPM: Cao et al., arXiv 2501.14312). The same class serves both levels: tenants,
and the conversations of one tenant.

A member's *service* is the sum of tokens it was charged, over its weight. A ready member is
*eligible* while its service is below the *limit*. When no ready member is eligible, the limit
becomes the least service of the ready members plus the quantum: DLPM's refill of every deficit at
once, without a walk over the members.

Invariants, as long as no charge is taken back:

- where any member is ready, one is eligible;
- no ready member's service is below the limit less the quantum;
- no member becomes ready with less service than the floor, the highest that the least service of
  the ready members ever was: time without requests earns nothing (VTC's lift).

So members that stay ready are never further apart than a quantum and what one of them is charged
for what it started last.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_REMEMBERED = 1024
"""Members that are not ready whose service is remembered. What is forgotten is what the longest
absent one had beyond the floor."""


class _Place(NamedTuple):
    """Where a ready member stands: the least served first, then whoever came first."""

    service: float
    since: int
    key: str


class Accounts:
    """The members of one level. Members are named by strings.

    Args:
        quantum: tokens per weight by which deficits are refilled, positive.
        kinds: how many kinds of work members can have ready; a kind is a number below it.
        weight: a member's share, positive. It is asked at each charge, so that it may change.
    """

    def __init__(
        self, quantum: float, kinds: int, weight: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        self._quantum = quantum
        self._weight = weight
        self._floor = 0.0
        self._limit = quantum
        self._services: dict[str, float] = {}
        self._absent: OrderedDict[str, None] = OrderedDict()  # not ready, the longest so first
        self._ready: dict[str, tuple[_Place, tuple[int, ...]]] = {}
        self._by_kind: list[list[_Place]] = [[] for _ in range(kinds)]

    def service(self, key: str) -> float:
        """Tokens per weight that a member was charged, lifts included."""
        return self._services.get(key, self._floor)

    def least_served(self) -> str | None:
        """The ready member with the least service."""
        first = self._first()
        return None if first is None else first.key

    def has_eligible(self, kind: int) -> bool:
        """Whether an eligible member has work of a kind."""
        return next(self.eligible(kind), None) is not None

    def eligible(self, kind: int) -> Iterator[str]:
        """The eligible members that have work of a kind, the least served first."""
        for place in self._by_kind[kind]:
            if place.service >= self._limit:
                return
            yield place.key

    def near(self, kind: int) -> Iterator[str]:
        """Members that have work of a kind, less than a quantum above the least, the least first.

        These are the eligible ones and those that would be if deficits were refilled now: who has
        used up its own first does not wait until others have.
        """
        first = self._first()
        for place in self._by_kind[kind]:
            if first is None or place.service >= first.service + self._quantum:
                return
            yield place.key

    def _first(self) -> _Place | None:
        """Where the ready member with the least service stands."""
        return min((places[0] for places in self._by_kind if places), default=None)

    def most_served(self, kind: int) -> Iterator[str]:
        """The eligible members that have work of a kind, the most served first."""
        places = self._by_kind[kind]
        for index in range(bisect_left(places, (self._limit,)) - 1, -1, -1):
            yield places[index].key

    def ready(self) -> Iterator[str]:
        """All ready members; the least served first within each kind. Some may come twice."""
        for places in self._by_kind:
            for place in places:
                yield place.key

    def update(self, key: str, kinds: Sequence[int], since: int = 0) -> None:
        """Say what a member has ready.

        Args:
            key: the member.
            kinds: of its work; none if it has nothing ready.
            since: orders members of equal service, the lower first.
        """
        if not kinds:
            if key in self._ready:
                self._withdraw(key)
                self._leave(key)
                self._renew()
            return
        if key in self._ready:
            service = self._services[key]
        else:
            service = self._services[key] = max(self.service(key), self._floor)
            self._absent.pop(key, None)
        found = (_Place(service, since, key), tuple(kinds))
        if self._ready.get(key) != found:
            self._withdraw(key)
            self._enter(*found)
            self._renew()

    def charge(self, key: str, tokens: float) -> None:
        """Enter what a member was given; less than nothing takes a charge back."""
        self._services[key] = self.service(key) + tokens / self._weight(key)
        if key not in self._ready:
            self._leave(key)
            return
        place, kinds = self._ready[key]
        self._withdraw(key)
        self._enter(place._replace(service=self._services[key]), kinds)
        self._renew()

    def _enter(self, place: _Place, kinds: tuple[int, ...]) -> None:
        self._ready[place.key] = place, kinds
        for kind in kinds:
            insort(self._by_kind[kind], place)

    def _withdraw(self, key: str) -> None:
        if key in self._ready:
            place, kinds = self._ready.pop(key)
            for kind in kinds:
                places = self._by_kind[kind]
                del places[bisect_left(places, place)]

    def _leave(self, key: str) -> None:
        self._absent[key] = None
        self._absent.move_to_end(key)
        if len(self._absent) > _REMEMBERED:
            longest, _ = self._absent.popitem(last=False)
            del self._services[longest]

    def _renew(self) -> None:
        """Lift the floor, and refill the deficits if all are spent."""
        least = self.least_served()
        if least is None:
            return
        service = self._services[least]
        self._floor = max(self._floor, service)
        if service >= self._limit:
            self._limit = service + self._quantum
