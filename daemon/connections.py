"""Which connections are open: how many there may be, and which one makes room for another."""

from typing import Protocol

import structlog

from .inflow import Ahead

log = structlog.get_logger()


class Droppable(Protocol):
    """A connection, as far as it is known here."""

    def drop(self) -> None:
        """End it at once."""


class Connections:
    """All connections of a daemon, within a bound.

    Where the bound is reached, the connection that has been idle longest makes room; where all
    have a request, the new one is answered with a 503.

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
        self._crowded = False

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def admit(self, connection: Droppable) -> bool:
        """Count a new connection; False when there is no room for it."""
        if len(self) >= self.limit and not self._make_room():
            return False
        self._idle[connection] = None
        return True

    def set_busy(self, connection: Droppable) -> None:
        """Note that a connection's request is being answered."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def set_idle(self, connection: Droppable) -> None:
        """Note that a connection waits for its next request."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def discard(self, connection: Droppable) -> None:
        """Forget a connection that has ended."""
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
        if oldest is None:
            return False
        self.discard(oldest)
        oldest.drop()
        return True
