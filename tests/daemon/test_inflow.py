"""Clients' bytes: in slices, in order, held back while they are ahead, and bounded."""

import asyncio
import hashlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from aiohttp import web

from umbel.daemon.http.connections import Connections, behind_connections, connection_of
from umbel.daemon.http.inflow import MOST_AHEAD, SLICE, Ahead, Inflow
from umbel.daemon.http.server import WireProtocol

PATIENCE = 60.0
BODY = bytes(itertools.islice(itertools.cycle(range(251)), 10 * SLICE + 7))
GET = b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n"


class Transport:
    """A transport that remembers whether it reads."""

    reading = True

    def is_closing(self) -> bool:
        """Never."""
        return False

    def pause_reading(self) -> None:
        """Twice in a row is an error."""
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        """Twice in a row is an error."""
        assert not self.reading
        self.reading = True


class World:
    """An inflow between a transport and what aiohttp would get.

    Attributes:
        got: what it was given; None stands for a turn of the event loop.
        dropped: how often the connection was ended.
    """

    def __init__(self, ahead: Ahead | None = None) -> None:
        self.ahead = ahead or Ahead()
        self.got: list[bytes | None] = []
        self.dropped = 0
        self.transport = Transport()
        self.inflow = Inflow(self.ahead, self.got.append, self._drop)
        self.inflow.begin(cast("asyncio.Transport", self.transport))

    def _drop(self) -> None:
        self.dropped += 1

    @property
    def data(self) -> bytes:
        """All that was given."""
        return b"".join(filter(None, self.got))

    async def turns(self, count: int = 40) -> None:
        """Let the event loop turn, and note each turn."""
        for _ in range(count):
            await asyncio.sleep(0)
            self.got.append(None)


def test_a_large_read_is_given_in_slices() -> None:
    """Each in a turn of its own, and the transport pauses until the last."""

    async def scenario() -> None:
        world = World()
        world.inflow.receive(BODY)
        assert not world.transport.reading
        await world.turns()
        assert world.data == BODY
        assert max(len(part) for part in world.got if part) <= SLICE
        given = [index for index, part in enumerate(world.got) if part]
        assert all(None in world.got[a:b] for a, b in itertools.pairwise(given))
        assert world.transport.reading
        assert (world.ahead.nbytes, world.dropped) == (0, 0)

    asyncio.run(scenario())


def test_later_bytes_wait_for_their_turn() -> None:
    """Also where aiohttp holds and goes on in between, more than once a turn."""

    async def scenario() -> None:
        world = World()
        world.inflow.receive(BODY)
        world.inflow.receive(b"later")
        await world.turns(2)
        world.inflow.hold()
        before = world.data
        await world.turns()
        assert world.data == before
        for _ in range(3):
            world.inflow.release()
            world.inflow.hold()
        world.inflow.release()
        world.inflow.receive(b"last")
        await world.turns()
        assert world.data == BODY + b"later" + b"last"
        assert max(len(part) for part in world.got if part) <= SLICE
        given = [index for index, part in enumerate(world.got) if part]
        assert all(None in world.got[a:b] for a, b in itertools.pairwise(given))

    asyncio.run(scenario())


def test_bytes_ahead_wait_while_the_transport_reads() -> None:
    """A client that leaves is seen, whatever aiohttp wants; then its next request comes."""

    async def scenario() -> None:
        world = World()
        world.inflow.handle(whole=False)
        world.inflow.receive(b"body")
        world.inflow.answer()
        world.inflow.receive(b"ahead")
        world.inflow.hold()
        await world.turns()
        assert (world.data, world.ahead.nbytes, world.transport.reading) == (b"body", 5, True)
        world.inflow.release()
        await world.turns()
        assert world.data == b"body"
        world.inflow.finish()
        assert not world.transport.reading
        await world.turns()
        assert (world.data, world.ahead.nbytes) == (b"bodyahead", 0)
        assert world.transport.reading

    asyncio.run(scenario())


