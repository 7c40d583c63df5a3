"""Bytes of clients on their way to aiohttp: a slice at a time, and within bounds.

aiohttp parses all that it is given at once, and a body in chunks of one byte takes it a hundred
times longer than a plain one. So it is given little at a time, and the event loop runs in between.
"""

import asyncio
from collections.abc import Callable

import structlog

SLICE = 32 << 10
"""Bytes that aiohttp is given at once: even in chunks of one byte they take it a few ms."""

MOST_AHEAD = 256 << 10
"""Bytes that one client may send ahead while its request is being answered."""

MOST_AHEAD_OF_ALL = 16 << 20
"""Bytes that all clients together may send ahead."""

log = structlog.get_logger()


class Ahead:
    """The bytes that all clients have sent ahead of their answers, within a bound.

    Beyond it, the client that sent most is cut off. A pause in reading would bound the memory too,
    but it would hide that a client leaves, so that its request would be computed in vain, and
    clients that sent little would wait for those that took the room.
    """

    def __init__(self, limit: int = MOST_AHEAD_OF_ALL) -> None:
        self.limit = limit
        self.nbytes = 0
        self._parts: dict[Inflow, int] = {}

    def part_of(self, inflow: "Inflow") -> int:
        """Return the bytes that one client has sent ahead."""
        return self._parts.get(inflow, 0)

    def count(self, inflow: "Inflow", nbytes: int) -> None:
        """Note how many bytes one client has sent ahead by now."""
        self.nbytes += nbytes - self._parts.pop(inflow, 0)
        if nbytes:
            self._parts[inflow] = nbytes
        while self.nbytes > self.limit:
            most = max(self._parts, key=self.part_of)
            most.cut_off("all clients together pipelined too much")


class Inflow:
    """One client's bytes. They reach aiohttp in slices, one for each turn of the event loop.

    Once a request has come whole, later bytes are sent ahead of its answer. They are held here,
    not given to aiohttp, so that all of them are counted. Otherwise the bytes held are the rest of
    one read of the transport, which then pauses until aiohttp has them.

    Args:
        ahead: counts the bytes that all clients have sent ahead.
        feed: aiohttp's `data_received`.
        drop: ends the connection at once.
    """

    def __init__(
        self, ahead: Ahead, feed: Callable[[bytes], None], drop: Callable[[], None]
    ) -> None:
        self._ahead = ahead
        self._feed = feed
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._held = bytearray()
        self._next: asyncio.Handle | None = None  # gives aiohttp the next slice
        self._is_answering = False  # a request that has come whole
        self._is_holding = False  # aiohttp wants nothing for now
        self._is_unread = False  # the client does not read its answer
        self._is_paused = False

    def begin(self, transport: asyncio.Transport) -> None:
        """Control the reading of this transport."""
        self._transport = transport

    def end(self) -> None:
        """Drop the bytes held: no handler will read them."""
        self._transport = None
        self._held.clear()
        self._ahead.count(self, 0)
        if self._next is not None:
            self._next.cancel()

    def cut_off(self, reason: str) -> None:
        """End the connection of a client that sent too much."""
        log.warning("a client was cut off", reason=reason, bytes=len(self._held))
        self.end()
        self._drop()

    def receive(self, data: bytes) -> None:
        """Give aiohttp these bytes after all earlier ones, now or in their turn."""
        if self._transport is None:
            return
        if self._flows and not self._held and len(data) <= SLICE:
            self._feed(data)
        else:
            self._held += data
            self._settle()

    def handle(self, *, whole: bool) -> None:
        """Note that a request is handled; it has come whole, or its body is to be read."""
        self._is_answering = whole
        self._settle()

    def answer(self) -> None:
        """Note that the request has come whole: from now on the transport reads without a pause."""
        self._is_answering = True
        self._settle()

    def finish(self) -> None:
        """Note that the request is answered: the next one may come."""
        self._is_answering = False
        self._settle()

    def hold(self) -> None:
        """Give aiohttp nothing for now."""
        self._is_holding = True
        self._settle()

    def release(self) -> None:
        """Give aiohttp more, soon: it may be in the middle of something."""
        self._is_holding = False
        self._settle()

    def set_unread(self, unread: bool) -> None:  # noqa: FBT001  (a state)
        """Let no request begin while an answer is not read."""
        self._is_unread = unread
        self._settle()

    @property
    def _flows(self) -> bool:
        return not (self._is_answering or self._is_holding or self._is_unread)

    def _settle(self) -> None:
        """Count the bytes held, and read and give as the state has it."""
        if self._is_answering and len(self._held) > MOST_AHEAD:
            self.cut_off("it pipelined too much")
        nbytes = len(self._held)
        if not self._is_answering:
            nbytes = min(nbytes, self._ahead.part_of(self))  # the transport read it for aiohttp
        self._ahead.count(self, nbytes)
        if self._held and self._flows and self._next is None:
            self._next = self._loop.call_soon(self._give)
        self._set_paused(not self._is_answering and bool(self._held or self._is_holding))

    def _give(self) -> None:
        """Give aiohttp a slice. Removing it from the front moves nothing of the rest."""
        self._next = None
        if not self._flows:
            return
        part = bytes(self._held[:SLICE])
        del self._held[:SLICE]
        self._feed(part)
        self._settle()

    def _set_paused(self, paused: bool) -> None:  # noqa: FBT001  (a state, and private)
        transport = self._transport
        if transport is None or transport.is_closing() or paused == self._is_paused:
            return
        self._is_paused = paused
        if paused:
            transport.pause_reading()
        else:
            transport.resume_reading()
