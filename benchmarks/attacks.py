"""Attacks on a daemon's Unix socket, each kind at a bounded rate in a process of its own.

    python benchmarks/attacks.py KIND SOCKET --seconds 300 [--connections 5000]

`hostile.py` starts them; each prints as JSON what came of it. Only the standard library is needed.
"""

import argparse
import asyncio
import gzip
import json
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import cache
from typing import Any, NamedTuple

MIB = 1 << 20
BOMB = 60 * MIB  # just below the largest body that is taken
ZIPPED = 32 * MIB  # what a compressed bomb becomes
SPARE_FILES = 50
_PIECE = MIB // 4
PATIENCE = 60.0  # seconds until an attack counts as unanswered
_DRIP = 5.0  # seconds between two header lines of a connection that never finishes them
_HELD = 20.0  # seconds for which a stream is left unread
_SHORT = 5.0  # seconds that garbage waits for an answer
_STAY = 1.0  # seconds after which a client of the storm leaves, whatever it got

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"

Act = Callable[[str, str, int], Awaitable[str]]
"""Attacks once, given the socket, a variant and a number; returns what came of it."""


class Kind(NamedTuple):
    """A kind of attack: its variants take turns."""

    act: Act
    variants: Sequence[str]
    rate: float  # new ones a second, at most
    most: int  # at a time, at most
    burst: int = 1  # how many come at once in the beginning


def connect(path: str) -> socket.socket:
    """Connect without waiting; raises `BlockingIOError` where the backlog is full."""
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    try:
        made.connect(path)  # asyncio would take a full backlog for a connection
    except OSError:
        made.close()
        raise
    return made


async def send(connection: socket.socket, *pieces: bytes) -> None:
    """Send all of it."""
    for piece in pieces:
        await asyncio.get_running_loop().sock_sendall(connection, piece)


async def receive(connection: socket.socket, size: int = 4096) -> bytes:
    """Receive something; empty at the end."""
    return await asyncio.get_running_loop().sock_recv(connection, size)


def status_of(answer: bytes) -> str:
    """The status that an answer begins with."""
    if not answer:
        return "closed"
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "not HTTP"


def head(route: str, length: int, more: str = "") -> bytes:
    """Write a request's head."""
    fields = f"Host: localhost\r\nContent-Length: {length}\r\n{more}"
    return f"POST {route} HTTP/1.1\r\n{fields}\r\n".encode()


