"""A client that stops reading its answer is cut off; one that reads hears all of it."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from aiohttp import ClientSession, UnixConnector, web

from umbel.daemon.http.exchange import EventStream
from umbel.scheduler.errors import SlowConsumerError

if TYPE_CHECKING:
    from umbel.daemon.protocols.answers import AnswerEncoder
    from umbel.daemon.requests.generation import Generations

BOUND = 20.0


class Endless:
    """Generations and their encoder: parts of a given size, so many.

    Attributes:
        given: parts that were asked for.
        failure: what it was told.
        failed: is set then.
    """

    def __init__(self, size: int, count: int) -> None:
        self._part, self._count = b"x" * size, count
        self.given = 0
        self.failure: Exception | None = None
        self.failed = asyncio.Event()

    async def next(self) -> tuple[int, list[str]] | None:
        """One part more, as a step of the engine brings it."""
        await asyncio.sleep(0)
        if self.given == self._count:
            return None
        self.given += 1
        return 0, ["more"]

    def fail(self, error: Exception) -> None:
        """Hear why it ended."""
        self.failure = error
        self.failed.set()

    def deltas(self, choice: int, deltas: list[str]) -> bytes:
        """Encode a part."""
        del choice, deltas
        return self._part

    def opening(self) -> bytes:
        """Begin with nothing."""
        return b""

    closing = opening


async def serve(parts: Endless, folder: Path, write_timeout: float) -> tuple[web.AppRunner, str]:
    """Answer any request with these parts."""

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = EventStream(request, {}, keepalive=BOUND, write_timeout=write_timeout)
        return await stream.send(cast("Generations", parts), cast("AnswerEncoder", parts))

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    path = str(folder / "s.sock")
    await web.UnixSite(runner, path).start()
    return runner, path


@pytest.mark.parametrize("size", [100, 1000, 200_000], ids=["tokens", "lines", "more than is held"])
async def test_a_client_that_stops_reading_is_cut_off(size: int, tmp_path: Path) -> None:
    """Within the bound for one event: what is not read stays in few buffers."""
    parts = Endless(size, 1 << 40)
    runner, path = await serve(parts, tmp_path, 0.3)
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readline()
        cast("asyncio.ReadTransport", writer.transport).pause_reading()
        await asyncio.wait_for(parts.failed.wait(), BOUND)
        assert isinstance(parts.failure, SlowConsumerError)
        assert parts.given * size < 8 << 20
        writer.close()
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", [100, 200_000])
async def test_a_client_that_reads_gets_everything(size: int, tmp_path: Path) -> None:
    """In parts that a transport takes at once, and in others."""
    parts = Endless(size, 50)
    runner, path = await serve(parts, tmp_path, BOUND)
    try:
        async with (
            ClientSession(connector=UnixConnector(path)) as session,
            session.get("http://x/") as response,
        ):
            assert len(await response.read()) == 50 * size
        assert parts.failure is None
    finally:
        await runner.cleanup()
