"""One request and its answer: in JSON, or as server-sent events, part by part."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web

from ...scheduler.errors import SlowConsumerError
from ..config import Settings
from ..protocols.answers import AnswerEncoder
from ..requests.generation import ChoiceDeltas, Generations
from .bodies import Share
from .failures import SERVER, as_api_error

T = TypeVar("T")

_ITEMS = 256  # of a list that are encoded at once
_PIECE = 256 << 10  # bytes after which the event loop runs
_SMALL = 16 << 10
"""Bytes that an empty transport takes at once: writers wait from 64 KiB on."""


class Exchange:
    """A request from the end of its headers until it has been answered."""

    def __init__(self, share: Share, held: ExitStack, browser_headers: Mapping[str, str]) -> None:
        self.share = share  # bytes that it holds of the budget of bodies
        self.held = held  # closed when it has been answered; releases its model
        self.id = f"req-{secrets.token_hex(12)}"
        self.arrived_at = time.monotonic()  # on the engine's clock, in seconds
        # of every answer; OpenAI's and Anthropic's SDKs know the id by one name each
        names = {"x-request-id": self.id, "request-id": self.id}
        self.headers = {hdrs.SERVER: SERVER, **names, **browser_headers}
        self.stream: EventStream | None = None  # it may begin before there is an answer
        self.has_generation = False  # which writes the log line, and counts the request

    def open_stream(self, request: web.Request, settings: Settings) -> None:
        """Answer by a stream, which begins later."""
        self.stream = EventStream(
            request,
            self.headers,
            keepalive=settings.keepalive,
            write_timeout=settings.write_timeout,
        )

    async def answer(self, generations: Generations, encoder: AnswerEncoder) -> web.StreamResponse:
        """Generate, and send the answer: as a stream if one was asked for, or whole.

        Raises:
            RequestError: a request ended with an error before anything was sent.
        """
        async with generations:
            self.has_generation = True
            if self.stream is not None:
                return await self.stream.send(generations, encoder)
            await generations.finish()
            if generations.has_logprobs:
                return await json_in_pieces(encoder.whole())
            return json_response(encoder.whole())


EXCHANGE = web.RequestKey("exchange", Exchange)


class EventStream:
    """Writes events to a client, and gives up on one that does not read them.

    The stream begins when the first answer does, or has kept the client waiting for a while: an
    earlier failure is answered with a status of its own.
    """

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        *,
        keepalive: float,  # seconds of silence after which the client is told that work goes on
        write_timeout: float,  # seconds that one event may take to be read
    ) -> None:
        self._request = request
        self._keepalive = keepalive
        self._write_timeout = write_timeout
        self._silence = Silence(keepalive)
        self.prepared = False  # the status has been sent
        self._is_open = False
        self._response = web.StreamResponse(headers=dict(headers))
        self._response.content_type = "text/event-stream"
        self._response.headers[hdrs.CACHE_CONTROL] = "no-cache"

    async def wait_for(self, work: Coroutine[Any, Any, T], comment: str) -> T:
        """Wait for some work before the answer can begin, and say so now and then.

        Args:
            work: cancelled if the client leaves.
            comment: a line for the client, which parsers of events skip.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._keepalive))[0]:
                await self._prepare()
                await self._write(f": {comment}\n\n".encode())
            return await task
        except TimeoutError:
            self._cut_off()
            raise
        finally:
            task.cancel()

    async def end_with(self, failure: bytes) -> web.StreamResponse:
        """End a stream whose answer never began."""
        try:
            await self._write(failure)
            async with asyncio.timeout(self._write_timeout):
                await self._response.write_eof()
        except TimeoutError:
            self._cut_off()
        except ConnectionError:
            pass
        return self._response

    async def send(self, generations: Generations, encoder: AnswerEncoder) -> web.StreamResponse:
        """Stream answers to their end, or to an error.

        If the status has been sent when an error comes, the error is an event.

        Raises:
            RequestError: a request ended with an error before the stream began.
        """
        try:
            await self._send(generations, encoder)
        except TimeoutError:
            generations.fail(SlowConsumerError("the client stopped reading its answer"))
            self._cut_off()
        except ConnectionError:
            pass  # the client left: leaving the generations cancels them
        finally:
            self._silence.close()
        return self._response

    async def _send(self, generations: Generations, encoder: AnswerEncoder) -> None:
        try:
            while (more := await self._next(generations, encoder)) is not None:
                await self._open(encoder)
                await self._write(_encoded(more, encoder))
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:
            if not self.prepared:
                raise
            generations.fail(error)
            await self._write(encoder.failure(as_api_error(error)))
        else:
            await self._write(encoder.closing())
        async with asyncio.timeout(self._write_timeout):
            await self._response.write_eof()

    async def _open(self, encoder: AnswerEncoder) -> None:
        if not self._is_open:
            self._is_open = True
            await self._prepare()
            await self._write(encoder.opening())

    async def _prepare(self) -> None:
        if not self.prepared:
            self.prepared = True
            await self._response.prepare(self._request)

    async def _next(self, generations: Generations, encoder: AnswerEncoder) -> ChoiceDeltas | None:
        while True:
            try:
                return await self._silence.bound(generations.next())
            except TimeoutError:
                await self._open(encoder)
                await self._write(encoder.keepalive())

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        transport = self._request.transport
        if transport is not None and len(data) < _SMALL and not transport.get_write_buffer_size():
            # The client has taken all so far, and the transport takes this: no wait to bound.
            await self._response.write(data)
            return
        async with asyncio.timeout(self._write_timeout):
            await self._response.write(data)

    def _cut_off(self) -> None:
        """Drop the connection: its unread bytes would stay in memory."""
        if self._request.transport is not None:
            self._request.transport.abort()


