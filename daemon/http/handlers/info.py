"""Read-only routes: health, metrics, status, the models, and the description of all routes."""

from importlib.resources import files
from typing import Any

from aiohttp import hdrs, web

from .... import __version__, daemon
from ...models.slot import ModelSlot
from ...quoting import quote
from ..exchange import json_response
from ..failures import APIError
from .entry import Entry

_LONGEST_PAGE = 1000


class InfoHandlers:
    """Handlers that change nothing."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._openapi = files(daemon).joinpath("openapi.yaml").read_bytes()

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/health/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/status", self.status),
            web.get("/version", self.version),
            web.get("/openapi.yaml", self.openapi),
            web.get("/", self.root),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:[^/].*[^/]|[^/]}", self.model),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: 200 if the process answers and its engine makes progress."""
        if self._entry.stalled():
            return json_response({"status": "stalled"}, status=503)
        return json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`, also `/health/ready`: 200 if a request sent now would be served."""
        state, models = self._entry.state(), self._entry.models
        told: dict[str, Any] = {"status": state}
        if models is not None and (starting := models.starting) is not None:
            told["phase"] = starting.phase
            if starting.download is not None:
                told["download"] = starting.download._asdict()
        return json_response(told, status=200 if state == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`, in Prometheus's text format."""
        return web.Response(
            body=self._entry.render_metrics(self._entry.caller(request)),
            headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, request: web.Request) -> web.Response:
        """`GET /status`: the requests, the models, and the memory that they take."""
        return json_response(self._entry.status(self._entry.caller(request)))

    async def version(self, request: web.Request) -> web.Response:
        """`GET /version`: of this program."""
        self._entry.caller(request)
        return json_response({"version": __version__})

    async def openapi(self, request: web.Request) -> web.Response:
        """`GET /openapi.yaml`: the description of these routes."""
        self._entry.caller(request)
        return web.Response(body=self._openapi, content_type="application/yaml")

    async def root(self, request: web.Request) -> web.Response:
        """`GET /`: the program's name."""
        self._entry.caller(request)
        return json_response({"name": "umbel", "version": __version__, "status": "/status"})

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`: all names, or a page of them as Anthropic's SDK asks for it.

        Models are described in the shapes of OpenAI's and Anthropic's SDKs at once.
        """
        models = self._names(self._entry.caller(request).tenant)
        page, more = _page(list(models), request)
        return json_response(
            {
                "object": "list",
                "data": [_described(name, models[name]) for name in page],
                "has_more": more,
                "first_id": page[0] if page else None,
                "last_id": page[-1] if page else None,
            }
        )

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`."""
        name, tenant = request.match_info["name"], self._entry.caller(request).tenant
        slot = self._entry.find(name, tenant)
        return json_response(_described(name if name in self._names(tenant) else slot.name, slot))

    def _names(self, tenant: str) -> dict[str, ModelSlot]:
        """Return all names that a tenant may use, the aliases included, each with its model."""
        return self._entry.pool().names(self._entry.allowed_models(tenant))


def _described(name: str, slot: ModelSlot) -> dict[str, Any]:
    """Describe a model under one of its names; its context is known once it was loaded."""
    context = slot.context_length
    known = ("max_input_tokens", "max_tokens", "max_model_len", "context_length")
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "umbel",
        "type": "model",
        "display_name": slot.name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        **({} if context is None else dict.fromkeys(known, context)),
    }


def _page(names: list[str], request: web.Request) -> tuple[list[str], bool]:
    """Choose the names that a query asks for; True if there are more in that direction.

    Raises:
        APIError: 400, the query is of no use.
    """
    after, before = _place(names, request, "after_id"), _place(names, request, "before_id")
    found = names[0 if after is None else after + 1 : before]
    limit = _limit(request)
    if after is None and before is not None:
        return found[-limit:], len(found) > limit
    return found[:limit], len(found) > limit


def _place(names: list[str], request: web.Request, key: str) -> int | None:
    if key not in request.query:
        return None
    name = request.query[key]
    if name not in names:
        raise APIError(400, f"{key} is {quote(name)}, which is not in the list", param=key)
    return names.index(name)


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(_LONGEST_PAGE))
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0  # noqa: PLR2004
    if not 1 <= number <= _LONGEST_PAGE:
        message = f"limit is {quote(text)}; send a number from 1 to {_LONGEST_PAGE}"
        raise APIError(400, message, param="limit")
    return number
