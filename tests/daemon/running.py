"""A real daemon in a process of its own, and a plain HTTP client for its socket."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .fork_server import fork_server

UMBEL = ("-m", "umbel")
START = 120.0
STOP = 60.0
ANSWER = 240.0
"""Seconds without a byte: a prompt of 2,000 tokens takes a busy machine more than one minute."""


class UnixConnection(HTTPConnection):
    """The standard library's HTTP client, over a Unix socket."""

    def __init__(self, path: Path, timeout: float = ANSWER) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect to the path; where the backlog is full, a connect with a timeout would fail."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.connect(str(self._path))
        except BaseException:
            self.sock.close()
            raise
        self.sock.settimeout(self.timeout)


@dataclass
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Decode the body."""
        return msgspec.json.decode(self.body)


class Process(Protocol):
    """A daemon's process for tests, fresh or forked."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Look whether it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit status."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal."""

    def kill(self) -> None:
        """End it at once."""


@dataclass
class RunningDaemon:
    """A daemon that answers."""

    process: Process
    socket: Path
    log_path: Path
    folder: Path
    environment: dict[str, str] = field(repr=False)

    def connection(self, timeout: float = ANSWER) -> UnixConnection:
        """Open a connection of one's own."""
        return UnixConnection(self.socket, timeout)

    def request(
        self,
        method: str,
        route: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request on a fresh connection and read the whole answer."""
        connection = self.connection()
        try:
            raw = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
            connection.request(method, route, raw, dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def post(self, body: Any, route: str = "/v1/chat/completions") -> Reply:
        """Post a body."""
        return self.request("POST", route, body)

    def stream(
        self, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[UnixConnection, HTTPResponse]:
        """Begin a streamed chat completion; the caller closes the connection."""
        connection = self.send({**body, "stream": True}, headers)
        return connection, connection.getresponse()

    def send(
        self, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> UnixConnection:
        """Ask for a chat completion and read nothing; the caller closes the connection."""
        connection = self.connection()
        raw = msgspec.json.encode(body)
        connection.request("POST", "/v1/chat/completions", raw, dict(headers or {}))
        return connection

    def status(self) -> Any:
        """Read `/status`."""
        return self.request("GET", "/status").json()

    def log(self) -> str:
        """Everything the daemon has logged."""
        return self.log_path.read_text()

    def tcp_port(self) -> int:
        """The TCP port it has chosen."""
        found = re.search(r"port=(\d+)", self.log())
        assert found, self.log()
        return int(found[1])

    def terminate(self) -> int:
        """Send SIGTERM and wait for the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP)


def eventually(condition: Any, timeout: float = 30.0, pause: float = 0.01) -> Any:
    """Wait until `condition()` is true and return it; fail when it never is.

    Args:
        condition: what is looked at.
        timeout: seconds after which it fails.
        pause: seconds between two looks. Each is work for the daemon, too, if it is asked.
    """
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "it never came about"
        time.sleep(pause)
    return value


def spawn(
    folder: Path,
    model: str | Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = UMBEL,
    fresh: bool = False,
    terminal: int | None = None,
) -> RunningDaemon:
    """Start a daemon without waiting for it to be ready.

    Args:
        folder: where its socket, its log and its state are.
        model: what it serves.
        flags: more of its command line.
        env: what its environment has besides this one's.
        program: what Python runs.
        fresh: in a process of its own from the first import; else one is forked where that is
            the same to the daemon.
        terminal: its standard input, in a session of its own; else it has none.
    """
    path, log = folder / "run" / "u.sock", folder / "log"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UMBEL_")}
    environment |= {
        "XDG_CONFIG_HOME": str(folder / "config"),
        "UMBEL_DISK_DIR": str(folder / "disk"),  # each its own
        **(env or {}),
    }
    words = ["serve", "--model", str(model), "--socket", str(path), *flags]
    server = None if fresh or program != UMBEL else fork_server()
    process: Process
    with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        if server is not None and server.can_fork(environment):
            process = server.fork(words, environment, (nothing, output, output))
        else:
            process = subprocess.Popen(
                [sys.executable, *program, *words],
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                start_new_session=terminal is not None,
                stdout=output,
                stderr=output,
                env=environment,
            )
    return RunningDaemon(process, path, log, folder, environment)


def is_ready(daemon: RunningDaemon) -> bool:
    """True if the daemon serves; fails when it has ended."""
    assert daemon.process.poll() is None, daemon.log()
    with suppress(OSError):
        return daemon.request("GET", "/ready").status == 200
    return False


@contextmanager
def running(
    folder: Path,
    model: str | Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = UMBEL,
    fresh: bool = False,
) -> Iterator[RunningDaemon]:
    """Run a daemon until the block ends; it must then exit with status 0. See `spawn`."""
    daemon = spawn(folder, model, *flags, env=env, program=program, fresh=fresh)
    try:
        eventually(lambda: is_ready(daemon), START, pause=0.05)
        yield daemon
        if daemon.process.poll() is None:
            assert daemon.terminate() == 0, daemon.log()
    finally:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait(STOP)
    assert "Traceback" not in daemon.log(), daemon.log()
