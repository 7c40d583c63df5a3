"""The HTTP application: routes, and what surrounds every request."""

import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import structlog
from aiohttp import hdrs, web

from .. import __version__
from ..scheduler.errors import RequestError
from .bodies import MAX_VALUES, SMALL_BODY, BodyBudget, Share, check_values, read_body
from .config import Settings
from .connections import connection_of
from .decoding import Body, decode
from .failures import APIError, as_api_error
from .generations import Generations
from .pin_requests import PinRequest
from .protocols.answers import AnswerEncoder
from .protocols.chat import ChatRequest
from .protocols.chat_answers import ChatAnswers
from .protocols.completion_answers import CompletionAnswers
from .protocols.completions import CompletionRequest
from .quoting import quote, shorten
from .service import Caller, Service, still_loading
from .status import Status, status
from .streaming import REQUEST_ID, EventStream
from .tenants import identify

_MAX_NAME = 256
_DEFAULT_MODEL = "default"
_REQUEST_ID = web.RequestKey("request_id", str)
_ENTERED = web.RequestKey("entered", bool)
_SHARE = web.RequestKey("share", Share)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


class Front:
    """The handlers. `service` is None until the model is loaded."""

    def __init__(self, settings: Settings) -> None:
        self.service: Service | None = None
        self.stopping = False
        self._settings = settings
        self._bodies = BodyBudget(settings.body_budget)

    def application(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(middlewares=[self._surround])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.chat_completions),
                web.post("/v1/completions", self.completions),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{name:.+}", self.model),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/status", self.status),
                web.get("/cache", self.cache_stats),
                web.get("/cache/nodes", self.cache_nodes),
                web.get("/cache/verify", self.cache_verify),
                web.post("/cache/clear", self.cache_clear),
                web.get("/cache/pins", self.cache_pins),
                web.post("/cache/pins", self.cache_pin),
                web.delete("/cache/pins/{name:.+}", self.cache_unpin),
                web.get("/", self.root),
            ]
        )
        return app

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        caller, service = self._caller(request), self._service()
        body = await self._body(request, ChatRequest)
        self._check_model(service, body.model)
        usage = body.wants_usage
        generations = await service.generate(body, caller)
        model = service.model_name, service.fingerprint
        answers = ChatAnswers(caller.request_id, generations, *model, usage=usage)
        return await self._answer(request, generations, answers, stream=body.stream)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        caller, service = self._caller(request), self._service()
        body = await self._body(request, CompletionRequest)
        self._check_model(service, body.model)
        usage = body.wants_usage
        generations = await service.generate(body, caller)
        model = service.model_name, service.fingerprint
        answers = CompletionAnswers(caller.request_id, generations, *model, usage=usage)
        return await self._answer(request, generations, answers, stream=body.stream)

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        self._caller(request)
        models = self._service().models()
        name = models[0]["id"]
        return _json(
            {
                "object": "list",
                "data": models,
                "has_more": False,
                "first_id": name,
                "last_id": name,
            }
        )

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`."""
        self._caller(request)
        service = self._service()
        self._check_model(service, request.match_info["name"])
        return _json(service.models()[0])

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: the process answers. Waits for nothing."""
        return _json({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`: whether a request sent now would be served."""
        state = self._status()
        return _json({"status": state.state}, status=200 if state.state == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`, in Prometheus's text format."""
        self._caller(request)
        return web.Response(
            body=self._service().metrics.render(),
            headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, request: web.Request) -> web.Response:
        """`GET /status`: what runs, what waits, what it takes."""
        self._caller(request)
        return _json(self._status())

    async def cache_stats(self, request: web.Request) -> web.Response:
        """`GET /cache`: the shape of what is remembered."""
        self._caller(request)
        return _json(await self._service().cache.statistics())

    async def cache_nodes(self, request: web.Request) -> web.Response:
        """`GET /cache/nodes`: the caller's own nodes, parents first."""
        tenant = self._caller(request).tenant
        return _json({"nodes": await self._service().cache.nodes(tenant)})

    async def cache_verify(self, request: web.Request) -> web.Response:
        """`GET /cache/verify`: whether the cache's invariants hold."""
        self._caller(request)
        return _json({"problems": await self._service().cache.verify()})

    async def cache_clear(self, request: web.Request) -> web.Response:
        """`POST /cache/clear`: forget what the caller has, in memory and on disk."""
        tenant = self._caller(request).tenant
        return _json({"cleared_tokens": await self._service().cache.clear(tenant)})

    async def cache_pins(self, request: web.Request) -> web.Response:
        """`GET /cache/pins`: the caller's pins."""
        tenant = self._caller(request).tenant
        return _json({"pins": [p._asdict() for p in await self._service().cache.pins(tenant)]})

    async def cache_pin(self, request: web.Request) -> web.Response:
        """`POST /cache/pins`: keep a system prompt, or a conversation."""
        caller, service = self._caller(request), self._service()
        body = await self._body(request, PinRequest)
        return _json((await service.pin(body, caller))._asdict())

    async def cache_unpin(self, request: web.Request) -> web.Response:
        """`DELETE /cache/pins/{name}`: let it age like anything else."""
        name, tenant = request.match_info["name"], self._caller(request).tenant
        if not await self._service().cache.unpin(tenant, name):
            raise APIError(404, f"there is no pin {quote(name)}", code="pin_not_found")
        return _json({"unpinned": name})

    async def root(self, request: web.Request) -> web.Response:
        """`GET /`: who this is."""
        self._caller(request)
        return _json({"name": "umbel", "version": __version__, "status": "/status"})

    async def _answer(
        self,
        request: web.Request,
        generations: Generations,
        encoder: AnswerEncoder,
        *,
        stream: bool | None,
    ) -> web.StreamResponse:
        async with generations:
            request[_ENTERED] = True
            if not stream:
                await generations.finish()
                return _json(encoder.whole())
            events = EventStream(
                request,
                {REQUEST_ID: request[_REQUEST_ID]},
                keepalive=self._settings.keepalive,
                write_timeout=self._settings.write_timeout,
            )
            return await events.send(generations, encoder)

    def _caller(self, request: web.Request) -> Caller:
        conversation = request.headers.get("X-Umbel-Conversation") or None
        if conversation and len(conversation) > _MAX_NAME:
            message = f"X-Umbel-Conversation has over {_MAX_NAME} characters; send a shorter name"
            raise APIError(400, message, param="X-Umbel-Conversation")
        if conversation and not conversation.isprintable():  # it goes into logs and /status
            message = "X-Umbel-Conversation has characters that cannot be printed; send plain text"
            raise APIError(400, message, param="X-Umbel-Conversation")
        return Caller(
            request[_REQUEST_ID],
            identify(request, self._settings.api_key),
            conversation,
            time.monotonic(),
            request[_SHARE],
        )

    def _service(self) -> Service:
        if self.service is None:
            raise still_loading()
        return self.service

    def _status(self) -> Status:
        return status(self.service, stopping=self.stopping)

    @staticmethod
    def _check_model(service: Service, name: str | None) -> None:
        if name in (None, "", _DEFAULT_MODEL, service.model_name):
            return
        message = f"there is no model {quote(name)}; this daemon serves {service.model_name!r}"
        raise APIError(404, message, code="model_not_found", param="model")

    async def _body(self, request: web.Request, kind: type[Body]) -> Body:
        """Read and decode a body; a large one off the event loop."""
        raw = await read_body(
            request,
            request[_SHARE],
            largest=self._bodies.largest,
            within=self._settings.read_timeout,
        )
        if (connection := connection_of(request)) is not None:
            connection.answering()
        if len(raw) <= SMALL_BODY:
            return decode(raw, kind)
        service = self._service()
        most = MAX_VALUES + service.context_length
        return await service.workers.run(lambda _: _decode_large(raw, kind, most), len(raw))

    def _count_refusal(self, request: web.Request) -> None:
        """Count a request that never became a generation; those count themselves."""
        refused = request.method == hdrs.METH_POST and not request.get(_ENTERED, False)
        if self.service is not None and refused:
            self.service.metrics.requests.labels("refused").inc()

    @web.middleware
    async def _surround(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id and a share of the budget, and every error OpenAI's shape."""
        request[_REQUEST_ID] = f"req-{secrets.token_hex(12)}"
        with _handling(request), self._bodies.share() as share:
            request[_SHARE] = share
            try:
                response = await handler(request)
            except Exception as error:  # noqa: BLE001  (no request's fault may pass this line)
                response = _failure(request, error)
                self._count_refusal(request)
            if not response.prepared:
                response.headers[REQUEST_ID] = request[_REQUEST_ID]
            return response


def _decode_large(raw: bytearray, kind: type[Body], most_values: int) -> Body:
    check_values(raw, most_values)
    return decode(raw, kind)


def _handling(request: web.Request) -> AbstractContextManager[None]:
    connection = connection_of(request)
    return nullcontext() if connection is None else connection.handling(request)


def _failure(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, web.HTTPException):
        message = f"{shorten(request.method)} {shorten(request.path)}: {error.reason}"
        failure = APIError(error.status, message, code="not_found" if error.status == 404 else None)  # noqa: PLR2004
    else:
        failure = as_api_error(error)
        if not isinstance(error, APIError | RequestError) and failure.status >= 500:  # noqa: PLR2004
            log.error("handler failed", path=shorten(request.path), exc_info=error)
    if request.get(_ENTERED, False):
        return failure.response()  # the generation has written its own line
    write = log.info if failure.status < 500 else log.warning  # noqa: PLR2004
    write(
        "refused",
        request=request[_REQUEST_ID],
        status=failure.status,
        code=failure.code,
        message=failure.message,
    )
    response = failure.response()
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is never read
    return response


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )
