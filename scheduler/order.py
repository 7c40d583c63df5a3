"""The order in which requests start: fair between tenants, the longest cached prefix within one.

A tenant has one counter, its *service*: the tokens that it was charged, over its weight (virtual
token counters: Sheng et al., OSDI 2024, arXiv 2401.00588). Among the tenants that were served less
than a quantum more than the least served one, the request with the longest cached prefix goes first
(DLPM: Cao et al., arXiv 2501.14312).

Invariants, as long as no charge is taken back:

1. A request waits or runs, and is in the order once.
2. Requests of a unit start in the order of their arrival, so many at a time as the next one says.
3. A tenant whose service is a quantum or more above the least of the tenants that could start a
   request starts none, unless no other request can start. So tenants that always have requests are
   never further apart than a quantum and what one of them was charged since its last start.
4. A tenant that could start none before has at least the *floor* when it can: the highest value
   that the least service of the others ever had. Time without requests earns nothing (VTC's lift).
5. Of every `patience` requests that a tenant starts, one is the oldest that it can start (k-LPM,
   arXiv 2502.04677). So a request is passed over by a bounded number of its tenant's.

Requests of `interactive` priority go before those of `batch`. A tenant with interactive requests
alone is a quantum ahead in the end, and batch requests of others start then.

A decision looks at a *window* of a bounded number of requests, since to know a cached prefix is to
walk the cache: of the least served tenants first, of each at most half of the room that is left,
its oldest requests first.
"""

import enum
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from .tenants import Share

_REMEMBERED = 1024  # tenants without requests whose service above the floor is kept


class Priority(enum.IntEnum):
    """Which requests go first."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A request's place in the order."""

    id: str  # unique among all that wait or run
    tenant: str  # charged for it
    conversation: str  # its unit, within which it keeps its place; a name of this tenant
    priority: Priority = Priority.INTERACTIVE  # of the request
    parallel: int = 1  # how many requests of its unit may run when it starts, itself included


class Candidate(NamedTuple):
    """A request that may start now."""

    entry: Entry  # the request
    due: bool = False  # it is its tenant's oldest, and was passed over as often as it may be


class Policy(NamedTuple):
    """The order's constants."""

    quantum: float = 4096  # tokens per weight by which a tenant may be ahead of the least served
    patience: int = 16  # one of so many requests that a tenant starts is its oldest; at least 1
    looks: int = 64  # the most requests whose cached prefix a decision asks for


def rank(window: Iterable[Candidate], cached: Callable[[Entry], int]) -> list[Entry]:
    """Sort a window: what is due first, then by the tokens of the prompt that are `cached`."""
    ranked = sorted(window, key=lambda each: (not each.due, -cached(each.entry)))
    return [candidate.entry for candidate in ranked]


Numbered = tuple[int, Entry]  # A request and its number in the order of arrival

Able = Callable[[str], bool]  # true if a tenant may start a request now, as far as its quotas go


class _Running(NamedTuple):
    number: int
    entry: Entry
    is_due: bool


_NUMBER = itemgetter(0)


class _Unit:
    """Requests of a unit."""

    def __init__(self) -> None:
        self.waiting: list[Numbered] = []  # oldest first
        self.running = 0
        self.head: Numbered | None = None  # the request that may start now, as the tenant knows it


class _Tenant:
    """A tenant's service and units."""

    def __init__(self, name: str, service: float, patience: int) -> None:
        self.name = name
        self.service = service  # tokens per weight, lifts included
        self.was_ready = False  # it could start a request at the last decision
        self.units: dict[str, _Unit] = {}
        self.yielded: dict[str, Numbered] = {}  # requests that ran and wait again, by their ids
        self._patience = patience
        self._heads: list[list[Numbered]] = [[] for _ in Priority]  # of all units, oldest first
        self._num_passed_over = 0  # requests started since the oldest was

    @property
    def oldest(self) -> Numbered | None:
        """The oldest request that it can start."""
        return min((heads[0] for heads in self._heads if heads), key=_NUMBER, default=None)

    @property
    def since(self) -> int:
        """The number of that request; 0 without one."""
        return 0 if self.oldest is None else self.oldest[0]

    @property
    def due(self) -> Numbered | None:
        """The oldest request, if it goes first."""
        return self.oldest if self._num_passed_over >= self._patience - 1 else None

    def count_start(self, number: int) -> bool:
        """Note that a head starts; returns True if it was due."""
        oldest, due = self.oldest, self.due
        is_oldest = oldest is not None and oldest[0] == number
        self._num_passed_over = 0 if is_oldest else self._num_passed_over + 1
        return due is not None and due[0] == number

    def settle(self, name: str) -> None:
        """Note a unit's next request, and forget a unit without requests."""
        unit = self.units[name]
        head = unit.waiting[0] if unit.waiting else None
        if head is not None and unit.running >= head[1].parallel:
            head = None
        if unit.head != head:
            if unit.head is not None:
                heads = self._heads[unit.head[1].priority]
                del heads[bisect_left(heads, unit.head[0], key=_NUMBER)]
            if head is not None:
                insort(self._heads[head[1].priority], head, key=_NUMBER)
            unit.head = head
        if not unit.waiting and not unit.running:
            del self.units[name]

    def offers(self, priority: Priority, passed: Container[str] = ()) -> Iterator[Candidate]:
        """Yield requests of a priority, oldest first.

        One that is due comes first, and counts as interactive whatever its priority.
        """
        due = self.due if priority is Priority.INTERACTIVE else None
        if due is not None and due[1].id not in passed:
            yield Candidate(due[1], due=True)
        for numbered in self._heads[priority]:
            if numbered != due and numbered[1].id not in passed:
                yield Candidate(numbered[1])

    def heads(self) -> Iterator[Entry]:
        return (entry for heads in self._heads for _, entry in heads)


