"""A client of a daemon on a Unix socket, for commands."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from ..errors import ClientError

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=120)
# Pauses in a stream are shorter: the daemon sends comments.
_OK = 200


class StreamEvent(msgspec.Struct):
    """One event of a stream: text, and in the last ones the reason of the end, and the usage."""

    text: str = ""
    usage: dict[str, Any] | None = None
    finish: str | None = None


class Client:
    """Talks to one daemon. An async context manager.

    Args:
        path: the daemon's Unix socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.UnixConnector(path=str(self.path), limit=0)
        self._session = aiohttp.ClientSession(
            "http://localhost", connector=connector, timeout=_TIMEOUT
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, route: str) -> dict[str, Any]:
        """Get a JSON document.

        Raises:
            ClientError: no daemon answers, or it answers with an error.
        """
        return await self._ask("GET", route)

    async def post(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Post a JSON document, and return the answer; raises as `get` does."""
        return await self._ask("POST", route, body)

    async def delete(self, route: str) -> dict[str, Any]:
        """Delete a resource, and return the answer; raises as `get` does."""
        return await self._ask("DELETE", route)

    async def _ask(
        self, method: str, route: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            async with self._connected.request(method, route, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClientError(_unreachable(self.path, error)) from error
        try:
            data = msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ClientError(f"it is not umbel that answers on {self.path}") from error
        if "error" in data:
            raise ClientError(_message(answer))
        return data

    async def chat(
        self,
        messages: list[dict[str, str]],
        *,
        conversation: str,
        model: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> AsyncIterator[StreamEvent]:
        """Stream the answer to a conversation.

        Raises:
            ClientError: the daemon refused, failed, or went away.
        """
        body = {
            "messages": messages,
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        headers = {"X-Umbel-Conversation": conversation}
        try:
            async with self._connected.post(
                "/v1/chat/completions", json=body, headers=headers
            ) as response:
                if response.status != _OK:
                    raise ClientError(_message(await response.read()))
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClientError(_broken_off(self.path, error)) from error

    @property
    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("enter the client first")
        return self._session


def _unreachable(path: Path, error: Exception) -> str:
    """Explain why no daemon answers on a socket, with advice."""
    match getattr(error, "os_error", error):
        case FileNotFoundError():
            why = "there is no such socket; umbel serve starts a daemon, or name its --socket"
        case ConnectionRefusedError():
            why = "its daemon has ended; umbel serve starts another"
        case PermissionError():
            why = "it is another user's"
        case TimeoutError():
            why = "it did not answer in time"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            why = "it ended before it had answered"
        case other:
            why = str(other)
    return f"no daemon answers on {path}: {why}"


def _broken_off(path: Path, error: Exception) -> str:
    """Explain why a streamed answer has no end."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return _unreachable(path, error)
    if isinstance(error, TimeoutError):
        return f"the daemon on {path} is silent, and its answer has no end"
    return f"the daemon on {path} went away before its answer was complete"


def _event(line: bytes) -> StreamEvent:
    data = msgspec.json.decode(line.removeprefix(b"data: "))
    if "error" in data:
        raise ClientError(data["error"]["message"])
    text = "".join(choice["delta"].get("content") or "" for choice in data["choices"])
    finish = next((c["finish_reason"] for c in data["choices"] if c.get("finish_reason")), None)
    return StreamEvent(text, data.get("usage"), finish)


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
