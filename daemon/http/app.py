"""The HTTP application: routes, and what surrounds every request."""

import asyncio
import secrets
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from ...scheduler.errors import RequestError
from ..panics import panics_as_errors
from ..protocols.errors import error_event, error_response
from ..quoting import shorten
from .answer_headers import (
    ARRIVED_AT,
    ENTERED,
    FOR_BROWSERS,
    HELD,
    REQUEST_ID,
    SHARE,
    STREAM,
    answer_headers,
)
from .connection import connection_of
from .failures import APIError, as_api_error
from .handlers.cache import CacheHandlers
from .handlers.entry import Entry
from .handlers.info import InfoHandlers
from .handlers.messages import MessagesHandlers
from .handlers.models import ModelHandlers
from .handlers.openai import OpenAIHandlers
from .handlers.responses import ResponsesHandlers
from .handlers.tokens import TokenHandlers
from .pace import Pace

if TYPE_CHECKING:
    from .streaming import EventStream

log = structlog.get_logger()

_HANDLERS = (
    OpenAIHandlers,
    ResponsesHandlers,
    MessagesHandlers,
    ModelHandlers,
    TokenHandlers,
    InfoHandlers,
    CacheHandlers,
)

_ROUTES = (
    "umbel speaks OpenAI's protocol at /v1/chat/completions, /v1/completions and /v1/responses, "
    "and Anthropic's at /v1/messages"
)


def application(entry: Entry) -> web.Application:
    """Build the aiohttp application."""
    app = web.Application(middlewares=[_middleware(entry)])
    for handlers in _HANDLERS:
        app.add_routes(handlers(entry).routes())
    return app


def _middleware(entry: Entry) -> Middleware:
    pace = Pace()

    @web.middleware
    async def surround(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id and a share of the budget, and every error a shape."""
        request[ARRIVED_AT] = time.monotonic()
        request[REQUEST_ID] = f"req-{secrets.token_hex(12)}"
        request[FOR_BROWSERS] = entry.cross_origin.headers(request)
        with _handling(request), entry.bodies.share() as share, ExitStack() as held:
            request[SHARE], request[HELD] = share, held
            try:
                await _keep_pace(pace, request)
                with panics_as_errors():
                    response = entry.cross_origin.preflight(request) or await handler(request)
            except Exception as error:  # noqa: BLE001  (no request's fault may pass this line)
                response = await _failure(entry, request, error)
            if not response.prepared:
                response.headers.update(answer_headers(request))
            return response

    return surround


async def _keep_pace(pace: Pace, request: web.Request) -> None:
    """Wait for the request's turn; its connection gives its place to others meanwhile."""
    connection = connection_of(request)
    if connection is not None and (delay := pace.delay_of(request)) > 0:
        with connection.delayed():
            await asyncio.sleep(delay)


def _handling(request: web.Request) -> AbstractContextManager[None]:
    connection = connection_of(request)
    return nullcontext() if connection is None else connection.handling(request)


async def _failure(entry: Entry, request: web.Request, error: Exception) -> web.StreamResponse:
    failure = _as_failure(request, error)
    stream: EventStream | None = request.get(STREAM)
    if stream is not None and stream.prepared:
        _tell_refusal(entry, request, failure, failure.status)
        return await stream.end_with(error_event(request, failure))
    response = error_response(request, failure)
    if request.get(ENTERED, False):
        return response  # the generation counts itself, and has written its own line
    _tell_refusal(entry, request, failure, response.status)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is never read
    return response


def _as_failure(request: web.Request, error: Exception) -> APIError:
    if isinstance(error, web.HTTPException):
        message = f"{shorten(request.method)} {shorten(request.path)}: {error.reason}"
        if isinstance(error, web.HTTPNotFound):
            return APIError(404, f"{message}; {_ROUTES}", code="not_found")
        return APIError(error.status, message)
    failure = as_api_error(error)
    if not isinstance(error, APIError | RequestError) and failure.status >= 500:  # noqa: PLR2004
        log.error("handler failed", path=shorten(request.path), exc_info=error)
    return failure


def _tell_refusal(entry: Entry, request: web.Request, failure: APIError, status: int) -> None:
    """Log and count a request that never became a generation."""
    write = log.info if failure.status < 500 else log.warning  # noqa: PLR2004
    write(
        "refused",
        request=request[REQUEST_ID],
        status=status,
        code=failure.code,
        message=failure.message,
        e2e_s=round(time.monotonic() - request[ARRIVED_AT], 3),
    )
    entry.metrics.refuse(failure.code or failure.kind)
