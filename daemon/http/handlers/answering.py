"""How answers go back: whole, as JSON, or as a stream of events."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web

from ...config import Settings
from ..answer_headers import answer_headers
from ..streaming import EventStream

_ITEMS = 256  # of a list that are encoded at once
_PIECE = 256 << 10  # bytes after which the event loop runs


def json_response(data: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


async def json_in_pieces(data: Any) -> web.Response:
    """A large answer in JSON; the event loop runs between two pieces of it."""
    body = bytearray()
    told = 0
    for piece in _pieces(data):
        body += piece
        if len(body) - told > _PIECE:
            told = len(body)
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


def event_stream(request: web.Request, settings: Settings) -> EventStream:
    """The stream of a request's answer, which has not begun."""
    return EventStream(
        request,
        answer_headers(request),
        keepalive=settings.keepalive,
        write_timeout=settings.write_timeout,
    )
