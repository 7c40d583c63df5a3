"""`umbel top`: what a daemon does, live on a terminal and once in a pipe."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from umbel.daemon.terminal.requests import COLUMNS, LISTED, MODEL, Rates
from umbel.daemon.terminal.top import picture

from .command import umbel
from .loading_daemon import LOADING
from .running import RunningDaemon
from .terminal import CTRL_C, in_terminal, terminal

RUNS = {
    "request": "r",
    "conversation": "ferns",
    "tenant": "uid:1",
    "priority": "interactive",
    "status": "decode",
    "activity": "decode",
    "seconds": {"slot": 2.0, "decode": 4.0},
    "needed_bytes": None,
    "usable_bytes": None,
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens"), 9),
}
"""A request at work, as an engine tells of it."""


@contextmanager
def answering(daemon: RunningDaemon, conversation: str) -> Iterator[None]:
    """Keep a daemon at work on one answer after the other for as long as a block lasts."""
    enough = threading.Event()
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "max_tokens": 2000, "temperature": 0}

    def ask() -> None:
        while not enough.is_set():
            headers = {"X-Umbel-Conversation": conversation}
            assert daemon.request("POST", "/v1/chat/completions", body, headers).status == 200

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize("end", ["q", pytest.param(CTRL_C, marks=pytest.mark.slow)])
def test_live(tiny_daemon: RunningDaemon, short_path: Path, end: str) -> None:
    """It shows requests as they come and go, and leaves the terminal as it was."""
    command = ("top", "--socket", str(tiny_daemon.socket))
    with terminal(*command, env=in_terminal(short_path), folder=short_path) as shown:
        shown.wait_for("0 running, 0 in the queue")
        with answering(tiny_daemon, "planets"):
            shown.wait_for("1 running")
            shown.wait_for("planets")
            shown.wait_for("decode")
            shown.type("x")  # is not echoed, and ends nothing
        shown.wait_for("0 running")
        assert "tiny" in shown.text()
        shown.type(end)
        assert shown.wait() == 0
        assert shown.output.count(b"\x1b[?1049h") == shown.output.count(b"\x1b[?1049l") == 1


def test_once(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """In a pipe it prints once, without escape codes: a row for each request."""
    with answering(tiny_daemon, "planets"):
        words = ("top", "--once", "--socket", str(tiny_daemon.socket))
        done = umbel(*words, folder=short_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "1 running, 0 in the queue" in done.stdout
    head, row = done.stdout.splitlines()[-2:]
    assert head.split()[0] == "conversation"
    assert row.split()[0] == "planets"


def test_without_a_daemon(short_path: Path) -> None:
    done = umbel("top", "--socket", str(short_path / "none"), folder=short_path)
    assert done.returncode == 1
    assert "no daemon answers on" in done.stderr


def drawn(status: dict[str, Any]) -> str:
    """Draw an answer of `/status` as text."""
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(picture(status, Rates()))
    return capture.get()


def test_a_daemon_that_loads() -> None:
    """Its phase and how far that is stand there."""
    status = {"version": "1", "state": "loading", "backend": "cpu", "model": None, "engine": None}
    text = drawn({**status, "phase": LOADING["phase"], "download": LOADING["download"]})
    assert "downloading the model" in text


def at_rest(daemon: RunningDaemon) -> Any:
    """An idle `/status`; a request of the test before may still be there."""
    status = daemon.status()
    for slot in status["models"]:
        slot |= {"requests": [], "queued": 0, "using": 0}
        slot["engine"] |= {"running": []}
    return {**status, "ledger": dict.fromkeys(status["ledger"], 0)}


@pytest.mark.parametrize(("width", "colours", "bar"), [(40, 1, 0), (80, 1, 1), (80, 0, 0)])
def test_labels_stay(tiny_daemon: RunningDaemon, *, width: int, colours: int, bar: int) -> None:
    """Each figure has its name on a narrow screen; a bar needs room, and colours."""
    system: Any = "standard" if colours else None
    console = Console(width=width, force_terminal=True, color_system=system, highlight=False)
    with console.capture() as captured:
        console.print(picture(at_rest(tiny_daemon), Rates()))
    lines = re.sub(r"\x1b\[[\d;]*m", "", captured.get()).splitlines()
    assert {"state", "memory"} <= {line.split()[0] for line in lines if line.strip()}
    assert any("━" in line for line in lines) == bool(bar)
    assert all(len(line) <= width for line in lines)


def test_requests_as_json(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """`umbel ps --json` has what `/status` says of each."""
    with answering(tiny_daemon, "planets"):
        words = ("ps", "--json", "--socket", str(tiny_daemon.socket))
        done = umbel(*words, folder=short_path)
    rows = json.loads(done.stdout)
    assert {(row["conversation"], row["model"]) for row in rows} <= {("planets", "tiny")}


def test_several_models(tiny_daemon: RunningDaemon) -> None:
    """Where more than one is configured, each has a row; one alone is in the head."""
    status = at_rest(tiny_daemon)
    only = status["models"][0]
    assert "weights" not in drawn(status)
    busy = {**only, "using": 3, "queued": 2, "engine": {**only["engine"], "running": [RUNS]}}
    asleep = {**only, "name": "two", "state": "unloaded", "engine": None, "disk": None}
    broken = {**asleep, "name": "three", "failure": "no such [file]", "waiting": 2}
    text = drawn({**status, "models": [busy, asleep, broken]})
    rows = {line.split()[0]: line for line in reversed(text.splitlines()) if line}
    assert re.fullmatch(r"tiny +loaded( +[\d.]+ [KM]?i?B){2} +1 +2 +0 +-", rows["tiny"].strip())
    assert re.fullmatch(r"two +unloaded +- +- +- +0 +0 +-", rows["two"].strip())
    assert "failed: no such [file]" in rows["three"]


def test_requests_of_all_models_have_rows(tiny_daemon: RunningDaemon) -> None:
    """Also while the default model is not loaded; what takes memory is that of all."""
    status = at_rest(tiny_daemon)
    loaded = status["models"][0]
    ledger = {**status["ledger"], "budget": 64 << 20, "kv": 5 << 20}
    engine = {**loaded["engine"], "running": [RUNS]}
    other = {**loaded, "name": "two", "queued": 4, "engine": engine, "requests": [RUNS]}
    newer = {**engine, "last_step_at": engine["last_step_at"] + 1, "running": []}
    third = {**loaded, "name": "three", "engine": newer}
    asleep = {**loaded, "state": "unloaded", "engine": None, "disk": None}
    text = drawn(
        {
            **status,
            "model": None,
            "engine": None,
            "ledger": ledger,
            "models": [asleep, other, third],
        }
    )
    assert "1 running, 4 in the queue" in text
    assert "5.0 MiB of 64.0 MiB" in text
    assert re.search(r"^two +ferns +uid:1 +decode ", text, re.MULTILINE)
    text = drawn({**status, "model": None, "engine": None, "models": [asleep]})
    assert re.search(r"^tiny +unloaded", text, re.MULTILINE)
    assert "starting" not in text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"activity": "conversation"}, "behind its conversation"),
        ({"activity": "quota"}, "its tenant's tokens are spent"),
        ({"activity": "prefill", "computed_tokens": 3, "prompt_tokens": 7}, "prefill 3 of 7"),
        ({"activity": "memory"}, "no memory "),
        (
            {"activity": "memory", "needed_bytes": 3 << 20, "usable_bytes": 5 << 20},
            "no memory: needs 3.0 MiB of 5.0 MiB",
        ),
    ],
)
def test_why_a_request_waits(tiny_daemon: RunningDaemon, row: dict[str, Any], words: str) -> None:
    """A row says what it waits for, since when, and how long it has waited in all."""
    status = at_rest(tiny_daemon)
    seconds = {"slot": 130.0, row["activity"]: 250.0}
    waits = [{**RUNS, "seconds": seconds, **row}]
    (only,) = status["models"]
    text = drawn({**status, "models": [{**only, "requests": waits, "queued": 1}]})
    (line,) = [line for line in text.splitlines() if "ferns" in line]
    assert words in line
    waited = "2 min" if row["activity"] == "prefill" else "6 min"
    assert re.search(rf"{words} +4 min +{waited} ", line)


def test_a_screen_holds_the_first_requests_only(tiny_daemon: RunningDaemon) -> None:
    """It says how many more there are."""
    status = at_rest(tiny_daemon)
    (only,) = status["models"]
    text = drawn({**status, "models": [{**only, "requests": [RUNS] * 1000, "queued": 4000}]})
    assert text.count("ferns") == 100
    assert "and 3900 more" in text


def test_requests_on_their_way_have_rows(tiny_daemon: RunningDaemon) -> None:
    status = at_rest(tiny_daemon)
    arrival = {name: RUNS[name] for name in ("request", "conversation", "tenant", "priority")}
    arriving = [
        {**arrival, "model": "two", "activity": "model", "seconds": {"model": 70.0}},
        {**arrival, "model": None, "activity": "tokenize", "seconds": {"tokenize": 1.0}},
    ]
    text = drawn({**status, "arriving": arriving})
    assert "0 running, 0 in the queue, 2 on the way there" in text
    loading, reading = (line for line in text.splitlines() if "ferns" in line)
    assert re.search(r"its model is loading +1 min +1 min +- +- +- +-$", loading.rstrip())
    assert re.search(r"reading its prompt +1 s +1 s ", reading)
    text = drawn({**status, "arriving": arriving, "models": status["models"] * 2})
    assert re.search(r"^two +ferns .*its model is loading", text, re.MULTILINE)
    assert re.search(r"^- +ferns .*reading its prompt", text, re.MULTILINE)


def test_a_tenant_sees_its_own_requests(tiny_daemon: RunningDaemon) -> None:
    """It is told no figures of all tenants, and its rows are counted instead."""
    status = at_rest(tiny_daemon)
    hidden = dict.fromkeys(("using", "waiting", "queued", "idle_seconds", "engine", "disk"))
    waits = {**RUNS, "status": "waiting", "activity": "slot"}
    slot = {**status["models"][0], **hidden, "requests": [RUNS, waits]}
    status |= dict.fromkeys(("engine", "memory", "waiting", "disk", "pressure", "step_age"))
    text = drawn({**status, "models": [slot]})
    assert "1 running, 1 in the queue" in text
    assert text.count("ferns") == 2
    assert "tokens/s" in text
    text = drawn({**status, "models": [slot, {**slot, "name": "two", "requests": []}]})
    assert re.search(r"^two +loaded .* - +- +- +- +- *$", text, re.MULTILINE)


def test_rates() -> None:
    """A figure's rate is what it grew by in a second; a request's, its answer's tokens."""
    times = iter([10.0, 12.0])
    rates = Rates(clock=lambda: next(times))
    for tokens in (5, 25):
        row = {"request": "r", "output_tokens": tokens}
        engine, idle = {"generation_tokens": tokens}, {"generation_tokens": 7}
        slots: list[dict[str, Any]] = [
            {"engine": each, "requests": []} for each in (engine, idle, None)
        ]
        rates.take({"models": [*slots, {"engine": None, "requests": [row]}]})
        assert (rates.of("r") is None) == (tokens == 5)
    assert rates.of("generation_tokens") == rates.of("r") == 10.0
    assert rates.of("another") is None


def test_another_column_is_one_line() -> None:
    """Each column has a title of its own, and makes a text of any row."""
    columns, row = (MODEL, *COLUMNS, LISTED[0], LISTED[3]), {**RUNS, "model": "tiny"}
    assert len({column.title for column in columns}) == len(columns)
    assert all(isinstance(column.cell(row, Rates()), str) for column in columns)