def _encoded(more: ChoiceDeltas, encoder: AnswerEncoder) -> bytes:
    choice, deltas = more
    if deltas is None:
        return encoder.ended(choice)
    return encoder.deltas(choice, deltas) if deltas else encoder.began(choice)


class Silence:
    """Bounds waits that follow each other, each as `asyncio.timeout` does, with one timer for all.

    `asyncio.timeout` sets a timer for each wait and cancels it, which a stream would do for each
    token. Here the timer stays, and finds when it rings how long the present wait lasts.
    Belongs to one task at a time, on a running event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._rang = False

    async def bound(self, work: Awaitable[T]) -> T:
        """Wait for some work, and cancel it when the time is over.

        Raises:
            TimeoutError: it took too long.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a wait outside of a task cannot be ended")
        cancelling = task.cancelling()
        self._waiting, self._since, self._rang = task, self._loop.time(), False
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._ring)
        try:
            return await work
        except asyncio.CancelledError as error:
            # A cancellation by others in between stays one: see `asyncio.Timeout`.
            if self._rang and task.uncancel() <= cancelling:
                raise TimeoutError from error
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        """Cancel the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._waiting is None or self._rang:
            return  # the next wait sets it
        left = self._since + self._seconds - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._ring)
        else:
            self._rang = True
            self._waiting.cancel()


def json_response(data: Any, status: int = 200) -> web.Response:
    """Return an answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


async def json_in_pieces(data: Any) -> web.Response:
    """Return a large answer in JSON; the event loop runs between two pieces of it."""
    body = bytearray()
    paused_at = 0
    for piece in _pieces(data):
        body += piece
        if len(body) - paused_at > _PIECE:
            paused_at = len(body)
            await asyncio.sleep(0)
    return web.Response(body=bytes(body), content_type="application/json")


def _pieces(value: Any) -> Iterator[bytes]:
    """Encode objects field by field, and lists a few items at a time."""
    if isinstance(value, dict):
        for number, (name, field) in enumerate(value.items()):
            yield (b"," if number else b"{") + msgspec.json.encode(name) + b":"
            yield from _pieces(field)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict) and len(value) < _ITEMS:
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from _pieces(item)
        yield b"]"
    elif isinstance(value, list) and value:
        for start in range(0, len(value), _ITEMS):
            yield b"," if start else b"["
            yield msgspec.json.encode(value[start : start + _ITEMS])[1:-1]
        yield b"]"
    else:
        yield msgspec.json.encode(value)
