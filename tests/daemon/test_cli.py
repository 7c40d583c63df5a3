"""The `umbel` command as a user runs it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from umbel import __version__
from umbel.daemon.cli.doctor import warnings_of

from ..tiny import tiny_one_by_one_dir
from .command import TIMEOUT, environment, umbel
from .running import RunningDaemon, eventually, running


def test_chat_interrupted(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "umbel", "chat", "hello", "--socket", str(tiny_daemon.socket)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(short_path),
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode != 0
    assert b"Traceback" not in errors
    eventually(lambda: not tiny_daemon.status()["engine"]["running"], TIMEOUT)


@contextmanager
def conversation(
    daemon: RunningDaemon, folder: Path
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start a chat that waits at its prompt; give it, and what its terminal is written to."""
    terminal, inside = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "umbel", "chat", "--socket", str(daemon.socket)],
        stdin=inside,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(folder),
    )
    os.close(inside)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"> "
    yield process, terminal
    os.close(terminal)


def test_chat_interrupted_at_the_prompt(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """Ctrl-C while it waits for a line ends the conversation without one."""
    with conversation(tiny_daemon, short_path) as (process, _):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 128 + signal.SIGINT
        assert b"Traceback" not in errors


def test_chat_interrupted_in_an_answer(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """Ctrl-C ends the answer only; the conversation goes on, to its end on a terminal."""
    with conversation(tiny_daemon, short_path) as (process, terminal):
        os.write(terminal, b"hello\n")
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        os.write(terminal, b"/exit\n")
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert b"stopped" in errors


@pytest.mark.slow
def test_demo(short_path: Path) -> None:
    """Three rounds end with status 0: no prompt shared, all of one shared, and a second turn."""
    done = umbel("demo", "--agents", "3", "--max-tokens", "8", folder=short_path)
    assert done.returncode == 0, done.stderr
    for word in ("TTFT", "cached", "tok/s", "agent 1", "agent 3", "Paris"):
        assert word in done.stdout
    found = re.findall(r"3 of 3 agents answered in .*? (\d+)% of them from", _flat(done.stdout))
    apart, first, second = map(int, found)
    assert apart < 10
    assert 50 < first < second
    assert second > 90
    assert "2 of 3 agents took it from the cache" in _flat(done.stdout)
    assert "times as long" in _flat(done.stdout)


def _flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_demo_leaves_nothing_behind(short_path: Path, long_tiny_dir: Path) -> None:
    """The private daemon and its folder are gone afterwards."""
    words = ("demo", "--agents", "1", "--max-tokens", "2", "--model", str(long_tiny_dir))
    done = subprocess.run(
        [sys.executable, "-m", "umbel", *words],
        capture_output=True,
        env=environment(short_path) | {"TMPDIR": str(short_path)},
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0
    assert not list(short_path.glob("umbel-*"))


def test_doctor(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """Every part has a line; a running daemon is seen."""
    done = umbel("doctor", "--socket", str(tiny_daemon.socket), folder=short_path)
    assert done.returncode == 0, done.stdout
    subjects = [line.split()[1] for line in done.stdout.splitlines() if "→" not in line]
    assert [each for each in subjects if each not in ("disk", "service")] == [
        *("umbel", "python", "mlx", "blas", "memory", "model", "socket")
    ]
    assert "a daemon serves tiny (ready)" in done.stdout


def test_a_model_that_decodes_one_by_one_says_so(short_path: Path) -> None:
    """`/status`, the log of the start and `umbel doctor` say that, and why."""
    with running(short_path, tiny_one_by_one_dir(short_path / "odd")) as daemon:
        model = daemon.status()["model"]
        done = umbel("doctor", "--socket", str(daemon.socket), folder=short_path)
        log = daemon.log()
    assert not model["batches"]
    assert "with other neighbours" in model["one_by_one"]
    (warning,) = [line for line in log.splitlines() if "decoding one by one" in line]
    assert model["one_by_one"] in warning
    assert "batches=false" in log
    lines = [line for line in done.stdout.splitlines() if "→" not in line]
    assert ["warning", "batches"] in [line.split()[:2] for line in lines]
    said = " ".join(done.stdout.split())
    assert f"odd decodes one by one: {model['one_by_one']}" in said
    assert done.returncode == 0


def test_doctor_says_what_to_do(short_path: Path) -> None:
    """A problem is named, comes with advice, and makes the exit status 1."""
    done = umbel("doctor", "--socket", "/tmp/" + "x" * 120, folder=short_path)  # noqa: S108
    assert done.returncode == 1
    assert "problem  socket" in done.stdout
    assert "→ choose a shorter --socket" in done.stdout


def test_doctor_checks_what_serve_needs(short_path: Path) -> None:
    """Every model, the port, the keys and the log; `--json` has the same."""
    (short_path / "keys.json").write_text("{")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (short_path / "umbel.toml").write_text(
            f'model = "coder"\nport = {port}\nlog_file = "{short_path}/none/log"\n'
            '[models.coder]\nmodel = "org/coder"\n[models.gone]\nmodel = "/nowhere"\n'
        )
        words = ("doctor", "--config", str(short_path / "umbel.toml"))
        done, plain = umbel(*words, "--json", folder=short_path), umbel(*words, folder=short_path)
    assert done.returncode == plain.returncode == 1
    found = [(each["grade"], each["subject"], each["text"]) for each in json.loads(done.stdout)]
    problems = {subject: text for grade, subject, text in found if grade == "problem"}
    assert problems.keys() == {"model", "keys", "log", "tcp"}
    assert problems["model"].startswith("/nowhere is not 'smollm2'")
    assert problems["tcp"] == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert not [text for _, _, text in found if text.startswith("coder")]  # a table's name
    assert ("ok", "model", "org/coder (a repo; missing files are downloaded)") in found
    assert all(text in " ".join(plain.stdout.split()) for text in problems.values())


def test_doctor_tells_what_a_daemon_warns_of() -> None:
    """A disk that takes nothing, memory pressure, models that failed or decode one by one."""
    disk = {"state": "suspended", "reason": "No space left on device"}
    slots = [
        {"name": "a", "failure": None, "disk": disk},
        {"name": "b", "failure": "no such repo", "disk": None},
    ]
    status: dict[str, Any] = {
        "state": "stalled",
        "model": {"name": "a", "one_by_one": "it drifts"},
        "pressure": {"level": "warning"},
        "models": slots,
    }
    said = {finding.subject: finding.text for finding in warnings_of(status)}
    assert said == {
        "batches": "a decodes one by one: it drifts",
        "engine": "a step does not end",
        "pressure": "the system is short of memory: warning",
        "disk": "the disk cache of a is suspended: No space left on device",
        "model": "b cannot be loaded: no such repo",
    }
    quiet: dict[str, Any] = {"state": "ready", "model": None, "pressure": None, "models": []}
    assert list(warnings_of(quiet)) == []


def test_models(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """The embedded model is listed, and the one that is served is named."""
    done = umbel("models", "--socket", str(tiny_daemon.socket), folder=short_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].startswith("smollm2")
    assert "serves tiny" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--port", "99999"), "--port is '99999'; it must be a whole number, 0 to 65535"),
        (
            ("serve", "--cache-bytes", "8 gigs"),
            "--cache-bytes is '8 gigs'; it must be a size: 8GiB",
        ),
        (("serve", "--log-format", "xml"), "--log-format is 'xml'; it must be json or text"),
        (("serve", "--host", "0.0.0.0", "--port", "0"), "can be reached from outside"),  # noqa: S104
        (("serve", "--host", "::1"), "--host: it needs a port too"),
        (("serve", "--cors-origin", "*"), "would let every web page use this daemon"),
        (("serve", "--alias", "default"), "alias 'default' is a name of the served model already"),
        (("models", "--memory", "lots"), "--memory is 'lots'; it must be a size"),
        (("models", "list", "--device", "mac"), "--device needs --memory"),
        (("models", "pull", "nonsense"), "'nonsense' is no Hugging Face repo"),
        (("cache", "pin"), "name a file with a system prompt, or a --conversation"),
        (("serve", "--no-such-flag"), "No such option: --no-such-flag"),
        (("chat", "--temperature", "9", "hi"), "Invalid value for '--temperature'"),
        (("chat", "--lines", "hi"), "a prompt is one question, and --lines reads many"),
        (("run",), "umbel serve runs the daemon, and umbel chat talks to it"),
        (("status",), "umbel ps lists requests"),
        (("chatt",), "Did you mean 'chat'?"),
        (("cache", "run"), "No such command 'run'."),
    ],
)
def test_a_wrong_command_line(words: tuple[str, ...], said: str, short_path: Path) -> None:
    """It is one line of umbel's, with advice, and exit status 2."""
    done = umbel(*words, folder=short_path, stdin="")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("umbel: ")
    assert said in line
    assert line.endswith(" --help)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no configuration file umbel.toml"),
        ('host = "127.0.0.1"', "umbel.toml: host: it needs a port too"),
        ('cors_origins = ["*"]', "would let every web page use this daemon"),
    ],
)
def test_bad_settings(text: str | None, said: str, short_path: Path) -> None:
    """The same values in a file, or a file that is not there, end with status 1."""
    if text is not None:
        (short_path / "umbel.toml").write_text(text)
    done = umbel("serve", "--config", str(short_path / "umbel.toml"), folder=short_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("umbel: ")
    assert said in line.replace(f"{short_path}/", "")


def test_cache_stats_as_json(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    words = ("cache", "stats", "--json", "--socket", str(tiny_daemon.socket))
    told = json.loads(umbel(*words, folder=short_path).stdout)
    assert {"tokens", "span_bytes", "leases", "pins", "disk"} <= told.keys()
    assert told["ledger"]["budget"] > 0
    named = json.loads(umbel(*words, "--model", "tiny", folder=short_path).stdout)
    assert told.keys() - named.keys() == {"ledger", "disk"}


@pytest.mark.parametrize("words", ["chat hi", "ps", "keys add joe", "--version"])
@pytest.mark.parametrize(
    ("output", "said"),
    [(">&-", "is closed"), ("> /dev/full", "cannot be written: No space left on device")],
)
def test_an_output_that_cannot_be_written(
    words: str, output: str, said: str, tiny_daemon: RunningDaemon, short_path: Path
) -> None:
    """A sentence, and status 1; where it is closed nothing is done whose answer would be lost."""
    variables = {"UMBEL_SOCKET": str(tiny_daemon.socket)}
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m umbel {words} {output} < /dev/null"],
        capture_output=True,
        text=True,
        env=environment(short_path) | variables,
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 1
    *before, line = done.stderr.splitlines()
    assert line == f"umbel: standard output {said}"
    assert "Traceback" not in "".join(before)
    assert output != ">&-" or not list(short_path.rglob("keys.json"))


@pytest.mark.parametrize("words", ["cache list", "keys ls", "models ls"])
def test_ls_and_list_are_one(words: str, short_path: Path) -> None:
    """Each is known wherever the other is."""
    group, name = words.split()
    twin = {"ls": "list", "list": "ls"}[name]
    done, as_named = (umbel(group, each, folder=short_path) for each in (name, twin))
    assert done.returncode == as_named.returncode
    assert (done.stdout, done.stderr) == (as_named.stdout, as_named.stderr)


def test_version_and_help(short_path: Path) -> None:
    """The version is the package's; help names every command."""
    version = umbel("--version", folder=short_path).stdout.strip()
    assert version == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\+g[0-9a-f]{7,}(\.dirty)?)?", version)
    text = umbel("--help", folder=short_path).stdout
    for command in ("serve", "chat", "demo", "doctor", "models"):
        assert command in text
