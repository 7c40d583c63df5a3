"""A daemon that is short of memory: what it says of itself, and what its clients hear."""

import os
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .crowd import PATIENCE, events_of, is_idle, outcomes, text_of
from .measured import samples
from .running import STOP, Reply, RunningDaemon, eventually, running
from .test_restart_warm import on_disk

AGENTS = 14
TOKENS = 460
TIGHT = 2 << 20
"""Bytes that hold one whole answer, or some that have begun: too few for all, or for their ends."""
WIDE = 20 << 20
"""Bytes of which an eighth is as tight."""

KINDS = ("kv", "checkpoint", "tail", "paging", "transient")
PAUSE = 0.01  # seconds between two looks at a daemon
LOOKS = 50  # after so many in a row, what is said must be so

# The interpreter runs it as it starts. There is a poll each 50 ms, and the clock that the budget
# follows goes on by a second with each.
HOST = """
import itertools
from pathlib import Path

from umbel.cachestore.shrink import Pressure
from umbel.daemon.models import pressure

def level():
    return Pressure.CRITICAL if Path({sign!r}).exists() else Pressure.NORMAL

pressure.find_source = lambda: level
pressure.PressureWatch.__init__.__kwdefaults__.update(
    clock=itertools.count().__next__, interval=0.05
)
"""


class Host:
    """A host that is short of memory when a test says so, and never otherwise."""

    def __init__(self, folder: Path) -> None:
        self._sign, site = folder / "short", folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(HOST.format(sign=str(self._sign)))
        paths = [str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        # Streams of those that wait begin soon, so that all agents have asked before one is done.
        self.env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "UMBEL_KEEPALIVE": "0.05"}

    def be_short(self) -> None:
        """Run out of memory."""
        self._sign.touch()

    def be_calm(self) -> None:
        """Report enough memory again."""
        self._sign.unlink()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host that has enough memory so far."""
    return Host(tmp_path)


def body_of(number: int) -> dict[str, Any]:
    """Request of agent `number`; its answer has `TOKENS` tokens."""
    text = f"agent {number} asks about the report {number * 7}"
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": TOKENS}


@pytest.fixture(scope="module")
def answers(long_tiny_dir: Path) -> list[str]:
    """Answers to the agents where memory abounds."""
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir, "--no-disk") as daemon,
        ThreadPoolExecutor(AGENTS) as pool,
    ):
        told = list(pool.map(lambda n: text_of(daemon.post(body_of(n))), range(AGENTS)))
        assert daemon.status()["engine"]["preemptions"] == 0
    assert len(set(told)) == AGENTS  # or mixed up answers went unseen
    return told


class Stream:
    """One agent's stream, read by a thread of its own.

    Attributes:
        id: of the request.
    """

    def __init__(self, daemon: RunningDaemon, number: int) -> None:
        self.number = number
        self._connection, self._response = daemon.stream(body_of(number))
        self._socket = self._connection.sock
        self._socket.settimeout(PATIENCE)
        self.id = self._response.headers["x-request-id"]
        self._body = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, HTTPException):  # a broken answer is an empty one
            self._body = self._response.read()

    @property
    def ended(self) -> bool:
        """True if there is nothing more to read."""
        return not self._thread.is_alive()

    def reply(self) -> Reply:
        """Wait for the whole answer."""
        self._thread.join(PATIENCE)
        assert self.ended, "it hangs"
        return Reply(self._response.status, dict(self._response.headers), self._body)

    def leave(self) -> None:
        """Hang up, in the middle of it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._response.close()
        self._connection.close()


@contextmanager
def agents(daemon: RunningDaemon, count: int = AGENTS) -> Iterator[list[Stream]]:
    """Send requests of agents, one after another, and hang up in the end."""
    streams: list[Stream] = []
    try:
        streams.extend(Stream(daemon, number) for number in range(count))
        yield streams
    finally:
        for stream in streams:
            stream.leave()


def tight(folder: Path, model: Path, host: Host, *flags: str) -> Any:
    """Run a daemon that can begin more answers than it can hold."""
    return running(folder, model, "--cache-bytes", str(TIGHT), *flags, env=host.env)


def preempted(picture: Any) -> list[str]:
    """The requests that are preempted."""
    return [s["request"] for s in picture["engine"]["running"] if s["status"] == "preempted"]


def with_preempted(daemon: RunningDaemon) -> Any:
    """The status, if a request is preempted in it."""
    picture = daemon.status()
    return picture if preempted(picture) and picture["engine"]["preemptions"] else None


def metrics(daemon: RunningDaemon) -> dict[tuple[str, ...], float]:
    """Read `/metrics`, by name and the values of the labels, in the order of their names."""
    return samples(daemon.request("GET", "/metrics").body.decode())


def ledger_of(measured: dict[tuple[str, ...], float]) -> dict[str, float]:
    """Memory in `/metrics`, named as `/status` names it."""
    held = {kind: measured["umbel_cache_bytes", kind, "memory"] for kind in KINDS}
    budget = measured["umbel_cache_budget_bytes", "memory"]
    return {"budget": budget, "buffers": measured["umbel_cache_buffers",], **held}


