"""Open connections: how many there may be, how long each may stay silent, which makes room.

aiohttp answers requests; it bounds neither connections nor the time that headers take, and while
more is pipelined than it takes, it does not see a client leave. So each of its protocols stands
behind a `Connection`, which the transport talks to, and an `Inflow` between the two holds back
bytes that are sent ahead.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import structlog
from aiohttp import web

from ..identity.tenants import is_operators, peer_name
from .failures import APIError
from .inflow import Ahead, Inflow

_FOR_OPERATORS = 8
"""Connections beyond the limit that are for an operator who has fewer."""

_WRITE_PATIENCE = 1.25
"""Of `write_timeout`: a stream notices first that it is not read, and says so in the log."""

log = structlog.get_logger()


class Connections:
    """All connections of a daemon, within a bound.

    At the bound, the connection that has been idle longest makes room. If all have a request, the
    tenant with most connections that wait for their client loses the oldest of them: its body
    does not come, or its answer is not read. If none waits for its client, the new connection is
    answered with a 503. An operator with few connections is let in all the same.

    All four bounds may change; waits that have begun keep the time that they were given.

    Args:
        limit: the most that may be open.
        header_timeout: seconds until a request's headers are complete, from its first byte on,
            or from the start of the connection.
        idle_timeout: seconds that a connection stays open after an answer without a request.
        write_timeout: seconds that an answer may stay unread.

    Attributes:
        ahead: the bytes that all clients have sent ahead of their answers.
    """

    def __init__(
        self, limit: int, *, header_timeout: float, idle_timeout: float, write_timeout: float
    ) -> None:
        self.limit = limit
        self.header_timeout = header_timeout
        self.idle_timeout = idle_timeout
        self.write_timeout = write_timeout
        self.ahead = Ahead()
        self._idle: dict[Connection, None] = {}  # the one that is idle longest comes first
        self._busy: set[Connection] = set()
        self._held: dict[Connection, str] = {}  # busy ones that wait for their client, by tenant
        self._operators = 0
        self._is_crowded = False

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def admit(self, connection: "Connection") -> bool:
        """Count a new connection; False if there is no room for it."""
        if len(self) >= self.limit and not self._make_room():
            operator_has_few = connection.operator and self._operators < _FOR_OPERATORS
            if not operator_has_few:
                return False
        self._idle[connection] = None
        self._operators += connection.operator
        return True

    def set_busy(self, connection: "Connection") -> None:
        """Note that a connection's request is being answered."""
        self._held.pop(connection, None)
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def set_held(self, connection: "Connection", tenant: str) -> None:
        """Note that a busy connection waits for its client: to send its body, or to read."""
        if connection in self._busy:
            self._held[connection] = tenant

    def set_idle(self, connection: "Connection") -> None:
        """Note that a connection waits for its next request."""
        self._held.pop(connection, None)
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def discard(self, connection: "Connection") -> None:
        """Forget a connection that has ended. Idempotent."""
        if connection not in self._idle and connection not in self._busy:
            return
        self._operators -= connection.operator
        self._held.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)
        if len(self) <= self.limit // 2:
            self._is_crowded = False

    def _make_room(self) -> bool:
        if not self._is_crowded:
            self._is_crowded = True
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


def behind_connections(
    registry: Connections, make_handler: Callable[[], asyncio.Protocol]
) -> Callable[[], asyncio.Protocol]:
    """Return a factory of connections that stand in front of aiohttp's protocols."""
    return lambda: Connection(registry, make_handler())


