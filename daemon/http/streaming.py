"""Server-sent events: the answers of one request, part by part, to one client."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import hdrs, web

from ...scheduler.errors import SlowConsumerError
from ..protocols.answers import AnswerEncoder
from ..requests.generations import ChoiceDeltas, Generations
from .failures import as_api_error
from .silence import Silence

T = TypeVar("T")

_SMALL = 16 << 10
"""Bytes that a transport takes at once where it holds none: writers wait from 64 KiB on."""


class EventStream:
    """Writes events to a client, and gives up on one that does not read them.

    The stream begins when the first answer does, or has kept the client waiting for a while:
    what fails before that is answered with a status of its own.

    Args:
        request: the request that is answered.
        headers: of the answer.
        keepalive: seconds of silence after which the client hears that work goes on.
        write_timeout: seconds that one event may take to be read.

    Attributes:
        prepared: whether the status has been sent.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        *,
        keepalive: float,
        write_timeout: float,
    ) -> None:
        self._request = request
        self._keepalive = keepalive
        self._write_timeout = write_timeout
        self._silence = Silence(keepalive)
        self.prepared = False
        self._begun = False
        self._response = web.StreamResponse(
            headers={
                hdrs.CONTENT_TYPE: "text/event-stream",
                hdrs.CACHE_CONTROL: "no-cache",
                **headers,
            }
        )

    async def wait_for(self, work: Coroutine[Any, Any, T], comment: str) -> T:
        """Wait for something before the answer can begin, and say so now and then.

        Args:
            work: what to wait for. It is cancelled if the client leaves.
            comment: what the client is told: a line that parsers of events skip.
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

        Where the status has been sent when an error comes, the error is an event.

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
                await self._begin(encoder)
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

    async def _begin(self, encoder: AnswerEncoder) -> None:
        if not self._begun:
            self._begun = True
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
                await self._begin(encoder)
                await self._write(encoder.keepalive())

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        transport = self._request.transport
        if transport is not None and len(data) < _SMALL and not transport.get_write_buffer_size():
            # The client has taken all so far: nothing of this can wait for it, whatever it does.
            await self._response.write(data)
            return
        async with asyncio.timeout(self._write_timeout):
            await self._response.write(data)

    def _cut_off(self) -> None:
        """Drop the connection: what the client has not read would stay in memory."""
        if self._request.transport is not None:
            self._request.transport.abort()


def _encoded(more: ChoiceDeltas, encoder: AnswerEncoder) -> bytes:
    choice, deltas = more
    if deltas is None:
        return encoder.ended(choice)
    return encoder.deltas(choice, deltas) if deltas else encoder.began(choice)
