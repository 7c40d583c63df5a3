"""Read-only routes: health, metrics, status, the models, and the description of all routes."""

from functools import cache
from importlib.resources import files
from typing import Any

from aiohttp import hdrs, web

from .... import __version__, daemon
from ...models.slot import ModelSlot
from ...quoting import quote
from ..exchange import json_response
from ..failures import APIError
from .entry import ENTRY

_LONGEST_PAGE = 1000


routes = web.RouteTableDef()


@routes.get("/health")
async def _health(request: web.Request) -> web.Response:
    """Answer 200 if the engine makes progress."""
    if request.app[ENTRY].stalled():
        return json_response({"status": "stalled"}, status=503)
    return json_response({"status": "ok"})


@routes.get("/ready")
@routes.get("/health/ready")
async def _ready(request: web.Request) -> web.Response:
    """Answer 200 if a request sent now would be served."""
    state, models = request.app[ENTRY].state(), request.app[ENTRY].models
    told: dict[str, Any] = {"status": state}
    if models is not None and (starting := models.starting) is not None:
        told["phase"] = starting.phase
        if starting.download is not None:
            told["download"] = starting.download._asdict()
    return json_response(told, status=200 if state == "ready" else 503)


@routes.get("/metrics")
async def _metrics(request: web.Request) -> web.Response:
    """Answer in Prometheus's text format."""
    entry = request.app[ENTRY]
    return web.Response(
        body=entry.render_metrics(entry.caller(request)),
        headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
    )


@routes.get("/status")
async def _status(request: web.Request) -> web.Response:
    entry = request.app[ENTRY]
    return json_response(entry.status(entry.caller(request)))


@routes.get("/version")
async def _version(request: web.Request) -> web.Response:
    request.app[ENTRY].caller(request)
    return json_response({"version": __version__})


@routes.get("/openapi.yaml")
async def _openapi(request: web.Request) -> web.Response:
    request.app[ENTRY].caller(request)
    return web.Response(body=_description(), content_type="application/yaml")


@cache
def _description() -> bytes:
    return files(daemon).joinpath("openapi.yaml").read_bytes()


@routes.get("/")
async def _root(request: web.Request) -> web.Response:
    request.app[ENTRY].caller(request)
    return json_response({"name": "umbel", "version": __version__, "status": "/status"})


@routes.get("/v1/models")
async def _models(request: web.Request) -> web.Response:
    """List all names, or a page of them as Anthropic's SDK asks for it.

    Models are described in the shapes of OpenAI's and Anthropic's SDKs at once.
    """
    models = _names(request)
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


@routes.get("/v1/models/{name:[^/].*[^/]|[^/]}")
async def _model(request: web.Request) -> web.Response:
    entry, name = request.app[ENTRY], request.match_info["name"]
    slot = entry.find(name, entry.caller(request).tenant)
    return json_response(_described(name if name in _names(request) else slot.name, slot))


def _names(request: web.Request) -> dict[str, ModelSlot]:
    """Return all names that the caller may use, the aliases included, each with its model."""
    entry = request.app[ENTRY]
    allowed = entry.allowed_models(entry.caller(request).tenant)
    return entry.pool().names(allowed)


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
