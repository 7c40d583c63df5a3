"""The cache, for `umbel cache`."""

from dataclasses import asdict

from aiohttp import web

from ....cachestore.tries import SHARED
from ...identity.tenants import refuse_tenants
from ...observability.cache_admin import CacheAdmin
from ...observability.pin_requests import PinRequest
from ...quoting import quote
from ..exchange import json_response
from ..failures import APIError
from .entry import Entry


class CacheHandlers:
    """Handlers below `/cache`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.get("/cache", self.cache_stats),
            web.get("/cache/nodes", self.cache_nodes),
            web.get("/cache/verify", self.cache_verify),
            web.post("/cache/clear", self.cache_clear),
            web.get("/cache/pins", self.cache_pins),
            web.post("/cache/pins", self.cache_pin),
            web.delete("/cache/pins/{name:.+}", self.cache_unpin),
        ]

    def _cache(self, request: web.Request, tenant: str) -> CacheAdmin:
        return self._entry.loaded(request, tenant).cache

    async def cache_stats(self, request: web.Request) -> web.Response:
        """`GET /cache`: the shape of the caller's state, or of all."""
        caller = self._entry.caller(request)
        shape = asdict(await self._cache(request, caller.tenant).statistics(caller.sees_only))
        if caller.sees_only is not None:
            for counted_for_all in ("evictions", "page_outs"):
                del shape[counted_for_all]
        return json_response(shape)

    async def cache_nodes(self, request: web.Request) -> web.Response:
        """`GET /cache/nodes`: the nodes that the caller may see, parents first."""
        caller = self._entry.caller(request)
        nodes = await self._cache(request, caller.tenant).nodes(caller.sees_only)
        return json_response({"nodes": nodes})

    async def cache_verify(self, request: web.Request) -> web.Response:
        """`GET /cache/verify`: the violations of the cache's invariants."""
        caller = self._entry.caller(request)
        refuse_tenants(operator=caller.operator, what="verify the cache")
        return json_response({"problems": await self._cache(request, caller.tenant).verify()})

    async def cache_clear(self, request: web.Request) -> web.Response:
        """`POST /cache/clear`: drop the caller's state, in memory and on disk."""
        tenant = self._entry.caller(request).tenant
        return json_response({"cleared_tokens": await self._cache(request, tenant).clear(tenant)})

    async def cache_pins(self, request: web.Request) -> web.Response:
        """`GET /cache/pins`: the caller's pins, and the shared prompts."""
        tenant = self._entry.caller(request).tenant
        cache = self._cache(request, tenant)
        pins = [pin._asdict() | {"shared": False} for pin in await cache.pins(tenant)]
        pins += [pin._asdict() | {"shared": True} for pin in await cache.pins(SHARED)]
        return json_response({"pins": pins})

    async def cache_pin(self, request: web.Request) -> web.Response:
        """`POST /cache/pins`: keep a system prompt, or a conversation."""
        caller = self._entry.caller(request)
        slot = self._entry.find(request.query.get("model"), caller.tenant)
        body, arrival = await self._entry.body(request, PinRequest, caller)
        arrival.set_keys(())
        service = await self._entry.use(request, slot, arrival)
        pin = await service.pin(body, arrival)
        return json_response(pin._asdict() | {"shared": body.shared})

    async def cache_unpin(self, request: web.Request) -> web.Response:
        """`DELETE /cache/pins/{name}`: let it age like all other state."""
        name, caller = request.match_info["name"], self._entry.caller(request)
        shared = request.query.getall("shared", ["false"])
        if shared not in (["true"], ["false"]):
            raise APIError(400, "shared is true or false", param="shared")
        tenant = caller.tenant
        if shared == ["true"]:
            refuse_tenants(operator=caller.operator, what="share a prompt no more")
            tenant = SHARED
        if not await self._cache(request, caller.tenant).unpin(tenant, name):
            raise APIError(404, f"there is no pin {quote(name)}", code="pin_not_found")
        return json_response({"unpinned": name})