def test_nothing_is_taken_behind_an_answer_that_is_not_read() -> None:
    """Later bytes stay with the kernel, except one read."""

    async def scenario() -> None:
        world = World()
        world.inflow.set_unread(True)
        assert world.transport.reading
        world.inflow.receive(b"next")
        await world.turns()
        assert (world.data, world.transport.reading) == (b"", False)
        world.inflow.set_unread(False)
        await world.turns()
        assert (world.data, world.transport.reading) == (b"next", True)

    asyncio.run(scenario())


def test_only_bytes_ahead_are_bounded() -> None:
    """A body may be as large as it likes; a byte too many sent ahead is not taken."""

    async def scenario() -> None:
        world = World()
        world.inflow.handle(whole=False)
        world.inflow.receive(bytes(2 * MOST_AHEAD))
        await world.turns()
        assert (len(world.data), world.dropped) == (2 * MOST_AHEAD, 0)
        world.inflow.answer()
        world.inflow.receive(bytes(MOST_AHEAD))
        assert (world.ahead.nbytes, world.dropped) == (MOST_AHEAD, 0)
        world.inflow.receive(b"x")
        assert (world.ahead.nbytes, world.dropped) == (0, 1)
        await world.turns()
        assert len(world.data) == 2 * MOST_AHEAD

    asyncio.run(scenario())


def test_the_client_with_most_ahead_is_cut_off() -> None:
    """Not who came last with little; and what is lost with a connection counts no more."""

    async def scenario() -> None:
        ahead = Ahead(1000)
        much, more, little = (World(ahead) for _ in range(3))
        for world, size in ((much, 400), (more, 500), (little, 100)):
            world.inflow.handle(whole=True)
            world.inflow.answer()
            world.inflow.receive(bytes(size))
        assert (ahead.nbytes, more.dropped) == (1000, 0)
        little.inflow.receive(b"x")
        assert (much.dropped, more.dropped, little.dropped) == (0, 1, 0)
        assert ahead.nbytes == 501
        much.inflow.end()
        assert ahead.nbytes == 101

    asyncio.run(scenario())


class Server:
    """Real sockets, a real event loop and aiohttp, and a handler that says what it got.

    Attributes:
        connections: all of them.
        path: of its socket.
        begun: requests that were handled.
        ended: of these, who were answered or cancelled.
        gate: set, it lets requests of `/held` be answered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connections = Connections(500, header_timeout=60, idle_timeout=60, write_timeout=60)
        self.begun = self.ended = 0
        self.gate = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        """Read the body, and answer with its digest."""
        connection = connection_of(request)
        assert connection is not None
        self.begun += 1
        try:
            with connection.handling(request):
                digest = hashlib.sha256(await request.content.read()).hexdigest()
                connection.answering()
                if request.path == "/held":
                    await self.gate.wait()
                return web.Response(text=digest)
        finally:
            self.ended += 1


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    """Run a server until the block ends."""
    with tempfile.TemporaryDirectory(prefix="u") as folder:
        server = Server(Path(folder) / "s")
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        loop = asyncio.get_running_loop()

        def protocol() -> WireProtocol:
            assert runner.server is not None
            return WireProtocol(runner.server, loop=loop, read_bufsize=1 << 16)

        listener = await loop.create_unix_server(
            behind_connections(server.connections, protocol), str(server.path)
        )
        try:
            async with asyncio.timeout(PATIENCE):
                yield server
        finally:
            listener.close()
            await runner.cleanup()


def served(scenario: Callable[[Server], Awaitable[None]]) -> None:
    """Run a scenario beside a server."""

    async def run() -> None:
        async with serving() as server:
            await scenario(server)

    uvloop.run(run())


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a server's socket."""
    return await asyncio.open_unix_connection(str(server.path))


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop turn until something is true; the server's block bounds the wait."""
    while not condition():  # noqa: ASYNC110  (no event tells of it)
        await asyncio.sleep(0)


async def reply(reader: asyncio.StreamReader) -> str:
    """Read one answer's body."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return (await reader.readexactly(length)).decode()


def request(body: bytes, chunk: int = 0, path: str = "/") -> bytes:
    """Write a request, its body in chunks of a size or, without one, as it is."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\n".encode()
    if not chunk:
        return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    parts = (body[start : start + chunk] for start in range(0, len(body), chunk))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def digest(body: bytes) -> str:
    """Return the server's answer to a body."""
    return hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("chunk", [0, 1, 1000, SLICE, 3 * SLICE])
