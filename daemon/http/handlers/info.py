"""What runs, and how it is: health, metrics, status, version, the description of all routes."""

from importlib.resources import files
from typing import Any

from aiohttp import hdrs, web

from .... import __version__, daemon
from .answering import json_response
from .entry import Entry


class InfoHandlers:
    """Handlers that look and change nothing."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._openapi = files(daemon).joinpath("openapi.yaml").read_bytes()

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/health/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/status", self.status),
            web.get("/version", self.version),
            web.get("/openapi.yaml", self.openapi),
            web.get("/", self.root),
        ]

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: the process answers, and its engine gets on. Waits for nothing."""
        if self._entry.stalled():
            return json_response({"status": "stalled"}, status=503)
        return json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`, also `/health/ready`: whether a request sent now would be served."""
        state, models = self._entry.state(), self._entry.models
        told: dict[str, Any] = {"status": state}
        if models is not None and (starting := models.starting) is not None:
            told["phase"] = starting.phase
            if starting.download is not None:
                told["download"] = starting.download._asdict()
        return json_response(told, status=200 if state == "ready" else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """`GET /metrics`, in Prometheus's text format."""
        caller = self._entry.caller(request)
        return web.Response(
            body=self._entry.render_metrics(caller),
            headers={hdrs.CONTENT_TYPE: "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def status(self, request: web.Request) -> web.Response:
        """`GET /status`: what runs, what waits, what it takes."""
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
        """`GET /`: who this is."""
        self._entry.caller(request)
        return json_response({"name": "umbel", "version": __version__, "status": "/status"})
