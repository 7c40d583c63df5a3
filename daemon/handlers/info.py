"""What there is, and how it is: models, health, metrics, status."""

from aiohttp import hdrs, web

from ... import __version__
from .entry import Entry, json_response


class InfoHandlers:
    """Handlers that look and change nothing."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/status", self.status),
            web.get("/", self.root),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`."""
        self._entry.caller(request)
        models = self._entry.loaded().models()
        name = models[0]["id"]
        return json_response(
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
        self._entry.caller(request)
        service = self._entry.loaded()
        self._entry.check_model(request.match_info["name"])
        return json_response(service.models()[0])

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: the process answers. Waits for nothing."""
        return json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`: whether a request sent now would be served."""
        state = self._entry.status()
        return json_response({"status": state.state}, status=200 if state.state == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`, in Prometheus's text format."""
        self._entry.caller(request)
        return web.Response(
            body=self._entry.loaded().metrics.render(),
            headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, request: web.Request) -> web.Response:
        """`GET /status`: what runs, what waits, what it takes."""
        self._entry.caller(request)
        return json_response(self._entry.status())

    async def root(self, request: web.Request) -> web.Response:
        """`GET /`: who this is."""
        self._entry.caller(request)
        return json_response({"name": "umbel", "version": __version__, "status": "/status"})
