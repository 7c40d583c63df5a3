"""Keeps requests of one conversation in the order in which they came, until they are queued.

A small request is decoded and tokenised sooner than a large one that came before it. Where both
name the same conversation, or come from the same agent's session, it waits for that one here.
"""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple


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


class Arrivals:
    """The requests of each tenant that have come and are not queued yet. For the event loop."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[Arrival, None]] = {}

    def arrive(self, tenant: str) -> "Arrival":
        """Note a request whose body has come; it must `leave`."""
        arrival = Arrival(self, tenant)
        self._by_tenant.setdefault(tenant, {})[arrival] = None
        return arrival

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
        lines: what it follows others in.
        read: set when that is known, or when it has left.
        left: set when it is queued, or has ended.

    Args:
        arrivals: where it is.
        tenant: whose it is.
    """

    def __init__(self, arrivals: Arrivals, tenant: str) -> None:
        self.tenant = tenant
        self._arrivals = arrivals
        self.lines = frozenset[Line]()
        self.read = asyncio.Event()
        self.left = asyncio.Event()

    def know(self, lines: Iterable[Line]) -> None:
        """Say what it follows others in; nothing, if nothing has a name."""
        self.lines = frozenset(lines)
        self.read.set()

    async def turn(self) -> None:
        """Wait until all of its lines that came before it have left."""
        for earlier in self._arrivals.before(self) if self.lines else ():
            await earlier.read.wait()
            if earlier.lines & self.lines:
                await earlier.left.wait()

    def leave(self) -> None:
        """It is queued, or has ended. Idempotent."""
        self._arrivals.remove(self)
        self.read.set()
        self.left.set()
