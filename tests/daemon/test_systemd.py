"""The unit files: systemd understands them, they are tight, and a daemon lives under them."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from ..tiny import tiny_model_dir
from .fixtures import TINY_CONTEXT
from .machine import Machine, booted
from .running import Reply, UnixConnection, eventually

CHAT = "/v1/chat/completions"
UNITS = Path(__file__).parents[2] / "systemd"
MOST_EXPOSED = 20
"""Tenths of a point, of 100."""
SETTINGS = 'model = "/opt/umbel/model"\n'
SHORT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 3}
DYNAMIC = (61184, 65519)
"""The users that systemd makes for as long as a service runs."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Copies of the units, without their drop-ins, that start a program which is there."""
    for name in ("umbel.service", "umbel.socket"):
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(text.replace("=/usr/local/bin/umbel serve", "=/bin/true"))
    return tmp_path


def with_nvidia(units: Path) -> None:
    """Add the drop-in for GPUs."""
    shutil.copytree(UNITS / "umbel.service.d", units / "umbel.service.d")


def analyze(units: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Ask systemd about units of this folder and no others of the same names."""
    return subprocess.run(
        ["systemd-analyze", *words, "--no-pager"],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},
        cwd=units,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def verify(units: Path) -> "subprocess.CompletedProcess[str]":
    """Check all names and values; unknown ones are said, and the status is 0."""
    return analyze(units, "verify", "--man=no", "./umbel.service", "./umbel.socket")


@needs_systemd
@pytest.mark.parametrize("nvidia", [False, True])
def test_systemd_understands_the_units(units: Path, *, nvidia: bool) -> None:
    """Every name and value."""
    if nvidia:
        with_nvidia(units)
    checked = verify(units)
    assert (checked.stderr, checked.returncode) == ("", 0)


@needs_systemd
@pytest.mark.parametrize(
    ("unit", "line", "wrong"),
    [
        ("umbel.service", "WatchdogSec=60s", "WachdogSec=60s"),
        ("umbel.service", "ProtectHome=yes", "ProtectHome=perhaps"),
        ("umbel.service", "/bin/true", "/nowhere/umbel"),
        ("umbel.socket", "SocketMode=0660", "SocketMode=rw"),
    ],
)
def test_a_planted_mistake_is_found(units: Path, unit: str, line: str, wrong: str) -> None:
    """So that silence means something."""
    text = (units / unit).read_text()
    assert line in text
    (units / unit).write_text(text.replace(line, wrong))
    assert verify(units).stderr


@needs_systemd
@pytest.mark.parametrize("nvidia", [False, True])
def test_the_service_is_tight(units: Path, *, nvidia: bool) -> None:
    """At most 2.0 points of 10 by systemd's own count, also where a GPU is used."""
    if nvidia:
        with_nvidia(units)
    bound = ("--offline=true", f"--threshold={MOST_EXPOSED}")
    found = analyze(units, "security", *bound, "./umbel.service")
    assert found.returncode == 0, found.stdout


def test_the_time_to_stop_is_what_the_daemon_takes() -> None:
    """As docs/operate/running.md says: the grace, and 90 seconds."""
    from umbel.daemon.config import Settings  # noqa: PLC0415

    assert (
        f"TimeoutStopSec={Settings().stop_grace + 90:g}s" in (UNITS / "umbel.service").read_text()
    )


# -- a machine ---------------------------------------------------------------------------


class Daemon:
    """The daemon of a machine, as its clients know it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.socket = machine.path("run/umbel/umbel.sock")

    def ask(self, method: str, route: str, body: bytes | None = None) -> Reply:
        """Ask on a connection of its own; the answer may take a start."""
        connection = UnixConnection(self.socket)
        try:
            connection.request(method, route, body)
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def wait_ready(self) -> None:
        """Wait until systemd has heard so."""
        eventually(lambda: self.machine.show("ActiveState") == "active", 120)
        assert self.ask("GET", "/ready").status == 200


def starts_with_its_first_client(daemon: Daemon) -> None:
    """The client waits for the daemon, and systemd for its word."""
    machine = daemon.machine
    assert machine.show("ActiveState") == "inactive"
    assert daemon.ask("GET", "/health").status == 200
    daemon.wait_ready()
    assert machine.show("StatusText") == "serving model on /run/umbel/umbel.sock"
    # Its user is none of this machine's, and what it measured of the model lies where it should.
    owner = machine.path("var/cache/private/umbel/measured").stat().st_uid
    assert DYNAMIC[0] <= owner <= DYNAMIC[1]
    assert daemon.ask("POST", CHAT, msgspec.json.encode(SHORT)).status == 200
    # MLX has compiled something, where there is a compiler, and the answer was computed with it.
    kernels = machine.path("var/cache/private/umbel/kernels")
    compiled = list(kernels.glob("*/mlx/*/cpu/*.so"))
    assert bool(compiled) == (shutil.which("g++") is not None)


def reloads(daemon: Daemon) -> None:
    """`systemctl reload` puts what can be in force, in the same process."""
    machine = daemon.machine
    before = machine.show("MainPID")
    file = machine.path("etc/umbel/umbel.toml")
    file.write_text(f"{SETTINGS}stop_grace = 25\nmax_batch = 4\n")
    machine.run("systemctl", "reload", "umbel")
    eventually(lambda: 'event="settings reloaded"' in machine.log())
    assert "setting=stop_grace before=30.0 after=25.0" in machine.log()
    assert 'event="setting needs a restart" setting=max_batch before=32 after=4' in machine.log()
    eventually(lambda: machine.show("ActiveState") == "active")
    assert machine.show("MainPID") == before


def is_started_anew_when_it_stands_still(daemon: Daemon) -> None:
    """The watchdog kills it. Who connects before the next one is there is answered by that."""
    machine = daemon.machine
    assert machine.show("NRestarts") == "0"
    machine.run("kill", "-STOP", machine.show("MainPID"))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(daemon.ask, "GET", "/health")
        eventually(lambda: machine.show("NRestarts") == "1", 60)
        assert waiting.result(120).status == 200
    daemon.wait_ready()
    assert daemon.ask("POST", CHAT, msgspec.json.encode(SHORT)).status == 200


def lets_requests_finish_when_it_is_stopped(daemon: Daemon) -> None:
    """A stream that runs goes on to its end; the socket goes on listening."""
    machine = daemon.machine
    connection = UnixConnection(daemon.socket)
    connection.request(
        "POST", CHAT, msgspec.json.encode(SHORT | {"max_tokens": 600, "stream": True})
    )
    response = connection.getresponse()
    response.readline()
    with ThreadPoolExecutor() as pool:
        stopping = pool.submit(machine.run, "systemctl", "stop", "umbel")
        rest = response.read()
        stopping.result(120)
    connection.close()
    assert b'"finish_reason":"length"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert machine.show("ActiveState") == "inactive"
    assert machine.show("Result") == "success"
    assert machine.show("ActiveState", "umbel.socket") == "active"
    assert daemon.socket.is_socket()


def stays_down_when_it_fails_again_and_again(daemon: Daemon) -> None:
    """A client whose connection starts it is refused in the end."""
    machine = daemon.machine
    machine.path("etc/umbel/umbel.toml").write_text("modle = 1\n")
    with pytest.raises(OSError, match=r"reset|refused|No such file"):
        daemon.ask("GET", "/health")
    eventually(lambda: machine.show("ActiveState", "umbel.socket") == "failed", 60)
    assert machine.show("Result", "umbel.socket") == "service-start-limit-hit"
    with pytest.raises(OSError, match=r"refused|No such file"):
        daemon.ask("GET", "/health")
    assert "unknown key 'modle'; did you mean model?" in machine.log()


@pytest.mark.slow
def test_a_machine_boots(tmp_path: Path) -> None:
    """A daemon's life under a real systemd, with the unit as it is: see the steps.

    MLX compiles gemma's activation; a llama's is not computed by it on a CPU.
    """
    model = tiny_model_dir(
        tmp_path / "gemma",
        model_type="gemma",
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=TINY_CONTEXT,
    )
    with booted(tmp_path, model, SETTINGS) as machine:
        daemon = Daemon(machine)
        starts_with_its_first_client(daemon)
        reloads(daemon)
        is_started_anew_when_it_stands_still(daemon)
        lets_requests_finish_when_it_is_stopped(daemon)
        stays_down_when_it_fails_again_and_again(daemon)
        assert "Traceback" not in machine.log(), machine.log()
    assert not Path(f"/proc/{machine.init}").exists()