def held(memory: dict[str, float]) -> float:
    """The sum of all kinds."""
    return sum(memory[kind] for kind in KINDS)


def counted(measured: dict[tuple[str, ...], float]) -> float:
    """How many requests run or wait, as `/metrics` has it."""
    return measured["umbel_requests_running",] + measured["umbel_requests_waiting",]


def at_rest(daemon: RunningDaemon) -> Any:
    """The engine's status and the metrics, once nothing changes any more."""
    picture, measured = daemon.status(), metrics(daemon)
    calm = is_idle(daemon) and not picture["disk"]["queued_bytes"]
    same = daemon.status()["engine"] == picture["engine"]
    return (picture, measured) if calm and same else None


def check_nothing_is_left(daemon: RunningDaemon) -> tuple[Any, dict[tuple[str, ...], float]]:
    """Check that only the cache holds memory, and that none of it is leased."""
    picture, measured = eventually(lambda: at_rest(daemon))
    memory = picture["ledger"]
    assert memory["tail"] == memory["transient"] == memory["paging"] == 0
    cache = daemon.request("GET", "/cache").json()
    assert memory["kv"] > 0
    assert (memory["kv"], memory["checkpoint"]) == (cache["span_bytes"], cache["checkpoint_bytes"])
    assert cache["leases"] == 0
    assert daemon.request("GET", "/cache/verify").json() == {"problems": []}
    return picture, measured


@pytest.mark.slow
def test_what_is_told_under_load_is_true(
    short_path: Path, long_tiny_dir: Path, host: Host, answers: list[str]
) -> None:
    seen: Counter[str] = Counter()
    apart = 0
    with tight(short_path, long_tiny_dir, host) as daemon, agents(daemon) as streams:
        while not all(stream.ended for stream in streams):
            picture, measured = daemon.status(), metrics(daemon)
            engine, waiting = picture["engine"], picture["waiting"]
            for memory in (picture["ledger"], ledger_of(measured)):
                assert min(memory.values()) >= 0
                assert held(memory) <= memory["budget"] == TIGHT
            at_work = [sequence["request"] for sequence in engine["running"]]
            assert set(at_work) <= {stream.id for stream in streams}
            assert len(set(at_work)) == len(at_work)
            statuses = [sequence["status"] for sequence in engine["running"]]
            if "decode" in statuses:
                # A complete prompt has all of its state in the trie until its first decode step.
                own, stored = picture["ledger"]["tail"], picture["ledger"]["kv"]
                assert own + stored > 0
                seen.update(["own"] * (own > 0) + ["stored"] * (own == 0))
            # One that starts or ends is counted a moment later by one than by another.
            left = sum(not stream.ended for stream in streams)
            agree = len(at_work) + waiting == counted(measured) == left
            apart = 0 if agree else apart + 1
            assert apart < LOOKS, (statuses, waiting, counted(measured), left)
            if agree:
                seen.update([*statuses, *["waiting"] * waiting])
            time.sleep(PAUSE)
        assert [text_of(stream.reply()) for stream in streams] == answers
        assert min(seen[status] for status in ("decode", "preempted", "waiting")) > 0
        assert seen["own"] > seen["stored"]
        picture, measured = check_nothing_is_left(daemon)
        engine = picture["engine"]
        assert picture["ledger"] == ledger_of(measured)
        assert engine["preemptions"] == measured["umbel_preemptions_total",] > 0
        assert engine["generation_tokens"] == AGENTS * TOKENS
        assert measured["umbel_generation_tokens_total",] == AGENTS * TOKENS
        assert measured["umbel_request_queue_seconds_count",] == AGENTS  # each began once
        assert counted(measured) == 0
        assert outcomes(daemon) == {"length": AGENTS}


@pytest.mark.slow
@pytest.mark.parametrize("grace", [30, 0])
def test_stopped_while_some_are_preempted(
    short_path: Path, long_tiny_dir: Path, host: Host, answers: list[str], grace: int
) -> None:
    """Within the grace they are answered, else told why not; the next daemon goes on from there."""
    flags = ("--stop-grace", str(grace))
    with tight(short_path, long_tiny_dir, host, *flags) as daemon, agents(daemon) as streams:
        picture = eventually(lambda: with_preempted(daemon), PATIENCE)
        assert picture["waiting"] > 0
        daemon.process.send_signal(signal.SIGTERM)
        whole = {stream.id for stream in streams if _whole(stream, answers[stream.number])}
        taken = {sequence["request"] for sequence in picture["engine"]["running"]}
        assert whole == (taken if grace else set())
        assert daemon.process.wait(STOP) == 0
        assert not daemon.socket.exists()
        number = next(s.number for s in streams if s.id in preempted(picture))
    with tight(short_path, long_tiny_dir, host) as later:
        assert later.status()["disk"]["records"] > 0
        reply = later.post(body_of(number))
        assert text_of(reply) == answers[number]
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        check_nothing_is_left(later)


