"""Whose request it is, what it holds, and where it stands before it is queued."""

from typing import NamedTuple

from ...scheduler.order import Priority
from ..http.bodies import Share
from ..requests.arrivals import Arrival
from .deadlines import Wait


class Caller(NamedTuple):
    """Whose request it is.

    Attributes:
        request_id: what it is called, here and in the answer's headers.
        tenant: who sent it.
        conversation: the name it gave, or None for a conversation of its own.
        session: of an agent, in which it may have several conversations.
        arrived_at: when, on the engine's clock, in seconds.
        share: what its body, and then its prompt, hold of the budget of bodies.
        wait: how long it may take, and its place among those who wait.
        priority: which requests go before it, among tenants that were served about as much.
        unit: see `Place`.
        operator: whether the one who runs the daemon has sent it.
        monitor: whether its tenant may see what all have.
        alone: the daemon has one user only, which has sent it over TCP.
        arrival: its place among those that came and are not queued yet; None where there is none.
    """

    request_id: str
    tenant: str
    conversation: str | None
    session: str | None
    arrived_at: float
    share: Share
    wait: Wait
    priority: Priority = Priority.INTERACTIVE
    unit: str | None = None
    operator: bool = False
    monitor: bool = False
    alone: bool = False
    arrival: Arrival | None = None

    @property
    def sees_only(self) -> str | None:
        """The tenant whose requests, state and figures it may see; None for everybody's."""
        return None if self.operator or self.monitor else self.tenant

    @property
    def watches_only(self) -> str | None:
        """The tenant of whom `/status` and `/metrics` tell it; None for everybody."""
        return None if self.alone else self.sees_only

    def queued(self) -> None:
        """Give up what it holds until it is queued. Idempotent."""
        self.wait.give_place_back()
        if self.arrival is not None:
            self.arrival.leave()
