"""The daemon's messages to systemd, and the socket from there, as its manuals say."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog.testing
from aiohttp.test_utils import TestClient, TestServer

from umbel.daemon.config import ModelSettings, Settings
from umbel.daemon.errors import SocketError
from umbel.daemon.http.app import application
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.lifecycle.service_manager import InheritedListener, ServiceManager, inherited
from umbel.daemon.models.slot import ModelSlot
from umbel.daemon.observability.status import LOADING_TAKES, STALLED_AFTER

from .running import RunningDaemon, UnixConnection, eventually, spawn
from .serving import serving

MOST = 50
"""Messages that a test waits for."""


@pytest.fixture
def heard(heard: socket.socket) -> socket.socket:
    """The socket of a service manager; it waits for messages."""
    heard.settimeout(60)
    return heard


def address(heard: socket.socket) -> str:
    """Where that is."""
    return str(heard.getsockname())


def until(heard: socket.socket, line: str) -> list[str]:
    """Return the lines of all messages up to the first one with this line."""
    lines: list[str] = []
    for _ in range(MOST):
        message = heard.recv(4096).decode().split("\n")
        lines += message
        if line in message:
            return lines
    raise AssertionError(lines)


# -- what is told ------------------------------------------------------------------------


def test_each_message_is_what_the_manual_says(heard: socket.socket) -> None:
    """One datagram for each, and a status is one line, whatever it is made of."""
    manager = ServiceManager(address(heard))
    manager.status("warming up")
    manager.ready("serving a\nREADY=0")
    manager.stopping()
    assert [heard.recv(4096) for _ in range(3)] == [
        b"STATUS=warming up",
        b"READY=1\nSTATUS=serving a READY=0",
        b"STOPPING=1\nSTATUS=stopping",
    ]


def test_a_reload_has_a_beginning_and_an_end(heard: socket.socket) -> None:
    """With the time of the monotonic clock, which the protocol wants."""
    before = time.monotonic_ns() // 1000
    manager = ServiceManager(address(heard))
    manager.reloading()
    manager.reloaded()
    begin, clock = heard.recv(4096).decode().split("\n")
    assert begin == "RELOADING=1"
    assert before <= int(clock.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    assert heard.recv(4096) == b"READY=1"


@pytest.mark.skipif(sys.platform != "linux", reason="abstract names are Linux's")
def test_an_abstract_name_is_reached() -> None:
    """As containers have it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + f"umbel-{os.getpid()}")
        listening.settimeout(10)
        ServiceManager(f"@umbel-{os.getpid()}").status("loading")
        assert listening.recv(99) == b"STATUS=loading"


def test_nobody_need_listen(short_path: Path) -> None:
    """Without a manager nothing is said; one that is gone is complained of once."""
    with structlog.testing.capture_logs() as logs:
        ServiceManager(None).ready("serving")
        gone = ServiceManager(str(short_path / "gone"))
        for _ in range(3):
            gone.ready("serving")
    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("the service manager does not listen", "warning")
    ]


