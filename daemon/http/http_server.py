"""Where connections are accepted: the Unix socket, and a TCP port if there is one."""

import asyncio
import socket
from typing import Any

import structlog
from aiohttp import web

from ..errors import SocketError
from .app import application
from .connection import behind_connections
from .connections import Connections
from .handlers.entry import Entry
from .sockets import BACKLOG
from .spellings import add_spellings
from .wire import WireProtocol

_CONNECTION_CLOSE = 5.0
_READ_AHEAD = 1 << 16  # bytes of a body that wait for whoever reads it
_LINGER = 2.0  # a client still sending a refused body gets this long to read the answer

log = structlog.get_logger()


class HTTPServer:
    """Accepts connections and hands their requests to the handlers.

    Attributes:
        addresses: of TCP, as host:port.

    Args:
        entry: what the handlers stand on.
        connections: count and bound them.
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
        """Accept what comes on a socket that listens."""
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
        """Accept nothing more, and end what is left of connections."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    async def _listen(self, **where: Any) -> asyncio.Server:
        """Accept connections there; each stands between its transport and aiohttp."""
        loop = asyncio.get_running_loop()
        protocol = behind_connections(self._connections, self._protocol)
        server: asyncio.Server = await loop.create_server(protocol, backlog=BACKLOG, **where)
        self._servers.append(server)
        return server

    def _protocol(self) -> WireProtocol:
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