def test_bodies_arrive_unchanged(chunk: int) -> None:
    """Larger than several slices, one after the other on a connection that is kept alive."""
    bodies = [BODY, BODY[::-1], b"short", BODY[5:]]

    async def scenario(server: Server) -> None:
        reader, writer = await connect(server)
        for body in bodies:
            writer.write(request(body, chunk))
            assert await reply(reader) == digest(body)
        writer.close()

    served(scenario)


@pytest.mark.parametrize("chunk", [0, 7])
def test_pipelined_requests_arrive_unchanged(chunk: int) -> None:
    """Sent at once, before any is answered."""
    bodies = [BODY[index : index + 20_000 + index] for index in range(8)]

    async def scenario(server: Server) -> None:
        reader, writer = await connect(server)
        writer.write(b"".join(request(body, chunk) for body in bodies))
        assert [await reply(reader) for _ in bodies] == [digest(body) for body in bodies]
        writer.close()

    served(scenario)


def test_a_client_that_leaves_while_bytes_are_held_is_noticed() -> None:
    """Its handled request ends, and the one sent ahead never begins nor counts."""

    async def scenario(server: Server) -> None:
        _, writer = await connect(server)
        writer.write(request(BODY, path="/held") + request(BODY[: MOST_AHEAD // 2]))
        await until(lambda: server.connections.ahead.nbytes)
        writer.close()
        await until(lambda: server.ended and not len(server.connections))
        assert server.connections.ahead.nbytes == 0
        assert (server.begun, server.ended) == (1, 1)

    served(scenario)


def test_a_client_that_leaves_behind_a_get_is_noticed() -> None:
    """It is whole from the start: the transport reads on, whatever follows it."""

    async def scenario() -> None:
        world = World()
        world.inflow.handle(whole=True)
        world.inflow.receive(b"ahead")
        world.inflow.hold()
        await world.turns()
        assert (world.data, world.ahead.nbytes, world.transport.reading) == (b"", 5, True)

    asyncio.run(scenario())


def test_a_half_closed_connection_ends() -> None:
    """Half-closed right behind a body of many slices, the connection ends all the same."""

    async def scenario(server: Server) -> None:
        reader, writer = await connect(server)
        writer.write(request(BODY, path="/held"))
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: server.ended == server.begun and not len(server.connections))
        assert server.begun == server.ended <= 1

    served(scenario)


def test_all_clients_together_send_no_more_ahead_than_their_bound() -> None:
    """Each within its own bound; those cut off are no more than need be, and others are served."""

    async def scenario(server: Server) -> None:
        ahead = server.connections.ahead
        most = 0

        def watch() -> None:
            nonlocal most
            most = max(most, ahead.nbytes)
            loop.call_soon(watch)

        loop = asyncio.get_running_loop()
        loop.call_soon(watch)
        count = ahead.limit // MOST_AHEAD + 20
        clients = [await connect(server) for _ in range(count)]
        for _, writer in clients:
            writer.write(GET)
        await until(lambda: server.begun == count)
        padding = request(bytes(MOST_AHEAD - 1000))
        await asyncio.gather(
            *(_sent(writer, padding) for _, writer in clients), return_exceptions=True
        )
        await until(lambda: len(server.connections) == count - 20)
        bystander = await connect(server)
        bystander[1].write(request(BODY))
        assert await reply(bystander[0]) == digest(BODY)
        assert ahead.limit - MOST_AHEAD < most <= ahead.limit
        server.gate.set()
        answers = await asyncio.gather(
            *(_both(reader) for reader, _ in clients), return_exceptions=True
        )
        whole = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert len(whole) == count - 20
        assert {tuple(answer) for answer in whole} == {
            (digest(b""), digest(bytes(MOST_AHEAD - 1000)))
        }
        assert ahead.nbytes == 0
        for _, writer in [*clients, bystander]:
            writer.close()

    served(scenario)


async def _sent(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _both(reader: asyncio.StreamReader) -> list[Any]:
    return [await reply(reader), await reply(reader)]
