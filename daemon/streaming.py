"""Server-sent events: one answer, piece by piece, to one client."""

import asyncio

from aiohttp import hdrs, web

from ..scheduler.errors import SlowConsumerError
from .failures import as_api_error
from .generation import Generation, Piece
from .openai_answers import Answer

REQUEST_ID = "x-request-id"
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


class EventStream:
    """Writes events to a client, and gives up on one that does not read them.

    Args:
        request: the request that is answered.
        request_id: sent as a header, as every answer's is.
        keepalive: seconds of silence after which a comment is sent.
        write_timeout: seconds that one event may take to be read.
    """

    def __init__(
        self, request: web.Request, request_id: str, *, keepalive: float, write_timeout: float
    ) -> None:
        self._request = request
        self._keepalive = keepalive
        self._write_timeout = write_timeout
        self._response = web.StreamResponse(
            headers={
                hdrs.CONTENT_TYPE: "text/event-stream",
                hdrs.CACHE_CONTROL: "no-cache",
                REQUEST_ID: request_id,
            }
        )

    async def send(
        self, generation: Generation, answer: Answer, *, usage: bool
    ) -> web.StreamResponse:
        """Stream a generation to its end, or to its error.

        The status has been sent when an error comes, so the error is an event, and the
        stream ends without `[DONE]`.
        """
        try:
            await self._send(generation, answer, usage=usage)
        except TimeoutError:
            generation.fail(SlowConsumerError("the client stopped reading its answer"))
            self._cut_off()
        except ConnectionError:
            pass  # the client left: leaving the generation cancels it
        return self._response

    async def _send(self, generation: Generation, answer: Answer, *, usage: bool) -> None:
        await self._response.prepare(self._request)
        await self._write(answer.first() or _COMMENT)
        try:
            while (piece := await self._next(generation)) is not None:
                await self._write(answer.piece(piece))
        except (TimeoutError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001  (whatever it was, the client hears of it)
            generation.fail(error)
            await self._write(b"data: " + as_api_error(error).body() + b"\n\n")
        else:
            await self._write(answer.last() + (answer.usage() if usage else b"") + _DONE)
        async with asyncio.timeout(self._write_timeout):
            await self._response.write_eof()

    async def _next(self, generation: Generation) -> Piece | None:
        while True:
            try:
                async with asyncio.timeout(self._keepalive):
                    return await generation.next_piece()
            except TimeoutError:
                await self._write(_COMMENT)

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._write_timeout):
            await self._response.write(data)

    def _cut_off(self) -> None:
        """Drop the connection: what the client has not read would stay in memory."""
        if self._request.transport is not None:
            self._request.transport.abort()
