"""Which connections are open: how many there may be, and which one makes room for another."""

from collections import Counter
from typing import Protocol

import structlog

from .inflow import Ahead

log = structlog.get_logger()


_FOR_OPERATORS = 8
"""Connections beyond the limit that are for an operator who has fewer."""


class Droppable(Protocol):
    """A connection, as far as it is known here."""

    operator: bool
    """Whether the one who runs the daemon is at its other end."""

    def drop(self) -> None:
        """End it at once."""

    def displace(self) -> None:
        """End it, in words where no answer has begun."""


class Connections:
    """All connections of a daemon, within a bound.

    Where the bound is reached, the connection that has been idle longest makes room. Where all
    have a request, the tenant that has most of those that wait for their client loses the oldest
    of them: its body does not come, or its answer is not read. Where none waits for its client,
    the new one is answered with a 503. An operator with few connections is let in all the same.

    All four bounds may change; what has begun keeps the time that it was given.

    Args:
        limit: the most that may be open.
        header_timeout: seconds until a request's headers are complete, from its first byte on,
            or from the start of the connection.
        idle_timeout: seconds that a connection stays open after an answer without a request.
        write_timeout: seconds that an answer may stay unread.

    Attributes:
        ahead: what all clients have sent ahead of their answers.
    """

    def __init__(
        self, limit: int, *, header_timeout: float, idle_timeout: float, write_timeout: float
    ) -> None:
        self.limit = limit
        self.header_timeout = header_timeout
        self.idle_timeout = idle_timeout
        self.write_timeout = write_timeout
        self.ahead = Ahead()
        self._idle: dict[Droppable, None] = {}  # the one that is idle longest comes first
        self._busy: set[Droppable] = set()
        self._held: dict[Droppable, str] = {}  # busy ones that wait for their client: whose
        self._operators = 0
        self._crowded = False

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def admit(self, connection: Droppable) -> bool:
        """Count a new connection; False when there is no room for it."""
        if len(self) >= self.limit and not self._make_room():
            operator_has_few = connection.operator and self._operators < _FOR_OPERATORS
            if not operator_has_few:
                return False
        self._idle[connection] = None
        self._operators += connection.operator
        return True

    def set_busy(self, connection: Droppable) -> None:
        """Note that a connection's request is being answered."""
        self._held.pop(connection, None)
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def set_held(self, connection: Droppable, tenant: str) -> None:
        """Note that a busy connection waits for its client: to send its body, or to read."""
        if connection in self._busy:
            self._held[connection] = tenant

    def set_idle(self, connection: Droppable) -> None:
        """Note that a connection waits for its next request."""
        self._held.pop(connection, None)
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def discard(self, connection: Droppable) -> None:
        """Forget a connection that has ended. Idempotent."""
        if connection not in self._idle and connection not in self._busy:
            return
        self._operators -= connection.operator
        self._held.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        if len(self) <= self.limit // 2:
            self._crowded = False

    def _make_room(self) -> bool:
        if not self._crowded:
            self._crowded = True
            log.warning(
                "too many connections: idle ones are closed, the oldest first",
                connections=len(self),
                idle=len(self._idle),
            )
        oldest = next(iter(self._idle), None)
        if oldest is not None:
            self.discard(oldest)
            oldest.drop()
            return True
        if not self._held:
            return False
        [(tenant, _)] = Counter(self._held.values()).most_common(1)
        oldest = next(each for each, whose in self._held.items() if whose == tenant)
        self.discard(oldest)
        oldest.displace()
        return True
