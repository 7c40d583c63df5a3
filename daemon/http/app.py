"""The HTTP application: its routes, and the middleware around every request."""

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from ...scheduler.errors import RequestError
from ..errors import panics_as_errors
from ..protocols.errors import error_event, error_response
from ..quoting import shorten
from .connections import connection_of
from .exchange import EXCHANGE, Exchange
from .failures import APIError, as_api_error
from .handlers import cache, generation, info, responses
from .handlers.entry import ENTRY, Entry

log = structlog.get_logger()

RATE = 500.0
"""Answers in a second that one peer gets without waiting; as many may come at once before."""

_LONGEST_DELAY = 1.0  # seconds that one answer waits
_MOST_PEERS = 1024
_FREE = frozenset({hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS})

_CORS_METHODS = "GET, POST, DELETE"
_CORS_EXPOSED = "x-request-id, request-id, retry-after"
_CORS_MAX_AGE = "600"

_ROUTES = (
    "umbel speaks OpenAI's protocol at /v1/chat/completions, /v1/completions and /v1/responses, "
    "and Anthropic's at /v1/messages"
)


def application(entry: Entry) -> web.Application:
    """Build the aiohttp application."""
    app = web.Application(middlewares=[_middleware(entry)])
    app[ENTRY] = entry
    for handlers in (generation, responses, info, cache):
        app.add_routes(handlers.routes)
    return app


def _middleware(entry: Entry) -> Middleware:
    pace = Pace()

    @web.middleware
    async def surround(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id and a share of the budget, and every error a shape."""
        origins = entry.settings.cors_origins
        with _handling(request), entry.bodies.share() as share, ExitStack() as held:
            exchange = Exchange(share, held, cors_headers(request, origins))
            request[EXCHANGE] = exchange
            try:
                await _keep_pace(pace, request)
                with panics_as_errors():
                    response = preflight(request, origins) or await handler(request)
            except Exception as error:  # noqa: BLE001  (no request's fault may pass this line)
                response = await _failure(entry, request, exchange, error)
            if not response.prepared:
                response.headers.update(exchange.headers)
            return response

    return surround


def _handling(request: web.Request) -> AbstractContextManager[None]:
    connection = connection_of(request)
    return nullcontext() if connection is None else connection.handling(request)


async def _failure(
    entry: Entry, request: web.Request, exchange: Exchange, error: Exception
) -> web.StreamResponse:
    failure = _as_failure(request, error)
    if exchange.stream is not None and exchange.stream.prepared:
        _report_refusal(entry, exchange, failure, failure.status)
        return await exchange.stream.end_with(error_event(request.path, exchange.id, failure))
    response = error_response(request.path, exchange.id, failure)
    if exchange.has_generation:
        return response
    _report_refusal(entry, exchange, failure, response.status)
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


def _report_refusal(entry: Entry, exchange: Exchange, failure: APIError, status: int) -> None:
    """Log and count a request that never became a generation."""
    write = log.info if failure.status < 500 else log.warning  # noqa: PLR2004
    write(
        "refused",
        request=exchange.id,
        status=status,
        code=failure.code,
        message=failure.message,
        e2e_s=round(time.monotonic() - exchange.arrived_at, 3),
    )
    entry.metrics.refuse(failure.code or failure.kind)


# -- how fast requests without a body are answered -------------------------------------------------


class Pace:
    """Delays answers to requests without a body, by peer: an address, or a user of the Unix socket.

    The event loop and the engine share one interpreter lock, so that every answer takes time from
    all streams. An answer is delayed and not refused: a refusal would take as long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}  # when a peer's requests so far are paid for

    def delay(self, peer: str) -> float:
        """Count an answer; return the seconds that it waits."""
        now = self._clock()
        due = max(self._due.pop(peer, now), now) + 1 / RATE
        wait = min(max(0.0, due - now - 1), _LONGEST_DELAY)
        self._due[peer] = min(due, now + 1 + _LONGEST_DELAY)
        while len(self._due) > _MOST_PEERS:
            del self._due[next(iter(self._due))]  # the peer that asked longest ago
        return wait

    def delay_of(self, request: web.Request) -> float:
        """Count a request's answer, unless it is an operator's or has a body."""
        connection = connection_of(request)
        if connection is None or connection.operator:
            return 0.0
        if request.method not in _FREE and request.body_exists:
            return 0.0
        return self.delay(connection.peer)


async def _keep_pace(pace: Pace, request: web.Request) -> None:
    """Wait for the request's turn; its connection gives its place to others meanwhile."""
    connection = connection_of(request)
    if connection is not None and (delay := pace.delay_of(request)) > 0:
        with connection.delayed():
            await asyncio.sleep(delay)


# -- pages of other origins (CORS) -----------------------------------------------------------------


def cors_headers(request: web.Request, origins: Collection[str]) -> dict[str, str]:
    """List the headers by which a browser lets pages of some origins read an answer.

    No cookies are involved, so no credentials are allowed: a key is a header like others.
    """
    if not origins:
        return {}
    headers: dict[str, str] = {hdrs.VARY: hdrs.ORIGIN}
    origin = request.headers.get(hdrs.ORIGIN, "")
    if origin in origins:
        headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _CORS_EXPOSED
    return headers


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """Answer a browser's question before it sends a page's request; None for all else.

    The question carries no key, so it is answered without one. The page's SDK chooses the headers
    that it will send.
    """
    asks = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    named = request.headers.get(hdrs.ORIGIN) in origins
    if request.method != hdrs.METH_OPTIONS or not asks or not named:
        return None
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: _CORS_METHODS,
        hdrs.ACCESS_CONTROL_MAX_AGE: _CORS_MAX_AGE,
    }
    if wanted := request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS):
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=204, headers=headers)
