"""The cache, for `umbel cache`."""

from dataclasses import asdict

from aiohttp import web

from ....cachestore.tries import SHARED
from ...identity.caller import Caller
from ...identity.tenants import refuse_tenants
from ...observability.cache_admin import CacheAdmin, PinRequest
from ...quoting import quote
from ..exchange import json_response
from ..failures import APIError
from .entry import ENTRY

routes = web.RouteTableDef()


def _cache(request: web.Request, caller: Caller) -> CacheAdmin:
    return request.app[ENTRY].loaded(request, caller.tenant).cache


@routes.get("/cache")
async def _statistics(request: web.Request) -> web.Response:
    """Describe the shape of the caller's state, or of all."""
    caller = request.app[ENTRY].caller(request)
    shape = asdict(await _cache(request, caller).statistics(caller.sees_only))
    if caller.sees_only is not None:
        for counted_for_all in ("evictions", "page_outs"):
            del shape[counted_for_all]
    return json_response(shape)


@routes.get("/cache/nodes")
async def _nodes(request: web.Request) -> web.Response:
    """List the nodes that the caller may see, parents first."""
    caller = request.app[ENTRY].caller(request)
    return json_response({"nodes": await _cache(request, caller).nodes(caller.sees_only)})


@routes.get("/cache/verify")
async def _verify(request: web.Request) -> web.Response:
    """List the violations of the cache's invariants."""
    caller = request.app[ENTRY].caller(request)
    refuse_tenants(operator=caller.operator, what="verify the cache")
    return json_response({"problems": await _cache(request, caller).verify()})


@routes.post("/cache/clear")
async def _clear(request: web.Request) -> web.Response:
    """Drop the caller's state, in memory and on disk."""
    caller = request.app[ENTRY].caller(request)
    return json_response({"cleared_tokens": await _cache(request, caller).clear(caller.tenant)})


@routes.get("/cache/pins")
async def _pins(request: web.Request) -> web.Response:
    """List the caller's pins, and the shared prompts."""
    caller = request.app[ENTRY].caller(request)
    cache = _cache(request, caller)
    pins = [pin._asdict() | {"shared": False} for pin in await cache.pins(caller.tenant)]
    pins += [pin._asdict() | {"shared": True} for pin in await cache.pins(SHARED)]
    return json_response({"pins": pins})


@routes.post("/cache/pins")
async def _pin(request: web.Request) -> web.Response:
    """Keep a system prompt, or a conversation."""
    entry = request.app[ENTRY]
    caller = entry.caller(request)
    slot = entry.find(request.query.get("model"), caller.tenant)
    body, arrival = await entry.body(request, PinRequest, caller)
    arrival.set_keys(())
    service = await entry.use(request, slot, arrival)
    pin = await service.pin(body, arrival)
    return json_response(pin._asdict() | {"shared": body.shared})


@routes.delete("/cache/pins/{name:.+}")
async def _unpin(request: web.Request) -> web.Response:
    """Let a pin age like all other state."""
    name, caller = request.match_info["name"], request.app[ENTRY].caller(request)
    shared = request.query.getall("shared", ["false"])
    if shared not in (["true"], ["false"]):
        raise APIError(400, "shared is true or false", param="shared")
    tenant = caller.tenant
    if shared == ["true"]:
        refuse_tenants(operator=caller.operator, what="share a prompt no more")
        tenant = SHARED
    if not await _cache(request, caller).unpin(tenant, name):
        raise APIError(404, f"there is no pin {quote(name)}", code="pin_not_found")
    return json_response({"unpinned": name})