@pytest.mark.parametrize(
    ("given", "watchdog"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid() + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_who_starts_it_says_how_often_it_listens(
    given: dict[str, str], watchdog: float | None
) -> None:
    """And no process that the daemon starts takes that for its own."""
    environment = {"NOTIFY_SOCKET": "/run/notify", "HOME": "/", **given}
    assert ServiceManager.of(environment).watchdog == watchdog
    assert environment == {"HOME": "/"}


async def test_no_beat_comes_from_an_engine_that_stands_still(heard: socket.socket) -> None:
    """They stop with it, and go on with it."""
    heard.setblocking(False)
    asked, stalled, often = 0, True, asyncio.Event()

    def is_stalled() -> bool:
        nonlocal asked
        asked += 1
        if asked == 5:
            often.set()
        return stalled

    beats = asyncio.create_task(ServiceManager(address(heard), 0.003).beat(is_stalled))
    await asyncio.wait_for(often.wait(), 60)
    with pytest.raises(BlockingIOError):
        heard.recv(99)
    stalled = False
    loop = asyncio.get_running_loop()
    for _ in range(3):
        assert await asyncio.wait_for(loop.sock_recv(heard, 99), 60) == b"WATCHDOG=1"
    beats.cancel()


async def test_without_a_watchdog_there_are_no_beats() -> None:
    """It ends at once."""
    await ServiceManager(None).beat(lambda: pytest.fail("no manager asks"))


# -- a stalled engine --------------------------------------------------------------------


def entry(*, running: int = 0, step_age: float = 0.0, busy_for: float = 0.0) -> Entry:
    """A service over an engine in this state."""
    made = Entry(Settings(), lambda: busy_for)
    made.models = serving(cast("Any", Engine(running, step_age)))
    return made


class Engine:
    """A service whose engine hangs, as no real one can be made to."""

    def __init__(self, running: int, step_age: float) -> None:
        self.engine = self
        self._running, self._age = running, step_age

    def statistics(self) -> Any:
        """Its figures."""
        return SimpleNamespace(
            running=[None] * self._running, last_step_at=time.monotonic() - self._age
        )


def loading(engine: Entry) -> Entry:
    """The same while another model is loaded beside it."""
    assert engine.models is not None
    slot = ModelSlot("other", ModelSettings())
    slot.begin("warming up")
    engine.models.slots.append(slot)
    return engine


LATE = STALLED_AFTER + 10


@pytest.mark.parametrize(
    ("engine", "status"),
    [
        (entry(running=1), 200),
        (entry(step_age=LATE), 200),  # idle
        (entry(running=1, step_age=LATE), 503),
        (entry(busy_for=STALLED_AFTER - 10), 200),
        (entry(busy_for=LATE), 503),  # in a call of which no request runs
        (loading(entry(running=1, step_age=LATE, busy_for=LATE)), 200),
        (loading(entry(busy_for=LATE + LOADING_TAKES)), 503),
    ],
)
async def test_health_fails_where_the_engine_does_not_get_on(engine: Entry, status: int) -> None:
    async with TestClient(TestServer(application(engine))) as client:
        response = await client.get("/health")
        told = await response.json()
    assert response.status == status
    assert told == {"status": "ok" if status == 200 else "stalled"}
    assert engine.stalled() == (status == 503)


# -- a daemon ----------------------------------------------------------------------------


def test_a_daemon_says_what_it_does(
    heard: socket.socket, short_path: Path, long_tiny_dir: Path
) -> None:
    """From its start to its end, with a beat as long as it serves."""
    env = {"NOTIFY_SOCKET": address(heard), "WATCHDOG_USEC": "300000"}
    daemon = spawn(short_path, long_tiny_dir, env=env, fresh=True)
    try:
        started = until(heard, "READY=1")
        assert "STATUS=loading" in started
        assert started.index("STATUS=loading") < started.index("STATUS=measuring")
        assert f"STATUS=serving {long_tiny_dir.name} on {daemon.socket}" in started
        assert daemon.request("GET", "/ready").json() == {"status": "ready"}
        assert "phase" not in daemon.status() or daemon.status()["phase"] is None
        until(heard, "WATCHDOG=1")
    finally:
        assert daemon.terminate() == 0
    assert "STATUS=stopping" in until(heard, "STOPPING=1")


HANDED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a program as a service manager does, with a socket as its descriptor 3."""


@contextmanager
def activated(folder: Path, model: Path, listening: socket.socket) -> Iterator[RunningDaemon]:
    """Run a daemon that is handed a socket, as descriptor 3."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UMBEL_")}
    environment |= {
        "XDG_CONFIG_HOME": str(folder / "config"),
        "UMBEL_DISK_DIR": str(folder / "disk"),
        "LISTEN_FDS": "1",
        "LISTEN_FDNAMES": "umbel.socket",
    }
    number = listening.fileno()
    words = [sys.executable, "-m", "umbel", "serve", "--model", str(model)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HANDED, str(number), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=(number,),
        )
    path = Path(listening.getsockname())
    daemon = RunningDaemon(process, path, folder / "log", folder, environment)
    try:
        yield daemon
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def ask(connection: UnixConnection) -> int:
    """Ask whether the daemon is there, on an open connection; the answer may take a start."""
    connection.request("GET", "/health")
    return connection.getresponse().status


def test_clients_wait_through_a_restart(short_path: Path, long_tiny_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(short_path / "s"))
        listening.listen()
        early = UnixConnection(short_path / "s")
        early.connect()
        with activated(short_path, long_tiny_dir, listening) as daemon:
            assert ask(early) == 200
            early.close()
            eventually(lambda: daemon.request("GET", "/ready").status == 200, 120)
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert daemon.post(body).status == 200
            assert f"socket={short_path / 's'}" in daemon.log()
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(60) == 0
        assert (short_path / "s").is_socket()
        between = UnixConnection(short_path / "s")
        between.connect()
        with activated(short_path, long_tiny_dir, listening):
            assert ask(between) == 200
            between.close()


def test_what_is_handed_over_must_listen(short_path: Path) -> None:
    """Else the daemon ends, and says what it needs."""
    made = [
        socket.socket(family, socket.SOCK_STREAM) for family in (socket.AF_INET, socket.AF_UNIX)
    ]
    made[0].bind(("127.0.0.1", 0))
    made[0].listen()
    made[1].bind(str(short_path / "deaf"))
    for each in made:
        with pytest.raises(SocketError, match=r"umbel\.socket"):
            InheritedListener(os.dup(each.fileno()))
        each.close()
    receiver, sender = os.pipe()
    with pytest.raises(SocketError, match="descriptor"):
        InheritedListener(receiver)
    os.close(receiver)
    os.close(sender)


@pytest.mark.parametrize("given", [{}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}])
def test_what_is_meant_for_others_is_left(given: dict[str, str]) -> None:
    """And not passed on."""
    environment = {**given, "HOME": "/"}
    assert inherited(environment) is None
    assert environment == {"HOME": "/"}


def test_several_sockets_are_refused() -> None:
    """The daemon serves one; it does not choose."""
    with pytest.raises(SocketError, match="2"):
        inherited({"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())})