def question(text: str, tokens: int, *, stream: bool = True) -> bytes:
    """Write a request for a chat completion."""
    messages = [{"role": "user", "content": text}]
    made = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream}
    body = json.dumps(made).encode()
    return head(_CHAT, len(body)) + body


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do something meanwhile, which may fail; it is over before the socket is closed."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def flood(path: str, variant: str, _number: int) -> str:
    """Hold a connection until the daemon closes it."""
    with closing(connect(path)) as connection:
        if variant == "endless headers":
            async with beside(_drip(connection)):
                return status_of(await receive(connection))
        if variant == "kept alive":
            await send(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if (status := status_of(await receive(connection))) != "200":
                return status
        return status_of(await receive(connection))


async def _drip(connection: socket.socket) -> None:
    await send(connection, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    while True:
        await asyncio.sleep(_DRIP)
        await send(connection, b"X-Slow: yes\r\n")


class Bomb(NamedTuple):
    """A large body: a unit time and again, between two ends."""

    route: str
    start: bytes
    unit: bytes
    end: bytes

    def pieces(self, size: int = BOMB) -> list[bytes]:
        """The body in pieces, all but the ends the same object."""
        block = self.unit * (_PIECE // len(self.unit))
        return [self.start, *[block] * (size // len(block)), self.end]


_USER = b'{"messages":[{"role":"user","content":'
_MESSAGE = b',{"role":"user","content":"a"}'
BOMBS = {
    "tokens": Bomb(_TEXT, b'{"prompt":[1', b",1", b"]}"),
    "parts": Bomb(_CHAT, _USER + b"[{}", b",{}", b"]}]}"),
    "messages": Bomb(_CHAT, _USER + b'"a"}', _MESSAGE, b'],"max_tokens":1}'),
    "model name": Bomb(_CHAT, b'{"model":"', b"m", b'","messages":[{"role":"user"}]}'),
    "nesting": Bomb(_CHAT, b'{"messages":', b"[", b"]}"),
    "text": Bomb(_CHAT, _USER + b'"', b"a plan ", b'"}],"max_tokens":1}'),
}
_ZIPPED, _UNFINISHED = "gzip", "unfinished"


@cache
def zipped() -> bytes:
    """Compress a body a thousandfold."""
    return gzip.compress(b"".join(BOMBS["text"]._replace(unit=b"a").pieces(ZIPPED)))


async def bomb(path: str, variant: str, _number: int) -> str:
    """Send a large body, and wait for the answer; one that comes before the body's end counts."""
    with closing(connect(path)) as connection:
        if variant == _ZIPPED:
            pieces = [head(_CHAT, len(zipped()), "Content-Encoding: gzip\r\n"), zipped()]
        else:
            made = BOMBS.get(variant, BOMBS["text"])
            pieces = made.pieces()
            pieces.insert(0, head(made.route, sum(map(len, pieces))))
        if variant == _UNFINISHED:
            del pieces[len(pieces) // 3 :]
        async with asyncio.timeout(PATIENCE), beside(send(connection, *pieces)):
            return status_of(await receive(connection))


async def leave_unread(path: str, _variant: str, number: int) -> str:
    """Ask for a long stream, read nothing of it for a while, and leave."""
    with closing(connect(path)) as connection:
        await send(connection, question(f"tell me all about {number}", 2000))
        await asyncio.sleep(_HELD)
        async with asyncio.timeout(_SHORT):
            return status_of(await receive(connection, 16))


async def pipeline(path: str, variant: str, number: int) -> str:
    """Send three requests at once, and leave before there is an answer to all."""
    with closing(connect(path)) as connection:
        stream = variant == "streams"
        requests = [question(f"pipe {number} {i}", 100, stream=stream) for i in range(3)]
        await send(connection, b"".join(requests))
        await asyncio.sleep(random.uniform(0.1, 0.5))  # noqa: S311  (not a secret)
    return "left"


async def cancel(path: str, _variant: str, number: int) -> str:
    """Stream an answer, and leave after none to five of its tokens, or after a second."""
    wanted, received = random.randrange(6), b""  # noqa: S311  (not a secret)
    with closing(connect(path)) as connection, suppress(TimeoutError):
        await send(connection, question(f"storm {number}", 64))
        async with asyncio.timeout(_STAY):
            # The first event carries the role only.
            while wanted and received.count(b"data: {") <= wanted:
                piece = await receive(connection)
                received += piece
                if not piece or status_of(received) != "200":
                    return status_of(received)
    return "left"


GARBAGE = {
    "random bytes": random.Random(0).randbytes(2000),  # noqa: S311  (not a secret)
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "long line": b"GET /" + b"a" * MIB + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 50_000 + b"\r\n",
    "escapes in the path": b"GET /\x1b[2J\x07%1b%5b HTTP/1.1\r\nHost: a\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 9\r\n\r\na",
    "negative length": b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "bad chunks": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "broken JSON": head(_CHAT, 9) + b'{"model":\xff',
}


async def garbage(path: str, variant: str, _number: int) -> str:
    """Send what is no request."""
    with closing(connect(path)) as connection:
        async with asyncio.timeout(_SHORT), beside(send(connection, GARBAGE[variant])):
            return status_of(await receive(connection))


def kinds(connections: int) -> dict[str, Kind]:
    """All kinds; `connections` is how many a flood keeps open, all of them made in ten seconds."""
    flooding = ["silent", "endless headers", "kept alive"]
    return {
        "floods": Kind(flood, flooding, connections / 10, connections),
        "bombs": Kind(bomb, [*BOMBS, _ZIPPED, _UNFINISHED], 2, 16, burst=16),
        "slow-readers": Kind(leave_unread, ["unread"], 2, 8),
        "leavers": Kind(pipeline, ["streams", "whole answers"], 1, 100),
        "cancels": Kind(cancel, ["storm"], 20, 100),
        "garbage": Kind(garbage, list(GARBAGE), 10, 100),
    }


async def attack(kind: Kind, path: str, seconds: float) -> tuple[dict[str, Counter[str]], int]:
    """Attack for a while; returns what came of each variant, and how many there were at once."""
    outcomes: dict[str, Counter[str]] = {variant: Counter() for variant in kind.variants}
    running: set[asyncio.Task[None]] = set()
    most = number = 0

    async def once(variant: str, number: int) -> None:
        try:
            outcome = await kind.act(path, variant, number)
        except asyncio.CancelledError:
            outcomes[variant]["open at the end"] += 1
            raise
        except BlockingIOError:
            outcome = "backlog full"
        except TimeoutError:
            outcome = "no answer"
        except OSError:
            outcome = "cut off"
        outcomes[variant][outcome] += 1

    due = time.monotonic()
    end = due + seconds
    while due < end:
        await asyncio.sleep(due - time.monotonic())
        if len(running) < kind.most:
            task = asyncio.create_task(once(kind.variants[number % len(outcomes)], number))
            running.add(task)
            task.add_done_callback(running.discard)
            number, most = number + 1, max(most, len(running))
        if number >= kind.burst:
            due = max(due + 1 / kind.rate, time.monotonic())
    left = list(running)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return outcomes, most


def main() -> None:
    """Attack, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(kinds(1)))
    parser.add_argument("socket")
    for flag, default in (("--seconds", 300), ("--connections", 5000)):
        parser.add_argument(flag, type=int, default=default)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, options.connections + SPARE_FILES)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    kind = kinds(min(options.connections, limit - SPARE_FILES))[options.kind]
    outcomes, most = asyncio.run(attack(kind, options.socket, options.seconds))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = round(used.ru_utime + used.ru_stime, 2)
    found = {"rate": kind.rate, "most": kind.most, "reached": most, "cpu_s": seconds}
    print(json.dumps(found | {"outcomes": outcomes}))


if __name__ == "__main__":
    main()
