"""Requests on their way to the queue, those of one conversation in the order in which they came.

A small request is decoded and tokenised sooner than a large one that came before it. If both name
the same conversation, or come from the same agent's session, it waits for that one here.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import msgspec

from ...scheduler.times import Activity, Times
from ..http.bodies import Share
from ..identity.caller import Caller
from ..identity.conversations import OrderKey


class Wait:
    """A request's deadline, and its place among those that wait until it is queued."""

    def __init__(
        self,
        arrived_at: float,  # on the engine's clock, in seconds
        asked: float | None = None,  # seconds that it may take; None for the daemon's own limit
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arrived_at = arrived_at
        self._asked = math.inf if asked is None else asked
        self._clock = clock
        self._give_back: Callable[[], object] | None = None

    def deadline(self, most: float) -> float:
        """Return when it must have ended, if the daemon allows `most` seconds."""
        return self.arrived_at + min(self._asked, most)

    def left(self, most: float) -> float:
        """Return the seconds until then; 0 if it is late."""
        return max(0.0, self.deadline(most) - self._clock())

    @property
    def has_place(self) -> bool:
        """True if it is counted among the waiting requests."""
        return self._give_back is not None

    def take_place(self, give_back: Callable[[], object]) -> None:
        """Hold a place; `give_back` is called once, when it is given back."""
        self._give_back = give_back

    def give_place_back(self) -> None:
        """Give the place back, if there is one."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class ArrivalStatus(msgspec.Struct, frozen=True):
    """A request that has come and is not queued yet, as `/status` shows it."""

    request: str
    tenant: str
    conversation: str  # the request's id, if it names none
    model: str | None  # None until it is read
    priority: str
    activity: Activity
    seconds: dict[Activity, float]  # of each activity so far


class Arrivals:
    """The requests of each tenant that have come and are not queued yet. For the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._by_tenant: dict[str, dict[Arrival, None]] = {}

    def arrive(self, request_id: str, caller: Caller, share: Share, wait: Wait) -> "Arrival":
        """Note a request whose body has come; it must `leave`."""
        arrival = Arrival(self, request_id, caller, share, wait)
        self._by_tenant.setdefault(caller.tenant, {})[arrival] = None
        return arrival

    def describe(self, most: int, tenant: str | None = None) -> list[ArrivalStatus]:
        """Describe at most so many requests of a tenant, or of all tenants, the oldest first."""
        whose = self._by_tenant if tenant is None else [tenant]
        found = (each for name in whose for each in self._by_tenant.get(name, ()))
        return [each.describe() for each in islice(found, most)]

    def before(self, arrival: "Arrival") -> "list[Arrival]":
        """Return the requests of the same tenant that came before, the oldest first."""
        earlier = []
        for each in self._by_tenant.get(arrival.tenant, ()):
            if each is arrival:
                break
            earlier.append(each)
        return earlier

    def remove(self, arrival: "Arrival") -> None:
        """Forget a request. Idempotent."""
        there = self._by_tenant.get(arrival.tenant, {})
        there.pop(arrival, None)
        if not there:
            self._by_tenant.pop(arrival.tenant, None)

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))


class Arrival:
    """A request from the moment its body has come until it is queued."""

    def __init__(
        self, arrivals: Arrivals, request_id: str, caller: Caller, share: Share, wait: Wait
    ) -> None:
        self.request_id = request_id  # in the log and the answer's headers
        self.caller = caller
        self.share = share  # bytes of the budget that its body, and then its prompt, hold
        self.wait = wait
        self.model: str | None = None  # None until it is read
        self.conversation = caller.conversation  # or the body's, once that is read
        self.priority = caller.priority  # or the body's
        self.keys = frozenset[OrderKey]()  # earlier requests with one of them are queued first
        self.has_keys = asyncio.Event()  # or has left
        self.has_left = asyncio.Event()  # it is queued, or has ended
        self._arrivals = arrivals
        self._times = Times(Activity.TOKENIZE, arrivals.clock())

    @property
    def tenant(self) -> str:
        """The tenant that sent it."""
        return self.caller.tenant

    def set_keys(self, keys: Iterable[OrderKey]) -> None:
        """Say which earlier requests it waits for; none, if it has no keys."""
        self.keys = frozenset(keys)
        self.has_keys.set()

    async def wait_for_earlier(self) -> None:
        """Wait until all earlier requests with one of its keys have left."""
        for earlier in self._arrivals.before(self) if self.keys else ():
            if earlier.has_keys.is_set() and not earlier.keys & self.keys:
                continue
            with self.waiting(Activity.CONVERSATION):
                await earlier.has_keys.wait()
                if earlier.keys & self.keys:
                    await earlier.has_left.wait()

    @contextmanager
    def waiting(self, activity: Activity) -> Iterator[None]:
        """Count the block's time as a wait for something."""
        self._times.note(activity, self._arrivals.clock())
        try:
            yield
        finally:
            self._times.note(Activity.TOKENIZE, self._arrivals.clock())

    def seconds(self) -> dict[Activity, float]:
        """Return the seconds of each activity so far, of those that took any."""
        found = self._times.seconds(self._arrivals.clock())
        return {activity: seconds for activity, seconds in found.items() if seconds}

    def describe(self) -> ArrivalStatus:
        """Describe it for `/status`."""
        seconds = self._times.seconds(self._arrivals.clock())
        return ArrivalStatus(
            request=self.request_id,
            tenant=self.tenant,
            conversation=self.conversation or self.request_id,
            model=self.model,
            priority=self.priority.name.lower(),
            activity=self._times.activity,
            seconds={activity: round(passed, 3) for activity, passed in seconds.items()},
        )

    def queue(self) -> None:
        """Give up its places here: it is queued now. Idempotent."""
        self.wait.give_place_back()
        self.leave()

    def leave(self) -> None:
        """It is queued, or has ended. Idempotent."""
        self._arrivals.remove(self)
        self.has_keys.set()
        self.has_left.set()