class FairOrder:
    """All requests that wait or run, and which of them start next.

    It has no clock, reads no cache and knows no quotas. Safe to call from one thread at a time.
    A request is charged its cost: the prompt tokens that are to be computed and the equal of its
    restored state when it starts, decoded tokens as they come, and corrections. A tenant's weight
    is asked at each charge, so that it may change. `start`, `charge`, `preempt` and `end` raise
    `KeyError` for a request that does not wait, or run.
    """

    def __init__(
        self, policy: Policy | None = None, weight: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        self._policy = policy or Policy()
        self.weight = weight
        self._floor = 0.0
        self._tenants: dict[str, _Tenant] = {}
        self._absent: OrderedDict[str, float] = OrderedDict()  # services, the longest absent first
        self._waiting: dict[str, Numbered] = {}
        self._running: dict[str, _Running] = {}
        self._count = 0

    @property
    def tenants(self) -> Iterable[str]:
        """The tenants of which a request waits or runs."""
        return self._tenants

    def share(self, tenant: str) -> Share:
        """Describe the service of a tenant: tokens per weight, lifts included."""
        there = self._tenants.get(tenant)
        service = self._absent.get(tenant, self._floor) if there is None else there.service
        return Share(tenant, service, self.weight(tenant))

    def is_head(self, entry: Entry) -> bool:
        """True if a request waits, and for no other request of its unit."""
        tenant = self._tenants.get(entry.tenant)
        unit = None if tenant is None else tenant.units.get(entry.conversation)
        return unit is not None and unit.head is not None and unit.head[1].id == entry.id

    def put(self, entry: Entry) -> None:
        """Add a request at the end. Raises `ValueError` if its id is taken."""
        if entry.id in self._waiting or entry.id in self._running:
            raise ValueError(f"request {entry.id} is in the order already")
        self._count += 1
        if entry.tenant not in self._tenants:
            service = self._absent.pop(entry.tenant, self._floor)
            self._tenants[entry.tenant] = _Tenant(entry.tenant, service, self._policy.patience)
        self._tenants[entry.tenant].units.setdefault(entry.conversation, _Unit())
        self._wait(self._count, entry)

    def window(self, able: Able = lambda _: True, passed: Container[str] = ()) -> list[Candidate]:
        """List the requests that may start next, for `rank`; empty if there is none.

        If all within the quantum have `passed`, as they could not start when they were looked at,
        others follow: no slot stays empty.
        """
        ready, looks = self._ready(able), self._policy.looks
        for priority in Priority:
            offering = [t for t in self._near(ready) if any(t.offers(priority))][:looks]
            found: list[Candidate] = []
            for place, tenant in enumerate(offering, 1):
                room = looks - len(found)
                most = room if place == len(offering) else max(1, room // 2)
                found += islice(tenant.offers(priority, passed), min(most, room))
            if found:
                return found
        rest = (Candidate(e) for t in ready for e in t.heads() if e.id not in passed)
        return list(islice(rest, looks))

    def claimants(self, able: Able = lambda _: True) -> list[Share]:
        """List the tenants to which others yield: near ones that have an interactive request."""
        near = self._near(self._ready(able))
        offering = [t.name for t in near if any(t.offers(Priority.INTERACTIVE))]
        return list(map(self.share, offering[: self._policy.looks]))

    def offers(self, tenant: str, passed: Container[str] = ()) -> list[Candidate]:
        """List the interactive requests of one tenant that may start next, for `rank`."""
        if tenant not in self._tenants:
            return []
        offers = self._tenants[tenant].offers(Priority.INTERACTIVE, passed)
        return list(islice(offers, self._policy.looks))

    def yielded(self, able: Able, passed: Container[str]) -> list[Candidate]:
        """List requests of some tenants that ran, yielded, and may go on."""
        found = [
            (entry.priority, number, Candidate(entry))
            for tenant in self._tenants.values()
            if tenant.yielded and able(tenant.name)
            for number, entry in tenant.yielded.values()
            if entry.id not in passed and self.is_head(entry)
        ]
        return [candidate for *_, candidate in sorted(found)]

    def runs(self, ids: Iterable[str]) -> list[tuple[Entry, bool]]:
        """List running requests, the oldest first, and if they were due when they started."""
        found = sorted((self._running[each] for each in ids), key=_NUMBER)
        return [(each.entry, each.is_due) for each in found]

    def start(self, request_id: str, tokens: float) -> Entry:
        """Move a candidate to those that run, at the cost of its prompt, as far as it is known.

        Raises `ValueError` if it waits for others of its unit.
        """
        number, entry = self._waiting[request_id]
        if not self.is_head(entry):
            raise ValueError(f"request {request_id} waits for others of its conversation")
        tenant = self._tenants[entry.tenant]
        unit = tenant.units[entry.conversation]
        is_due = tenant.count_start(number)
        del self._waiting[request_id], unit.waiting[0]
        tenant.yielded.pop(request_id, None)
        self._running[request_id] = _Running(number, entry, is_due)
        unit.running += 1
        self.charge(request_id, tokens)
        tenant.settle(entry.conversation)
        return entry

    def charge(self, request_id: str, tokens: float) -> None:
        """Charge a running request for more; less than nothing takes a charge back."""
        name = self._running[request_id].entry.tenant
        self._tenants[name].service += tokens / self.weight(name)

    def preempt(self, request_id: str) -> None:
        """Let a running request wait again, at its old place."""
        number, entry, _ = self._stop(request_id)
        self._tenants[entry.tenant].yielded[request_id] = number, entry
        self._wait(number, entry)

    def end(self, request_id: str) -> None:
        """Forget a running request."""
        self._settle(self._stop(request_id).entry)

    def remove(self, request_id: str) -> bool:
        """Forget a waiting request; False when it does not wait (any more)."""
        if request_id not in self._waiting:
            return False
        number, entry = self._waiting.pop(request_id)
        tenant = self._tenants[entry.tenant]
        tenant.yielded.pop(request_id, None)
        waiting = tenant.units[entry.conversation].waiting
        del waiting[bisect_left(waiting, number, key=_NUMBER)]
        self._settle(entry)
        return True

    def _ready(self, able: Able) -> list[_Tenant]:
        """Return the tenants that could start a request, least served first; lift new ones."""
        ready = {t.name: t for t in self._tenants.values() if t.oldest and able(t.name)}
        stayed = [tenant.service for tenant in ready.values() if tenant.was_ready]
        self._floor = max(self._floor, min(stayed, default=self._floor))
        for tenant in self._tenants.values():
            if tenant.name in ready and not tenant.was_ready:
                tenant.service = max(tenant.service, self._floor)
            tenant.was_ready = tenant.name in ready
        return sorted(ready.values(), key=lambda each: (each.service, each.since))

    def _near(self, ready: list[_Tenant]) -> list[_Tenant]:
        """Return the first of sorted tenants: those within a quantum of the least served one."""
        return [t for t in ready if t.service < ready[0].service + self._policy.quantum]

    def _wait(self, number: int, entry: Entry) -> None:
        self._waiting[entry.id] = number, entry
        waiting = self._tenants[entry.tenant].units[entry.conversation].waiting
        insort(waiting, (number, entry), key=_NUMBER)
        self._settle(entry)

    def _stop(self, request_id: str) -> _Running:
        stopped = self._running.pop(request_id)
        self._tenants[stopped.entry.tenant].units[stopped.entry.conversation].running -= 1
        return stopped

    def _settle(self, entry: Entry) -> None:
        tenant = self._tenants[entry.tenant]
        tenant.settle(entry.conversation)
        if not tenant.units:
            self._absent[entry.tenant] = tenant.service
            del self._tenants[entry.tenant]
            if len(self._absent) > _REMEMBERED:
                self._absent.popitem(last=False)