class Connection(asyncio.Protocol):
    """One connection, between its transport and aiohttp's protocol.

    While a request is answered, the transport goes on reading, so that it reports when the client
    leaves.

    Attributes:
        operator: True if the user that runs the daemon is at its other end.
        peer: an address, or a user of the Unix socket.
    """

    def __init__(self, registry: Connections, handler: asyncio.Protocol) -> None:
        self._registry = registry
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self.operator = False
        self.peer = ""
        self._tenant = ""  # of the latest request that was read
        self._is_admitted = False
        self._requests = 0  # that are being handled
        self._has_started = False  # bytes of the next request have come
        self._is_ending = False  # no further request will be read
        self._inflow = Inflow(registry.ahead, handler.data_received, self.drop)

    # -- events of the transport ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the connection in, or refuse it."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("socket")
        self.operator, self.peer = is_operators(peer), peer_name(peer)
        self._is_admitted = self._registry.admit(self)
        if not self._is_admitted:
            self._refuse(_no_room("all of them have a request; try again later"))
            return
        self._inflow.begin(self._transport)
        flow = _Flow(self, self._inflow, self._transport)
        self._handler.connection_made(cast("asyncio.Transport", flow))
        self._expect_headers(self._registry.header_timeout)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request; aiohttp gets them in their turn."""
        if not self._is_admitted:
            return
        if not (self._requests or self._unread or self._has_started or self._is_ending):
            self._has_started = True
            self._expect_headers(self._registry.header_timeout)
        self._inflow.receive(data)

    def eof_received(self) -> bool | None:
        """A client that will send no more has left: the transport closes."""
        return self._handler.eof_received() if self._is_admitted else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; aiohttp cancels its requests."""
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        self._inflow.end()
        self._transport = None
        if self._is_admitted:
            self._registry.discard(self)
            self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read: it has a while to go on. Until it has, it is not idle."""
        self._registry.set_busy(self)
        self._registry.set_held(self, self._tenant)
        if self._deadline is not None:
            self._deadline.cancel()
        self._expect_reading()
        self._inflow.set_unread(True)
        if self._is_admitted:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._registry.set_busy(self)
        self._inflow.set_unread(False)
        if self._is_admitted:
            self._handler.resume_writing()
        self._settle()

    def _expect_reading(self) -> None:
        if self._transport is None:
            return
        timeout = self._registry.write_timeout * _WRITE_PATIENCE
        unread = self._transport.get_write_buffer_size()
        self._unread = self._loop.call_later(timeout, self._still_unread, unread)

    def _still_unread(self, before: int) -> None:
        """Give a client that reads slowly another while, and end the others' connections."""
        if self._transport is not None and self._transport.get_write_buffer_size() < before:
            self._expect_reading()
        else:
            self.drop()

    # -- the life of a request --------------------------------------------------------------------

    @contextmanager
    def handling(self, request: web.Request) -> Iterator[None]:
        """Note that a request's headers are complete; the block handles it."""
        self._requests += 1
        self._has_started = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._registry.set_busy(self)
        self._inflow.handle(whole=request.content.is_eof())
        try:
            yield
        finally:
            self._requests -= 1
            # aiohttp reads the rest of a body for a while, and closes: no request follows it.
            self._is_ending = not request.content.is_eof()
            self._inflow.finish()
            self._settle()

    def _settle(self) -> None:
        """Wait for the next request, if the last one is answered and the answer was read."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._requests and self._unread is None:
            self._registry.set_idle(self)
            self._expect_headers(self._registry.idle_timeout)

    def reading(self, tenant: str) -> None:
        """Note that the body of a tenant's request is read: the client has to send it."""
        self._tenant = tenant
        self._registry.set_held(self, tenant)

    def answering(self) -> None:
        """Note that the request's body has been read."""
        self._registry.set_busy(self)
        self._inflow.answer()

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Let others have the connection's place while its answer waits in the block."""
        self._registry.set_held(self, "")
        try:
            yield
        finally:
            self._registry.set_busy(self)

    # -- its end ----------------------------------------------------------------------------------

    def drop(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def displace(self) -> None:
        """End the connection to make room: in words, unless an answer has begun."""
        if self._unread is None:
            self._refuse(_no_room("this one waited longest for its body"))
        else:
            self.drop()

    def close(self) -> None:
        """End the connection when all that was written has been read, or after a while."""
        if self._transport is None:
            return
        self._set_deadline(self._registry.write_timeout, self.drop)
        self._inflow.end()
        self._transport.close()

    def _expect_headers(self, seconds: float) -> None:
        self._set_deadline(seconds, self._on_late_headers)

    def _set_deadline(self, seconds: float, reaction: Callable[[], None]) -> None:
        """Call `reaction` in so many seconds, and drop the call that was set before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, reaction)

    def _on_late_headers(self) -> None:
        """Say so if some of the headers came, and close."""
        if self._has_started:
            seconds = self._registry.header_timeout
            message = f"the request's headers were not complete within {seconds:g} s"
            self._refuse(APIError(408, message, code="request_timeout"))
        else:
            self.close()

    def _refuse(self, error: APIError) -> None:
        if self._transport is not None:
            self._transport.write(error.raw_answer())
            self.close()


class _Flow:
    """The transport as aiohttp sees it: its pauses in reading go through the inflow."""

    def __init__(
        self, connection: Connection, inflow: Inflow, transport: asyncio.Transport
    ) -> None:
        self.connection = connection
        self.close = connection.close
        self.pause_reading = inflow.hold
        self.resume_reading = inflow.release
        self._transport = transport
        # Each token needs these: they are found without a detour.
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.get_write_buffer_size = transport.get_write_buffer_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def connection_of(request: web.Request) -> Connection | None:
    """Find the connection that a request came on; None when it has ended."""
    return getattr(request.transport, "connection", None)


def _no_room(reason: str) -> APIError:
    message = f"too many connections are open, and {reason}"
    return APIError(503, message, kind="server_error", code="too_many_connections", retry_after=2)
