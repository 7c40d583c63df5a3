"""Two thousand clients at once, and one that does not read: all are served in time."""

import asyncio
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .crowd import (
    PATIENCE,
    SYSTEM,
    Calm,
    connect,
    events_of,
    flood,
    is_idle,
    outcomes,
    parsed,
    raw_request,
    text_of,
)
from .running import Reply, RunningDaemon, eventually, running

CLIENTS = 2000
WAITING = 400  # requests that may wait
SPARE = 200  # file descriptors that this process and the daemon need besides the clients'
CHANNEL_LIMIT = 4096  # tokens that may pile up for a client, see docs/http/streams.md
LONG = 300  # tokens of the answers that are read
FEW = 3  # steps in which a token may not have come to everyone: a sequence joined or left


@pytest.fixture(scope="module")
def room() -> Iterator[int]:
    """How many clients the limit on file descriptors lets be there at once; it is raised first.

    Where the limit is hard, the clients come in waves of as many as it allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CLIENTS + SPARE
    limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield max(1, min(CLIENTS, limit - SPARE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def daemon(long_tiny_dir: Path, room: int) -> Iterator[RunningDaemon]:
    """A daemon that inherits the raised limit, and cuts no client off for the time it takes.

    It runs few requests at once: however fast it is, two thousand are more than it can take.
    """
    assert room
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(
            Path(folder),
            long_tiny_dir,
            *("--max-waiting", str(WAITING), "--max-batch", "4"),
            env={"UMBEL_WRITE_TIMEOUT": "900"},
        ) as started,
    ):
        yield started


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full backlog refuses at once")
def test_a_full_backlog_is_waited_for(short_path: Path) -> None:
    """A client of these tests connects as soon as there is room, and waits no longer than told."""
    path = short_path / "u.sock"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as held:
        listener.bind(str(path))
        listener.listen(0)
        held.enter_context(connect(path))
        with pytest.raises(BlockingIOError):
            connect(path, 0.05)
        late = threading.Timer(0.1, lambda: held.enter_context(listener.accept()[0]))
        late.start()
        held.enter_context(connect(path))
        late.join()


@pytest.mark.slow
def test_each_is_answered_or_refused(daemon: RunningDaemon, room: int) -> None:
    """Two thousand at once: the right text, or a 429 where the queue is full; none is lost."""
    calm = Calm(daemon)
    before = outcomes(daemon)
    replies = asyncio.run(flood(daemon, CLIENTS, room))
    assert sorted(replies) == list(range(CLIENTS))
    statuses = calm.check_replies(replies)
    assert statuses[200] >= min(WAITING, room)
    assert statuses[429] or room < CLIENTS
    calm.check_calm()
    counted = outcomes(daemon) - before
    assert (counted["refused"], counted["length"]) == (statuses[429], statuses[200] + 5)


def test_clients_that_leave(daemon: RunningDaemon, room: int) -> None:
    """Half of a crowd hang up on the way: the others are answered, all is given back."""
    calm = Calm(daemon)
    leaving = frozenset(number for number in range(WAITING) if number % 8 < 4)
    replies = asyncio.run(flood(daemon, WAITING, room, leaving))
    assert len(replies) == WAITING / 2
    assert calm.check_replies(replies) == {200: WAITING / 2}
    calm.check_calm()


@pytest.mark.parametrize(
    "clients",
    [
        pytest.param(WAITING, marks=pytest.mark.slow),
        pytest.param(CLIENTS, marks=pytest.mark.nightly),
    ],
)
def test_all_are_answered_where_there_is_room(
    short_path: Path, long_tiny_dir: Path, room: int, clients: int
) -> None:
    """A crowd at once, and as many may wait: each one gets the right text."""
    with running(short_path, long_tiny_dir, "--max-waiting", str(clients)) as daemon:
        calm = Calm(daemon)
        replies = asyncio.run(flood(daemon, clients, room))
        assert calm.check_replies(replies) == {200: clients}
        calm.check_calm()


def long_body(question: str, tokens: int) -> dict[str, Any]:
    """Ask for a long answer."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": tokens}


