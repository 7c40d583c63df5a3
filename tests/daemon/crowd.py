"""Many clients of one daemon at once, over raw sockets, and what must be true after them."""

import asyncio
import io
import random
import socket
import struct
from collections import Counter
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast

import msgspec

from .running import Reply, RunningDaemon, eventually

PATIENCE = 120.0
"""Seconds after which a request that was neither answered nor refused counts as hanging."""

SYSTEM = "the agent reads the plan, writes the code, runs the tests and reports the result " * 2
QUESTIONS = [f"What is the capital of {number} France?" for number in range(25)]
_STREAMED = 4  # every fourth client asks for a stream


def body_of(number: int) -> dict[str, Any]:
    """Request of client `number`: one of the questions, over a common system prompt."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]},
    ]
    stream = number % _STREAMED == 0
    return {"messages": messages, "temperature": 0, "max_tokens": 8, "stream": stream}


def raw_request(body: dict[str, Any]) -> bytes:
    """Write a request for a chat completion, the only one of its connection."""
    encoded = msgspec.json.encode(body)
    return (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Length: {len(encoded)}\r\n\r\n"
    ).encode() + encoded


def connect(path: Path, patience: float = PATIENCE) -> socket.socket:
    """Connect, and wait where the backlog is full.

    A Unix socket that has a timeout does not block, and one that does not block is told EAGAIN
    where it would have to wait. So the kernel is told how long to wait.

    Raises:
        BlockingIOError: it was not accepted in that time.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        seconds, fraction = divmod(patience, 1)
        bound = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    connection.settimeout(PATIENCE)
    return connection


class Client:
    """One connection and one request."""

    def __init__(self, daemon: RunningDaemon, number: int) -> None:
        self.number = number
        self._request = raw_request(body_of(number))
        self._connection = connect(daemon.socket)
        self._connection.setblocking(False)

    def close(self) -> None:
        """Hang up, if that has not happened yet."""
        self._connection.close()

    async def ask(self) -> Reply:
        """Send the request and read the whole answer."""
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        try:
            writer.write(self._request)
            return parsed(await reader.read())
        finally:
            writer.close()

    async def leave(self) -> None:
        """Send some of the request, or all of it, perhaps read a little, and hang up."""
        reader, writer = await asyncio.open_unix_connection(sock=self._connection)
        chance = random.Random(self.number)  # noqa: S311  (not a secret)
        writer.write(self._request[: chance.choice([10, len(self._request) - 5, None])])
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(100), chance.random())
        writer.transport.abort()


class _Received:
    """The part of a socket that `HTTPResponse` needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        """Read what was received."""
        return io.BytesIO(self._data)


def parsed(data: bytes) -> Reply:
    """Take an answer apart; one that breaks off raises."""
    response = HTTPResponse(cast("socket.socket", _Received(data)))
    response.begin()
    return Reply(response.status, dict(response.headers), response.read())


def events_of(body: bytes) -> list[bytes]:
    """Data of a stream's events, comments left out."""
    return [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: ")]


def text_of(reply: Reply) -> str:
    """The text of an answer, streamed or not; it must be whole."""
    if not reply.headers["Content-Type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    *chunks, done = events_of(reply.body)
    assert done == b"[DONE]", done
    deltas = [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in chunks]
    return "".join(delta.get("content") or "" for delta in deltas)


async def flood(
    daemon: RunningDaemon, count: int, room: int, leaving: frozenset[int] = frozenset()
) -> dict[int, Reply]:
    """Send requests of many clients at once, all of them connected before the first one asks.

    Args:
        daemon: whom they ask.
        count: how many clients there are.
        room: how many may be connected at a time; more come in waves of as many.
        leaving: the numbers of those that hang up.
    """
    replies: dict[int, Reply] = {}
    for start in range(0, count, room):
        wave = range(start, min(start + room, count))
        with ExitStack() as connected:
            clients = []
            for number in wave:
                clients.append(await asyncio.to_thread(Client, daemon, number))
                connected.callback(clients[-1].close)
            leavers = [client.leave() for client in clients if client.number in leaving]
            stayers = [client for client in clients if client.number not in leaving]
            async with asyncio.timeout(PATIENCE):
                answers, _ = await asyncio.gather(
                    asyncio.gather(*(client.ask() for client in stayers)),
                    asyncio.gather(*leavers, return_exceptions=True),
                )
            replies |= zip([client.number for client in stayers], answers, strict=True)
    return replies


def outcomes(daemon: RunningDaemon) -> Counter[str]:
    """How many requests the daemon has counted, by how they ended; only what there was."""
    lines = daemon.request("GET", "/metrics").body.decode().splitlines()
    counted = [line.split('"') for line in lines if line.startswith("umbel_requests_total{")]
    found = +Counter({outcome: int(float(value.strip("} "))) for _, outcome, value in counted})
    refused = [line for line in lines if line.startswith("umbel_refusals_total{")]
    return found + Counter(refused=sum(int(float(line.split()[-1])) for line in refused))


class Calm:
    """A daemon before a flood, to compare with after it.

    Attributes:
        expected: the answers to `QUESTIONS`.
    """

    def __init__(self, daemon: RunningDaemon) -> None:
        self._daemon = daemon
        self.expected = [text_of(daemon.post(body_of(n))) for n in range(len(QUESTIONS))]
        assert len(set(self.expected)) > len(QUESTIONS) / 2  # or mixed up answers went unseen
        self._descriptors = self._open_files()

    def check_replies(self, replies: dict[int, Reply]) -> Counter[int]:
        """See that all are answered in the right words, or refused; count which."""
        for number, reply in replies.items():
            if reply.status == 200:
                assert text_of(reply) == self.expected[number % len(QUESTIONS)], number
            else:
                assert reply.status == 429, reply
                assert int(reply.headers["Retry-After"]) > 0
        return Counter(reply.status for reply in replies.values())

    def check_calm(self) -> None:
        """See that nothing is left: no request, lease or connection; and that it serves."""
        eventually(lambda: is_idle(self._daemon), PATIENCE)
        assert self._daemon.request("GET", "/cache").json()["leases"] == 0
        assert self._daemon.request("GET", "/cache/verify").json() == {"problems": []}
        eventually(lambda: self._open_files() <= self._descriptors + 4, PATIENCE)
        for number in range(5):
            reply = self._daemon.post(body_of(number))
            assert (reply.status, text_of(reply)) == (200, self.expected[number])

    def _open_files(self) -> int:
        """How many file descriptors the daemon has; 0 where that cannot be seen."""
        folder = Path("/proc") / str(self._daemon.process.pid) / "fd"
        return len(list(folder.iterdir())) if folder.exists() else 0


def is_idle(daemon: RunningDaemon) -> bool:
    """True if nothing runs and nothing waits."""
    status = daemon.status()
    return not status["engine"]["running"] and not status["waiting"]
