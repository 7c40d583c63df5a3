"""Connections: how many, how long they may be silent, and who has left."""

import resource
import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from umbel.daemon.http.sockets import BACKLOG
from umbel.daemon.lifecycle.reload import MOST_CONNECTIONS, most_connections

from .crowd import is_idle, parsed
from .raw import HEALTH, PATIENCE, chat_request, connected, read_reply, read_to_end
from .running import START, RunningDaemon, eventually, is_ready, running, spawn

LIMIT = 40
SPARE = 200  # descriptors that this process needs besides its connections
LONG = {"max_tokens": 6000, "temperature": 0}


@pytest.fixture(scope="module")
def daemon(long_tiny_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon that lets few connections in, and wants a key on TCP."""
    env = {
        "UMBEL_MAX_CONNECTIONS": str(LIMIT),
        "UMBEL_API_KEY": "secret",
        "UMBEL_HEADER_TIMEOUT": "600",
        "UMBEL_IDLE_TIMEOUT": "1",
        "UMBEL_KEEPALIVE": "0.2",
    }
    flags = ("--max-batch", "1", "--port", "0")
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir, *flags, env=env) as started,
    ):
        yield started


def is_closed(connection: socket.socket) -> bool:
    """Return True if the daemon has closed a connection on which nothing is to be read."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    finally:
        connection.setblocking(True)


def is_served(daemon: RunningDaemon) -> bool:
    """Return True if a connection is let in."""
    with suppress(ConnectionError):
        return daemon.request("GET", "/health").status == 200
    return False


def open_descriptors(daemon: RunningDaemon) -> int:
    """How many descriptors a daemon has."""
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


class TestTheBound:
    """`max_connections`."""

    def test_the_oldest_idle_one_goes_first(self, daemon: RunningDaemon) -> None:
        """A crowd of idle connections is served on the newest of them; the log says so once."""
        with ExitStack() as stack:
            crowd = [stack.enter_context(connected(daemon.socket)) for _ in range(3 * LIMIT)]
            crowd[-1].sendall(HEALTH)
            assert read_reply(crowd[-1]).status == 200
            eventually(lambda: sum(map(is_closed, crowd)) >= 2 * LIMIT)
            assert not any(map(is_closed, crowd[-LIMIT // 2 :]))
            assert all(map(is_closed, crowd[: 2 * LIMIT]))
            assert daemon.status()["state"] == "ready"
        eventually(lambda: daemon.status()["state"] == "ready")
        assert daemon.log().count("too many connections") == 1

    def test_one_with_a_request_is_not_closed(self, daemon: RunningDaemon) -> None:
        """A client that waits for an answer keeps its connection, however many come after."""
        connection, response = daemon.stream(
            {"messages": [{"role": "user", "content": "x"}], **LONG}
        )
        assert response.readline()
        with ExitStack() as stack:
            for _ in range(2 * LIMIT):
                stack.enter_context(connected(daemon.socket))
            daemon.status()
            for _ in range(20):
                assert response.readline()
        connection.close()
        eventually(lambda: is_idle(daemon))

    def test_a_newcomer_is_refused_where_all_have_requests(self, daemon: RunningDaemon) -> None:
        """It hears why and when to come back; those at work go on, and room is used again."""
        with ExitStack() as stack:
            crowd = [stack.enter_context(connected(daemon.socket)) for _ in range(LIMIT)]
            for connection in crowd:
                connection.sendall(chat_request(stream=True, **LONG))
            for connection in crowd:  # streams of those that wait begin after a while
                assert connection.recv(12) == b"HTTP/1.1 200"
            with connected(daemon.socket) as newcomer:
                reply = parsed(read_to_end(newcomer))
            assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
            assert "all of them have a request" in reply.json()["error"]["message"]
        eventually(lambda: is_served(daemon))
        eventually(lambda: is_idle(daemon))

    def test_it_is_counted_before_the_key(self, daemon: RunningDaemon) -> None:
        """On TCP, connections without a key are bounded like all others."""
        address = ("127.0.0.1", daemon.tcp_port())
        with ExitStack() as stack:
            crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(50)]
            crowd[-1].sendall(HEALTH)
            assert read_reply(crowd[-1]).status == 200
            eventually(lambda: sum(map(is_closed, crowd)) >= 50 - LIMIT)
            assert daemon.status()["state"] == "ready"

    def test_room_is_left_for_files(self) -> None:
        """However few descriptors there are, a backlog of connections fits beside the files."""
        assert most_connections(1 << 20) == MOST_CONNECTIONS
        assert most_connections(4096) <= 4096 - BACKLOG - 256
        for descriptors in (256, 1024, 2048, 10240):
            assert 0 < most_connections(descriptors) <= max(descriptors // 2, descriptors - BACKLOG)
        assert most_connections(1 << 20, 10_000) == 10_000
        assert most_connections(4096, 10_000) == most_connections(4096)

    @pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are read in /proc")
    def test_the_limit_of_open_files_is_raised(self, short_path: Path, tiny_dir: Path) -> None:
        """A daemon started with a low soft limit takes what the hard one allows, and keeps it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            daemon = spawn(short_path, tiny_dir)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: is_ready(daemon), START)
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
        raised, hardest = line.split()[3:5]
        assert raised == hardest != "256"
        assert daemon.terminate() == 0

    @pytest.mark.slow
    def test_five_thousand_idle_ones(self, short_path: Path, long_tiny_dir: Path) -> None:
        """A normal client is served beside them, and files can still be opened."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 5000 + SPARE
        limit = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
        with running(short_path, long_tiny_dir) as daemon, ExitStack() as stack:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            for _ in range(min(5000, limit - SPARE)):
                stack.enter_context(connected(daemon.socket))
            reply = daemon.post({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
            assert reply.status == 200
            assert open_descriptors(daemon) <= MOST_CONNECTIONS + 256
            assert daemon.log().count("too many connections") == 1


class TestDeadlines:
    """`header_timeout` and `idle_timeout`; the shared daemon's are short."""

    def test_a_silent_connection_is_closed(self, tiny_daemon: RunningDaemon) -> None:
        """A client that sends nothing is not answered."""
        with connected(tiny_daemon.socket) as connection:
            assert read_to_end(connection) == b""

    def test_a_byte_now_and_then_is_no_respite(self, tiny_daemon: RunningDaemon) -> None:
        """The deadline is for all headers, not for the next byte."""
        with connected(tiny_daemon.socket) as connection:
            try:
                for byte in HEALTH[:20] * 1000:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)
            except (BrokenPipeError, ConnectionResetError):
                return
        pytest.fail("it was never cut off")

    def test_also_on_a_connection_that_was_kept_alive(self, tiny_daemon: RunningDaemon) -> None:
        """A second request gets no longer than the first."""
        with connected(tiny_daemon.socket) as connection:
            connection.sendall(HEALTH)
            assert read_reply(connection).status == 200
            connection.sendall(HEALTH[:-2])
            assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")

    def test_one_kept_alive_may_be_idle_for_longer(self, tiny_daemon: RunningDaemon) -> None:
        """Clients keep their connections in pools: silence there is no fault."""
        with connected(tiny_daemon.socket) as connection:
            connection.sendall(HEALTH)
            read_reply(connection)
            time.sleep(1.5)  # longer than the header's time
            connection.sendall(HEALTH)
            assert read_reply(connection).status == 200

    def test_a_request_has_its_own_time(self, tiny_daemon: RunningDaemon) -> None:
        """Once the headers are there, an answer may take as long as it takes."""
        with connected(tiny_daemon.socket) as connection:
            connection.sendall(chat_request(max_tokens=1500, temperature=0))
            assert read_reply(connection).status == 200

    def test_it_ends_an_idle_one_too(self, daemon: RunningDaemon) -> None:
        """An answered connection without a next request is closed without a word."""
        with connected(daemon.socket) as connection:
            connection.sendall(HEALTH)
            read_reply(connection)
            assert read_to_end(connection) == b""


class TestPipelining:
    """Requests sent before the first one is answered."""

    def test_they_are_answered_in_order(self, tiny_daemon: RunningDaemon) -> None:
        """Also more of them than aiohttp takes at once, with bodies larger than it buffers."""
        count = 40
        with connected(tiny_daemon.socket) as connection:
            for number in range(count):
                body = {"max_tokens": 1 + number % 3, "temperature": 0, "user": "x" * 5000}
                connection.sendall(chat_request(**body))
            replies = [read_reply(connection) for _ in range(count)]
        tokens = [reply.json()["usage"]["completion_tokens"] for reply in replies]
        assert tokens == [1 + number % 3 for number in range(count)]

    @pytest.mark.parametrize("padding", [0, 100_000])
    def test_a_client_that_leaves_is_noticed(
        self, tiny_daemon: RunningDaemon, padding: int
    ) -> None:
        """The running request ends and later ones never start, however much was sent ahead."""
        before = tiny_daemon.status()["engine"]["generation_tokens"]
        with connected(tiny_daemon.socket) as connection:
            for _ in range(3):
                connection.sendall(chat_request(user="x" * padding, **LONG))
            eventually(lambda: tiny_daemon.status()["engine"]["running"])
        eventually(lambda: is_idle(tiny_daemon))
        assert tiny_daemon.status()["engine"]["generation_tokens"] - before < LONG["max_tokens"]
        assert "finish=cancelled" in tiny_daemon.log().splitlines()[-1]

    def test_a_client_that_leaves_is_noticed_within_a_step(
        self, smollm2_daemon: RunningDaemon
    ) -> None:
        """With a real model's steps, and more sent ahead than aiohttp takes."""
        with connected(smollm2_daemon.socket) as connection:
            connection.sendall(chat_request(logit_bias={"2": -100}, **LONG) * 100)
            eventually(lambda: smollm2_daemon.status()["engine"]["running"])
        steps = smollm2_daemon.status()["engine"]["steps"]
        eventually(lambda: is_idle(smollm2_daemon))
        # One was under way, one may have begun before the loop heard, and one drops the sequence.
        assert smollm2_daemon.status()["engine"]["steps"] - steps <= 3

    def test_a_client_that_leaves_after_many_requests_is_noticed(
        self, tiny_daemon: RunningDaemon
    ) -> None:
        """At 32 requests aiohttp stops reading; a client that leaves is noticed all the same."""
        before = tiny_daemon.status()["engine"]["generation_tokens"]
        with connected(tiny_daemon.socket) as connection:
            connection.sendall(chat_request(**LONG) * 100)
            eventually(lambda: tiny_daemon.status()["engine"]["running"])
        eventually(lambda: is_idle(tiny_daemon))
        assert tiny_daemon.status()["engine"]["generation_tokens"] - before < LONG["max_tokens"]

    def test_too_much_is_cut_off(self, tiny_daemon: RunningDaemon) -> None:
        """Requests that wait for their turn do not fill the daemon's memory."""
        with connected(tiny_daemon.socket) as connection:
            connection.sendall(chat_request(**LONG))
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                connection.sendall(chat_request(user="x" * 60_000, **LONG) * 100)
        eventually(lambda: is_idle(tiny_daemon))
        assert "it pipelined too much" in tiny_daemon.log()


@pytest.mark.parametrize(
    "request_line", ["GET /health", "GET /nothing", "NO HTTP AT ALL", "POST /v1"]
)
def test_every_answer_names_the_server_alike(tiny_daemon: RunningDaemon, request_line: str) -> None:
    """Whatever is answered, and however it failed: no version of a library is told."""
    with connected(tiny_daemon.socket) as connection:
        connection.sendall(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        reply = read_reply(connection)
    assert reply.headers["Server"] == "umbel"


def large_answer() -> bytes:
    """Ask for an answer that is larger than what a connection holds unread."""
    return chat_request(max_tokens=600, temperature=0, logprobs=True, top_logprobs=20)


def test_a_request_behind_an_answer_that_is_read_late(tiny_daemon: RunningDaemon) -> None:
    """Its headers have come long ago: it waits for its turn, and is answered."""
    second = chat_request(max_tokens=2).replace(b"Host:", b"Connection: close\r\nHost:")
    with connected(tiny_daemon.socket) as connection:
        connection.sendall(large_answer())
        eventually(lambda: tiny_daemon.status()["engine"]["running"])
        eventually(lambda: is_idle(tiny_daemon))
        connection.sendall(second)
        time.sleep(1.5)  # longer than headers may take
        received = read_to_end(connection)
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert b"HTTP/1.1 408" not in received


def test_nothing_piles_up_behind_an_answer_that_is_not_read(tiny_daemon: RunningDaemon) -> None:
    """Bytes sent ahead then stay with the kernel, which holds few."""
    body = 50 << 20
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {body}\r\n\r\n"
    with connected(tiny_daemon.socket) as connection:
        connection.sendall(large_answer() + head.encode() + b"x" * 150_000)
        eventually(lambda: tiny_daemon.status()["engine"]["running"])
        eventually(lambda: is_idle(tiny_daemon))
        connection.setblocking(False)
        sent = 0
        try:
            for _ in range(200):
                _, writable, _ = select.select([], [connection], [], 0.2)
                if not writable:
                    break
                sent += connection.send(b"x" * 100_000)
        except ConnectionError:
            pass
        assert sent < 10 << 20


def test_an_answer_that_is_not_read_ends(tiny_daemon: RunningDaemon) -> None:
    """Also one that is no stream: what waits for its reader does not wait for ever."""
    with connected(tiny_daemon.socket) as connection:
        connection.sendall(large_answer())
        hung_up = select.poll()
        hung_up.register(connection, 0)
        assert hung_up.poll(PATIENCE * 1000)
        received = read_to_end(connection)
        length = int(received.partition(b"Content-Length: ")[2].split()[0])
        assert len(received) < length
