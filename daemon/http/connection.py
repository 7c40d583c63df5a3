"""An open connection: how long it may stay silent, and whether its client has left.

aiohttp answers requests; it bounds neither connections nor the time that headers take, and
while more is pipelined than it takes, it does not see a client leave. So each of its protocols
stands behind a `Connection`, which is what the transport knows, and an `Inflow` between the two
holds back what is sent ahead.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from aiohttp import web

from ..identity.peer import is_operators, peer_name
from .connections import Connections
from .failures import APIError
from .inflow import Inflow

_WRITE_PATIENCE = 1.25
"""Of `write_timeout`: a stream notices first that it is not read, and says so in the log."""


def behind_connections(
    registry: Connections, make_handler: Callable[[], asyncio.Protocol]
) -> Callable[[], asyncio.Protocol]:
    """Wrap what makes aiohttp's protocols into what makes ours."""
    return lambda: Connection(registry, make_handler())


class Connection(asyncio.Protocol):
    """One connection: what stands between its transport and aiohttp.

    While a request is answered, the transport goes on reading, so that it tells when the client
    leaves.

    Args:
        registry: of all connections.
        handler: aiohttp's protocol of this connection.

    Attributes:
        operator: whether the one who runs the daemon is at its other end.
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
        self._admitted = False
        self._requests = 0  # that are being handled
        self._begun = False  # bytes of the next request have come
        self._ending = False  # no further request will be read
        self._inflow = Inflow(registry.ahead, handler.data_received, self.drop)

    # -- of the transport ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the connection in, or refuse it."""
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("socket")
        self.operator, self.peer = is_operators(peer), peer_name(peer)
        self._admitted = self._registry.admit(self)
        if not self._admitted:
            self._refuse(_crowded())
            return
        self._inflow.begin(self._transport)
        flow = _Flow(self, self._inflow, self._transport)
        self._handler.connection_made(cast("asyncio.Transport", flow))
        self._expect_headers(self._registry.header_timeout)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request; aiohttp gets them in its turn."""
        if not self._admitted:
            return
        if not (self._requests or self._unread or self._begun or self._ending):
            self._begun = True
            self._expect_headers(self._registry.header_timeout)
        self._inflow.receive(data)

    def eof_received(self) -> bool | None:
        """A client that will send no more has left: the transport closes."""
        return self._handler.eof_received() if self._admitted else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; aiohttp cancels what is being answered."""
        for timer in (self._deadline, self._unread):
            if timer is not None:
                timer.cancel()
        self._inflow.end()
        self._transport = None
        if self._admitted:
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
        if self._admitted:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        self._registry.set_busy(self)
        self._inflow.set_unread(False)
        if self._admitted:
            self._handler.resume_writing()
        self._settle()

    def _expect_reading(self) -> None:
        if self._transport is None:
            return
        timeout = self._registry.write_timeout * _WRITE_PATIENCE
        unread = self._transport.get_write_buffer_size()
        self._unread = self._loop.call_later(timeout, self._still_unread, unread)

    def _still_unread(self, before: int) -> None:
        """Give who reads slowly another while, and end the others' connections."""
        if self._transport is not None and self._transport.get_write_buffer_size() < before:
            self._expect_reading()
        else:
            self.drop()

    # -- of requests ---------------------------------------------------------------------

    @contextmanager
    def handling(self, request: web.Request) -> Iterator[None]:
        """A request's headers are complete; the block handles it."""
        self._requests += 1
        self._begun = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._registry.set_busy(self)
        self._inflow.handle(whole=request.content.is_eof())
        try:
            yield
        finally:
            self._requests -= 1
            # aiohttp reads the rest of a body for a while, and closes: no request follows it.
            self._ending = not request.content.is_eof()
            self._inflow.finish()
            self._settle()

    def _settle(self) -> None:
        """Wait for the next request, if the last one is answered and the answer was taken."""
        if self._transport is None or self._transport.is_closing():
            return
        if not self._requests and self._unread is None:
            self._registry.set_idle(self)
            self._expect_headers(self._registry.idle_timeout)

    def reading(self, tenant: str) -> None:
        """The body of a tenant's request is read from now on: the client has to send it."""
        self._tenant = tenant
        self._registry.set_held(self, tenant)

    def answering(self) -> None:
        """The request's body has been read."""
        self._registry.set_busy(self)
        self._inflow.answer()

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """The answer waits for its turn: others may have the connection's place."""
        self._registry.set_held(self, "")
        try:
            yield
        finally:
            self._registry.set_busy(self)

    # -- of the end ----------------------------------------------------------------------

    def drop(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def displace(self) -> None:
        """End the connection for another's sake: in words, unless an answer has begun."""
        if self._unread is None:
            self._refuse(_displaced())
        else:
            self.drop()

    def _expect_headers(self, seconds: float) -> None:
        self._set_deadline(seconds, self._late)

    def _set_deadline(self, seconds: float, reaction: Callable[[], None]) -> None:
        """Call `reaction` in so many seconds; what was to be called before is not."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, reaction)

    def _late(self) -> None:
        """The headers did not come in time: say so if some of them did, and close."""
        if self._begun:
            self._refuse(_late(self._registry.header_timeout))
        else:
            self.close()

    def _refuse(self, error: APIError) -> None:
        if self._transport is not None:
            self._transport.write(error.raw_answer())
            self.close()

    def close(self) -> None:
        """End the connection when what was written has been read, or after a while."""
        if self._transport is None:
            return
        self._set_deadline(self._registry.write_timeout, self.drop)
        self._inflow.end()
        self._transport.close()


class _Flow:
    """The transport as aiohttp sees it: pauses in reading are the inflow's business."""

    def __init__(
        self, connection: Connection, inflow: Inflow, transport: asyncio.Transport
    ) -> None:
        self.connection = connection
        self._inflow = inflow
        self._transport = transport
        # What each token asks for is found without a detour.
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.get_write_buffer_size = transport.get_write_buffer_size

    def pause_reading(self) -> None:
        self._inflow.hold()

    def resume_reading(self) -> None:
        self._inflow.release()

    def close(self) -> None:
        self.connection.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def connection_of(request: web.Request) -> Connection | None:
    """Find the connection that a request came on; None when it has ended."""
    return getattr(request.transport, "connection", None)


def _crowded() -> APIError:
    message = "too many connections are open, and all of them have a request; try again later"
    return APIError(503, message, kind="server_error", code="too_many_connections", retry_after=2)


def _displaced() -> APIError:
    message = "too many connections are open, and this one waited longest for its body"
    return APIError(503, message, kind="server_error", code="too_many_connections", retry_after=2)


def _late(seconds: float) -> APIError:
    message = f"the request's headers were not complete within {seconds:g} s"
    return APIError(408, message, code="request_timeout")
