"""Keeps requests of one conversation in the order in which they came, until they are queued.

A small request is decoded and tokenised sooner than a large one that came before it. Where both
name the same conversation, or come from the same agent's session, it waits for that one here.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import msgspec

from ...scheduler.order import Priority
from ...scheduler.times import Activity, Times


class Line(NamedTuple):
    """What a request follows others in: a conversation, a response, or an agent's session.

    Attributes:
        model: whose queue it is: nobody waits until another model is loaded.
        kind: of the name.
        name: as the client says it.
    """

    model: str
    kind: str
    name: str


class ArrivalStatus(msgspec.Struct, frozen=True):
    """A request that has come and is not queued yet, as `/status` shows it.

    Attributes:
        conversation: the request's id, where it names none.
        model: that it asks for; None until that is read.
        activity: what is done with it, or what it waits for.
        seconds: of each activity so far.
    """

    request: str
    tenant: str
    conversation: str
    model: str | None
    priority: str
    activity: Activity
    seconds: dict[Activity, float]


class Arrivals:
    """The requests of each tenant that have come and are not queued yet. For the event loop.

    Args:
        clock: the engine's, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._by_tenant: dict[str, dict[Arrival, None]] = {}

    def arrive(self, tenant: str, request: str) -> "Arrival":
        """Note a request whose body has come; it must `leave`."""
        arrival = Arrival(self, tenant, request)
        self._by_tenant.setdefault(tenant, {})[arrival] = None
        return arrival

    def describe(self, most: int, tenant: str | None = None) -> list[ArrivalStatus]:
        """Describe requests, those of each tenant from the oldest on.

        Args:
            most: how many at most.
            tenant: whose; None for everybody's.
        """
        whose = self._by_tenant if tenant is None else [tenant]
        found = (each for name in whose for each in self._by_tenant.get(name, ()))
        return [each.describe() for each in islice(found, most)]

    def before(self, arrival: "Arrival") -> "list[Arrival]":
        """The requests of its tenant that came before one, the oldest first."""
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
        """How many requests there are."""
        return sum(map(len, self._by_tenant.values()))


class Arrival:
    """A request that has come and is not queued yet.

    Attributes:
        tenant: whose it is.
        request: its id.
        model: that it asks for; None until that is read.
        conversation: that it names, if it names one.
        priority: before whom it goes.
        lines: what it follows others in.
        read: set when that is known, or when it has left.
        left: set when it is queued, or has ended.

    Args:
        arrivals: where it is.
        tenant: whose it is.
        request: its id.
    """

    def __init__(self, arrivals: Arrivals, tenant: str, request: str) -> None:
        self.tenant = tenant
        self.request = request
        self.model: str | None = None
        self.conversation: str | None = None
        self.priority = Priority.INTERACTIVE
        self.lines = frozenset[Line]()
        self.read = asyncio.Event()
        self.left = asyncio.Event()
        self._arrivals = arrivals
        self._times = Times(Activity.TOKENIZE, arrivals.clock())

    def know(self, lines: Iterable[Line]) -> None:
        """Say what it follows others in; nothing, if nothing has a name."""
        self.lines = frozenset(lines)
        self.read.set()

    async def turn(self) -> None:
        """Wait until all of its lines that came before it have left."""
        for earlier in self._arrivals.before(self) if self.lines else ():
            if earlier.read.is_set() and not earlier.lines & self.lines:
                continue
            with self.waiting(Activity.CONVERSATION):
                await earlier.read.wait()
                if earlier.lines & self.lines:
                    await earlier.left.wait()

    @contextmanager
    def waiting(self, activity: Activity) -> Iterator[None]:
        """Have it wait for something for a while."""
        self._times.note(activity, self._arrivals.clock())
        try:
            yield
        finally:
            self._times.note(Activity.TOKENIZE, self._arrivals.clock())

    def seconds(self) -> dict[Activity, float]:
        """Seconds of each activity so far, of those that took any."""
        found = self._times.seconds(self._arrivals.clock())
        return {activity: seconds for activity, seconds in found.items() if seconds}

    def describe(self) -> ArrivalStatus:
        """Take its picture."""
        seconds = self._times.seconds(self._arrivals.clock())
        return ArrivalStatus(
            request=self.request,
            tenant=self.tenant,
            conversation=self.conversation or self.request,
            model=self.model,
            priority=self.priority.name.lower(),
            activity=self._times.activity,
            seconds={activity: round(passed, 3) for activity, passed in seconds.items()},
        )

    def leave(self) -> None:
        """It is queued, or has ended. Idempotent."""
        self._arrivals.remove(self)
        self.read.set()
        self.left.set()