def _whole(stream: Stream, answer: str) -> bool:
    """True if a stream has its whole answer; else it must say that the daemon stops."""
    reply = stream.reply()
    if reply.body.endswith(b"data: [DONE]\n\n"):
        assert text_of(reply) == answer
        return True
    *chunks, last = events_of(reply.body)
    deltas = [msgspec.json.decode(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert answer.startswith("".join(delta.get("content") or "" for delta in deltas))
    error = msgspec.json.decode(last)["error"]
    assert (error["message"], error["type"], error["code"]) == (
        "the daemon is stopping",
        "server_error",
        "service_unavailable",
    )
    return False


def test_the_host_runs_short_under_running_streams(
    short_path: Path, long_tiny_dir: Path, host: Host, answers: list[str]
) -> None:
    """The budget shrinks, what is held with it, and grows back in time; no answer changes."""
    flags = ("--cache-bytes", str(WIDE))
    with running(short_path, long_tiny_dir, *flags, env=host.env) as daemon:
        for number in range(9):
            fill(daemon, number)
        eventually(lambda: on_disk(daemon))
        with agents(daemon, 8) as streams:
            eventually(lambda: all_decode(daemon, len(streams)))
            before = daemon.status()
            assert before["ledger"]["budget"] == WIDE
            assert before["pressure"] == {"level": "normal", "share": 1.0, "source": "simulated"}
            host.be_short()
            down = looks_until(daemon, lambda now: now["pressure"]["share"] == 0.25)
            under = looks_until(daemon, lambda now: preempted(now) and fits(now))
            low = daemon.status()["ledger"]["budget"]
            assert WIDE // 8 <= low < held(before["ledger"]) // 2
            assert ledger_of(metrics(daemon))["budget"] == low
            host.be_calm()
            up = looks_until(daemon, lambda now: now["pressure"]["share"] == 1.0)
            assert [text_of(s.reply()) for s in streams] == answers[: len(streams)]
        # The engine reads it between two steps, and publishes at the end of one.
        eventually(lambda: daemon.status()["ledger"]["budget"] == WIDE)
        check_nothing_is_left(daemon)
        assert daemon.log().count("memory pressure") == 2
    assert shares(down) == sorted(shares(down), reverse=True)
    assert max(share for share in shares(down) if share < 1) <= 0.5
    assert all(fits(now) for now in [*under, *up][LOOKS:])
    assert any(now["pressure"] == before["pressure"] | {"share": 0.25} for now in up)
    assert shares(up) == sorted(shares(up))
    assert len(set(shares(up))) > 5


def fill(daemon: RunningDaemon, number: int) -> None:
    """Store about a megabyte of state."""
    text = f"{number} " + "the other agent reads the report and answers the question " * 120
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 1}
    assert daemon.post(body).status == 200


def all_decode(daemon: RunningDaemon, count: int) -> bool:
    """True if so many are being answered."""
    at_work = daemon.status()["engine"]["running"]
    return [sequence["status"] for sequence in at_work] == ["decode"] * count


def looks_until(daemon: RunningDaemon, condition: Any) -> list[Any]:
    """Look again and again until something is so; returns all that was seen."""
    looks: list[Any] = []

    def look() -> bool:
        time.sleep(PAUSE)
        looks.append(daemon.status())
        return bool(condition(looks[-1]))

    eventually(look, PATIENCE)
    return looks


def fits(picture: Any) -> bool:
    """True if held memory is within the budget of that moment."""
    memory = picture["ledger"]
    return bool(held(memory) <= memory["budget"])


def shares(looks: list[Any]) -> list[float]:
    """Usable part of the budget."""
    return [picture["pressure"]["share"] for picture in looks]


@pytest.mark.slow
def test_a_client_leaves_while_it_is_preempted(
    short_path: Path, long_tiny_dir: Path, host: Host, answers: list[str]
) -> None:
    """It is gone at once with all it held, the others are answered, its conversation goes on."""
    with tight(short_path, long_tiny_dir, host) as daemon, agents(daemon) as streams:
        picture = eventually(lambda: with_preempted(daemon), PATIENCE)
        leaver = next(stream for stream in streams if stream.id in preempted(picture))
        others = [stream for stream in streams if stream is not leaver]
        leaver.leave()
        picture = looks_until(daemon, lambda now: leaver.id not in str(now["engine"]))[-1]
        at_work = {sequence["request"] for sequence in picture["engine"]["running"]}
        assert at_work  # it left in the middle, not as the last one
        assert at_work <= {stream.id for stream in others}
        for stream in others:
            assert text_of(stream.reply()) == answers[stream.number]
        check_nothing_is_left(daemon)
        assert outcomes(daemon) == {"length": len(others), "cancelled": 1}
        line = next(x for x in daemon.log().splitlines() if leaver.id in x)
        assert "finish=cancelled" in line
        headers = {"X-Umbel-Conversation": leaver.id}  # its own, as it gave no name
        body = body_of(leaver.number)
        reply = daemon.request("POST", "/v1/chat/completions", body, headers)
        assert text_of(reply) == answers[leaver.number]
