"""How answers go back: whole, as JSON, or as a stream of events."""

from typing import Any

import msgspec
from aiohttp import web

from ..answer_headers import answer_headers
from ..config import Settings
from ..streaming import EventStream


def json_response(data: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


def event_stream(request: web.Request, settings: Settings) -> EventStream:
    """The stream of a request's answer, which has not begun."""
    return EventStream(
        request,
        answer_headers(request),
        keepalive=settings.keepalive,
        write_timeout=settings.write_timeout,
    )
