"""The HTTP server: it accepts connections on the Unix socket, and on a TCP port if there is one."""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import web

from ..errors import SocketError
from ..quoting import shorten
from .app import application
from .connections import Connections, behind_connections
from .failures import APIError
from .handlers.entry import Entry
from .sockets import BACKLOG

_CONNECTION_CLOSE = 5.0
_READ_AHEAD = 1 << 16  # bytes of a body that wait until a handler reads them
_LINGER = 2.0  # seconds that a client still sending a refused body has to read the answer

# Other spellings of the routes below /v1, as clients make them of a base URL: `//v1/models`,
# `/v1//models`, `/v1/models/`, `/v1/v1/models` and `/models` are `/v1/models`.
_V1 = "/v1/"
_LEAD = "/{lead:/*(?:v1/+)*}"
_TAIL = "{tail:/*}"
_NAME = "{name:[^/].*[^/]|[^/]}"  # of a model: `org/name`

log = structlog.get_logger()


class HTTPServer:
    """Accepts connections and hands their requests to the handlers.

    Attributes:
        addresses: of TCP, as host:port.
    """

    def __init__(self, entry: Entry, connections: Connections) -> None:
        self.addresses: list[str] = []
        self._connections = connections
        self._servers: list[asyncio.Server] = []
        app = application(entry)
        add_spellings(app)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves ends its generation
            shutdown_timeout=_CONNECTION_CLOSE,
        )

    async def setup(self) -> None:
        """Prepare the handlers; once, before anything listens."""
        await self._runner.setup()

    async def listen(self, listening: socket.socket) -> None:
        """Accept connections on a socket that listens."""
        await self._listen(sock=listening)

    async def listen_tcp(self, host: str, port: int) -> None:
        """Listen on a TCP port.

        Raises:
            SocketError: it cannot be had.
        """
        try:
            server = await self._listen(host=host, port=port)
        except OSError as error:
            raise SocketError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        for listener in server.sockets:
            name = listener.getsockname()
            log.info("listening", host=name[0], port=name[1])
            shown = f"[{name[0]}]" if ":" in name[0] else name[0]
            self.addresses.append(f"{shown}:{name[1]}")

    async def close(self) -> None:
        """Accept nothing more, and end the connections that are left."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    async def _listen(self, **where: Any) -> asyncio.Server:
        protocol = behind_connections(self._connections, self._protocol)
        loop = asyncio.get_running_loop()
        server: asyncio.Server = await loop.create_server(protocol, backlog=BACKLOG, **where)
        self._servers.append(server)
        return server

    def _protocol(self) -> "WireProtocol":
        """Make aiohttp's side of a new connection."""
        if self._runner.server is None:
            raise RuntimeError("the runner was not set up")
        return WireProtocol(
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as aiohttp documents
            auto_decompress=False,  # a compressed body is refused
            lingering_time=_LINGER,
            read_bufsize=_READ_AHEAD,
        )


class WireProtocol(web.RequestHandler):
    """aiohttp's side of one connection; broken HTTP gets a JSON error like all else."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that could not be read, and close the connection.

        Raises:
            ConnectionError: an answer has begun, so that none can be given.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already") from exc
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("handler failed", status=status, exc_info=exc)
            failure = APIError(status, HTTPStatus(status).phrase, kind="server_error")
        else:
            reason = shorten((message or HTTPStatus(status).phrase).partition("\n")[0])
            failure = APIError(status, f"this is not HTTP: {reason}", code="invalid_http")
            log.info("refused", status=status, code=failure.code, message=failure.message)
        response = failure.response()
        response.force_close()
        return response


def add_spellings(app: web.Application) -> None:
    """Serve every route below `/v1` under its other spellings, too."""
    routes = [
        (route.method, route.resource.canonical, route.handler)
        for resource in app.router.resources()
        for route in resource
        if route.resource is not None and route.resource.canonical.startswith(_V1)
    ]
    added: dict[str, web.Resource] = {}
    for method, path, handler in routes:
        if path not in added:
            added[path] = app.router.add_resource(_pattern(path))
        added[path].add_route(method, handler)


def _pattern(path: str) -> str:
    """Write a path with all parts that may be spelled in another way as a pattern."""
    first, *others = path.removeprefix(_V1).split("/")
    others = [each.replace("{name}", _NAME) for each in others]
    gaps = (f"{{gap{number}:/+}}{segment}" for number, segment in enumerate(others))
    return _LEAD + first + "".join(gaps) + _TAIL
