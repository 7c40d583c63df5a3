"""One request and its answer: the values that accompany it, and the answer in JSON."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
from aiohttp import hdrs, web

from ..config import Settings
from ..protocols.answers import AnswerEncoder
from ..requests.generation import Generations
from .bodies import Share
from .failures import SERVER
from .streaming import EventStream

_ITEMS = 256  # of a list that are encoded at once
_PIECE = 256 << 10  # bytes after which the event loop runs


class Exchange:
    """A request from the end of its headers until it has been answered.

    Args:
        share: bytes that it holds of the budget of bodies.
        held: closed when it has been answered; releases its model.
        browser_headers: tell a browser which pages may read the answer.

    Attributes:
        id: its name, in the log and the answer's headers.
        arrived_at: when its headers were complete, on the engine's clock, in seconds.
        headers: of its answer, whatever that is. The id goes under the names by which OpenAI's
            and Anthropic's SDKs know it.
        stream: of its answer, if a stream was asked for; it may begin before there is an answer.
        has_generation: True if a generation writes the log line and counts the request.
    """

    def __init__(self, share: Share, held: ExitStack, browser_headers: Mapping[str, str]) -> None:
        self.share = share
        self.held = held
        self.id = f"req-{secrets.token_hex(12)}"
        self.arrived_at = time.monotonic()
        names = {"x-request-id": self.id, "request-id": self.id}
        self.headers = {hdrs.SERVER: SERVER, **names, **browser_headers}
        self.stream: EventStream | None = None
        self.has_generation = False

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
