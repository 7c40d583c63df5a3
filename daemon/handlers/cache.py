"""The cache, for `umbel cache`."""

from aiohttp import web

from ..answer_headers import HELD
from ..failures import APIError
from ..pin_requests import PinRequest
from ..quoting import quote
from .entry import Entry, json_response


class CacheHandlers:
    """Handlers below `/cache`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.get("/cache", self.cache_stats),
            web.get("/cache/nodes", self.cache_nodes),
            web.get("/cache/verify", self.cache_verify),
            web.post("/cache/clear", self.cache_clear),
            web.get("/cache/pins", self.cache_pins),
            web.post("/cache/pins", self.cache_pin),
            web.delete("/cache/pins/{name:.+}", self.cache_unpin),
        ]

    async def cache_stats(self, request: web.Request) -> web.Response:
        """`GET /cache`: the shape of what is remembered."""
        self._entry.caller(request)
        return json_response(await self._entry.loaded(request).cache.statistics())

    async def cache_nodes(self, request: web.Request) -> web.Response:
        """`GET /cache/nodes`: the caller's own nodes, parents first."""
        tenant = self._entry.caller(request).tenant
        return json_response({"nodes": await self._entry.loaded(request).cache.nodes(tenant)})

    async def cache_verify(self, request: web.Request) -> web.Response:
        """`GET /cache/verify`: whether the cache's invariants hold."""
        self._entry.caller(request)
        return json_response({"problems": await self._entry.loaded(request).cache.verify()})

    async def cache_clear(self, request: web.Request) -> web.Response:
        """`POST /cache/clear`: forget what the caller has, in memory and on disk."""
        tenant = self._entry.caller(request).tenant
        return json_response(
            {"cleared_tokens": await self._entry.loaded(request).cache.clear(tenant)}
        )

    async def cache_pins(self, request: web.Request) -> web.Response:
        """`GET /cache/pins`: the caller's pins."""
        tenant = self._entry.caller(request).tenant
        return json_response(
            {"pins": [p._asdict() for p in await self._entry.loaded(request).cache.pins(tenant)]}
        )

    async def cache_pin(self, request: web.Request) -> web.Response:
        """`POST /cache/pins`: keep a system prompt, or a conversation."""
        caller, models = self._entry.caller(request), self._entry.pool()
        body = await self._entry.body(request, PinRequest)
        slot = self._entry.find(request.query.get("model"), caller.tenant)
        service = await models.use(slot, request[HELD])
        return json_response((await service.pin(body, caller))._asdict())

    async def cache_unpin(self, request: web.Request) -> web.Response:
        """`DELETE /cache/pins/{name}`: let it age like anything else."""
        name, tenant = request.match_info["name"], self._entry.caller(request).tenant
        if not await self._entry.loaded(request).cache.unpin(tenant, name):
            raise APIError(404, f"there is no pin {quote(name)}", code="pin_not_found")
        return json_response({"unpinned": name})