class Readers:
    """Three clients that stream and read; meanwhile the engine is watched.

    Attributes:
        texts: their answers.
        idle_steps: for each, steps of the engine that brought it no token, in the time in
            which all three were seen to decode.
        seen: requests that ran during all of this time.
    """

    def __init__(self, daemon: RunningDaemon) -> None:
        self._daemon = daemon
        streams = [daemon.stream(long_body(f"question {n}", LONG)) for n in range(3)]
        names = [response.headers["x-request-id"] for _, response in streams]
        bodies = [b""] * 3

        def read(number: int, response: HTTPResponse) -> None:
            bodies[number] = response.read()

        threads = [
            threading.Thread(target=read, args=(number, response))
            for number, (_, response) in enumerate(streams)
        ]
        for thread in threads:
            thread.start()
        pictures = self._watch(threads, names)
        for thread, (connection, _) in zip(threads, streams, strict=True):
            thread.join(PATIENCE)
            connection.close()
        self.texts = [
            text_of(Reply(200, dict(response.headers), body))
            for (_, response), body in zip(streams, bodies, strict=True)
        ]
        (first_steps, first), (last_steps, last) = pictures[0], pictures[-1]
        made = [last[name] - first[name] for name in names]
        assert min(made) > LONG / 4, "they were hardly ever seen to run"
        self.idle_steps = [last_steps - first_steps - tokens for tokens in made]
        self.seen = set(first) & set(last)

    def _watch(
        self, threads: list[threading.Thread], names: list[str]
    ) -> list[tuple[int, dict[str, int]]]:
        """Picture steps and tokens made while all three decode. One picture is of one step."""
        pictures = []
        while any(thread.is_alive() for thread in threads):
            engine = self._daemon.status()["engine"]
            tokens = {r["request"]: r["output_tokens"] for r in engine["running"]}
            if all(tokens.get(name) for name in names):
                pictures.append((engine["steps"], tokens))
            time.sleep(0.01)  # who looks takes the engine's time
        return pictures


def tokens_of(daemon: RunningDaemon) -> int:
    """How many tokens have been made so far."""
    return int(daemon.status()["engine"]["generation_tokens"])


def read_all(connection: socket.socket) -> Reply:
    """Read an answer to its end."""
    data = b""
    while piece := connection.recv(1 << 20):
        data += piece
    return parsed(data)


@contextmanager
def unread(daemon: RunningDaemon) -> Iterator[socket.socket]:
    """Ask for a long stream and read nothing of it."""
    before = tokens_of(daemon)
    with closing(connect(daemon.socket)) as connection:
        connection.sendall(raw_request(long_body("tell me all", 8000) | {"stream": True}))
        eventually(lambda: tokens_of(daemon) > before + 10, PATIENCE)
        yield connection


def test_a_slow_reader_does_not_slow_the_others(daemon: RunningDaemon) -> None:
    """Three who read need the same steps, to the same end, beside one who reads nothing."""
    calm = Calm(daemon)
    alone = Readers(daemon)
    eventually(lambda: is_idle(daemon), PATIENCE)
    with unread(daemon):
        beside = Readers(daemon)
        # They are done, and not a byte of the slow one's answer was read.
        assert len(beside.seen) == 4
        assert beside.texts == alone.texts
        pairs = zip(beside.idle_steps, alone.idle_steps, strict=True)
        assert all(abs(one - other) <= FEW for one, other in pairs), beside.idle_steps
    calm.check_calm()


@pytest.mark.slow
def test_a_slow_reader_is_cut_off(daemon: RunningDaemon) -> None:
    """When 4,096 tokens have piled up the answer ends; what there is of it can still be read."""
    calm = Calm(daemon)
    before = tokens_of(daemon)
    with unread(daemon) as slow:
        eventually(lambda: is_idle(daemon), PATIENCE)
        made = tokens_of(daemon) - before
        assert CHANNEL_LIMIT <= made < 8000
        reply = read_all(slow)
    *chunks, last = events_of(reply.body)
    assert "read too slowly" in msgspec.json.decode(last)["error"]["message"]
    assert CHANNEL_LIMIT / 2 < len(chunks) <= made + 1
    eventually(lambda: "read too slowly" in daemon.log())
    calm.check_calm()
