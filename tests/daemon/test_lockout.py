"""A tenant that holds all that it may of bodies and connections locks no other out."""

import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from umbel.daemon.http.connections import Connection, Connections
from umbel.daemon.identity.keys import add_key

from .raw import PATIENCE, chat_request, read_reply, read_to_end
from .running import RunningDaemon, eventually, running

CONNECTIONS = 30
MIB = 1 << 20
GOOD = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Tenant:
    """A client with a key of its own, on TCP."""

    def __init__(self, daemon: RunningDaemon, key: str) -> None:
        self._address = ("127.0.0.1", daemon.tcp_port())
        self._key = key

    def send(self, stack: ExitStack, request: bytes) -> socket.socket:
        """Send a request on a connection that the stack owns."""
        connection = stack.enter_context(socket.create_connection(self._address, PATIENCE))
        head = b"Authorization: Bearer " + self._key.encode() + b"\r\nHost:"
        connection.sendall(request.replace(b"Host:", head, 1))
        return connection

    def asks(self) -> int:
        """Ask for a chat; return the status."""
        with ExitStack() as stack:
            request = chat_request(max_tokens=2, user="x" * 1000)
            return read_reply(self.send(stack, request)).status


def half_sent(size: int, sent: int) -> bytes:
    """Begin a request and send a part of its body."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + b'{"user": "'.ljust(sent, b"x")[:sent]


@pytest.fixture(scope="module")
def daemon(tiny_dir: Path) -> Iterator[tuple[RunningDaemon, Tenant, Tenant]]:
    """A daemon with little room, a tenant that takes all of it, and another."""
    with tempfile.TemporaryDirectory(prefix="u") as name:
        folder = Path(name)
        env = {"UMBEL_BODY_BYTES": "16MiB", "UMBEL_MAX_CONNECTIONS": str(CONNECTIONS)}
        env |= {"UMBEL_READ_TIMEOUT": "600", "UMBEL_KEYS_FILE": str(folder / "keys.json")}
        keys = [add_key(folder / "keys.json", name)[1] for name in ("hostile", "other")]
        with running(folder, tiny_dir, "--port", "0", env=env) as started:
            hostile, other = (Tenant(started, key) for key in keys)
            yield started, hostile, other


Started = tuple[RunningDaemon, Tenant, Tenant]


def test_half_sent_bodies(daemon: Started) -> None:
    """They are refused from a part of the budget on, and everybody else is served."""
    started, hostile, other = daemon
    with ExitStack() as stack:

        def holds_all() -> bool:
            """Hold one more, if there is room, and see whether a small body is refused."""
            hostile.send(stack, half_sent(MIB, MIB - 10))
            return hostile.asks() == 503

        eventually(holds_all)
        assert other.asks() == 200
        assert started.post(GOOD).status == 200
        assert started.post({**GOOD, "user": "x" * (MIB + MIB // 4)}).status == 200
    eventually(lambda: hostile.asks() == 200)


def test_connections_without_a_body(daemon: Started) -> None:
    """The oldest of them makes room, in words; the connections of others stay."""
    started, hostile, other = daemon
    with ExitStack() as stack:
        slow = other.send(stack, chat_request(max_tokens=2)[:-1])
        held = [hostile.send(stack, half_sent(10, 0)) for _ in range(CONNECTIONS - 2)]
        assert other.asks() == 200

        def displaced() -> list[socket.socket]:
            """Hold one more, and list those that have ended once another tenant is served."""
            hostile.send(stack, half_sent(10, 0))
            select.select(held, [], [], 0.1)  # until it is more than an idle connection
            assert other.asks() == 200
            assert started.status()["state"] == "ready"
            return select.select(held, [], [], 0)[0]

        assert b" 503 " in read_to_end(eventually(displaced)[0])
        slow.sendall(b"}")
        assert read_reply(slow).status == 200


class Known(Connection):
    """A connection without a transport, which notes how it ended."""

    def __init__(self, name: str, *, operator: bool = False) -> None:
        self.name, self.operator, self.ended = name, operator, ""

    def drop(self) -> None:
        """End it."""
        self.ended = "dropped"

    def displace(self) -> None:
        """End it in words."""
        self.ended = "displaced"


def test_the_connection_that_makes_room() -> None:
    """An idle one, then the oldest of the tenant that holds most; never one that is answered."""
    connections = Connections(6, header_timeout=1, idle_timeout=1, write_timeout=1)

    def opened(name: str, *, operator: bool = False) -> Known:
        known = Known(name, operator=operator)
        assert connections.admit(known)
        return known

    idle, answered, one, *many = (opened(name) for name in ["idle", "answered", *"baaa"])
    for each in (answered, one, *many):
        connections.set_busy(each)
    for each in (one, *many):
        connections.set_held(each, each.name)
    connections.set_busy(many[0])  # its body has come
    connections.set_busy(opened("new"))
    assert (idle.ended, len(connections)) == ("dropped", 6)
    connections.set_busy(opened("new"))
    assert [each.ended for each in (answered, one, *many)] == ["", "", "", "displaced", ""]
    connections.set_busy(opened("new"))
    assert one.ended == "displaced", "of two tenants with one each, the one that came first"
    connections.set_busy(opened("new"))
    assert many[2].ended == "displaced"
    assert not connections.admit(Known("new"))
    assert answered.ended == many[0].ended == ""


def test_an_operator_with_few_is_let_in() -> None:
    """Beyond the limit, though all others are being answered; with many, it waits as all do."""
    connections = Connections(2, header_timeout=1, idle_timeout=1, write_timeout=1)
    others = [Known("a"), Known("a")]
    operators = [Known("operator", operator=True) for _ in range(9)]
    for each in others:
        assert connections.admit(each)
        connections.set_busy(each)
    for each in operators[:8]:
        assert connections.admit(each)
        connections.set_busy(each)
    assert not connections.admit(operators[8])
    assert not connections.admit(Known("a"))
    connections.discard(operators[0])
    connections.discard(operators[0])
    assert connections.admit(operators[8])
    assert all(not each.ended for each in (*others, *operators))
