"""How long requests take: their log lines and the metrics, from one record."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import MagicMock

import pytest
import structlog.testing
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from umbel.daemon.config import Settings
from umbel.daemon.http.app import application
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.observability.metrics import Metrics
from umbel.daemon.requests.generation import Generation
from umbel.daemon.requests.request_times import RequestTimes
from umbel.scheduler.errors import DeadlineExceededError, QueueFullError, RequestError
from umbel.scheduler.handoff import Handoff
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent
from umbel.scheduler.statistics import EngineStatistics

from ..fakes import FakeClock, make_request
from .measured import measured_by, samples
from .serving import serving

STOP_TOKEN = 7
HISTOGRAMS = {
    "queue_s": "umbel_request_queue_seconds",
    "prefill_s": "umbel_request_prefill_seconds",
    "decode_s": "umbel_request_decode_seconds",
    "e2e_s": "umbel_e2e_request_latency_seconds",
}


class Reader:
    """Reads tokens as they are; one of them ends the answer as a stop sequence does."""

    reasoning_tokens = 0
    done = False

    def push(self, token: int, _logprobs: object) -> list[int]:
        """Read one."""
        self.done = token == STOP_TOKEN
        return [token]

    def flush(self) -> list[int]:
        """Keep nothing back."""
        return []


class Asked:
    """One request; the test is its engine and its client."""

    def __init__(self, *, queue_limit: int = 1) -> None:
        self.clock = FakeClock()
        self.metrics = Metrics(EngineStatistics, lambda: 0, None)
        queue = ConversationQueue(queue_limit)
        self.handoff = Handoff(queue, lambda: None, channel_limit=99, clock=self.clock)
        reader = cast("Any", Reader())
        self.generation = Generation(
            make_request("req-1"), self.handoff, reader, self.metrics, self.clock()
        )

    def deliver(self, seconds: float, event: Callable[[float], Event]) -> None:
        """Let time pass, and have the engine say something."""
        self.clock.advance(seconds)
        assert self.generation._channel is not None
        self.generation._channel.deliver(event(self.clock()))

    async def line(self, *script: "Step", sending: float = 0.0) -> dict[str, Any]:
        """Play a script, leave after a while, and return the log line."""
        with structlog.testing.capture_logs() as lines, suppress(RequestError):
            async with self.generation as answer:
                for seconds, event in script:
                    self.deliver(seconds, event)
                    await answer.next()
                self.clock.advance(sending)
        (line,) = lines
        return dict(line)


class Step(NamedTuple):
    """Something that the engine says, after some seconds."""

    seconds: float
    event: Callable[[float], Event]


def started(at: float) -> Event:
    """The request leaves the queue."""
    return Started(0, 0, at)


def token(at: float) -> Event:
    """There is a token."""
    return TokenEvent(5, at)


def stop_token(at: float) -> Event:
    """There is a token that ends a stop sequence."""
    return TokenEvent(STOP_TOKEN, at)


def stopped(_at: float) -> Event:
    """The model ended its answer."""
    return Finished(FinishReason.STOP)


def late(_at: float) -> Event:
    """The request's time is over."""
    return Finished(FinishReason.ERROR, DeadlineExceededError("late"))


QUEUED = Step(2, started)
FIRST = Step(4, token)


class Case(NamedTuple):
    """A request's life.

    Attributes:
        script: what the engine says.
        sending: seconds for which its answer is sent, or its client stays.
        times: in the queue, the prefill, the decode, and in all.
        finish: how it ended.
    """

    script: list[Step]
    sending: float
    times: tuple[float | None, ...]
    finish: str = "stop"


CASES = {
    # The end token takes a step of half a second, and the client a quarter to read.
    "ended": Case([QUEUED, FIRST, Step(1, token), Step(0.5, stopped)], 0.25, (2, 4, 1.5, 7.75)),
    "empty": Case([QUEUED, Step(3, stopped)], 0.25, (2, 3, None, 5.25)),
    "stop sequence": Case([QUEUED, FIRST, Step(1, stop_token)], 0.25, (2, 4, 1, 7.25)),
    "preempted in the prefill": Case(
        [QUEUED, Step(30, token), Step(0, stopped)], 0, (2, 30, 0, 32)
    ),
    "preempted in the decode": Case(
        [QUEUED, FIRST, Step(30, token), Step(1, token), Step(0, stopped)], 0, (2, 4, 31, 37)
    ),
    "cancelled in the queue": Case([], 5, (5, None, None, 5), "cancelled"),
    "cancelled in the prefill": Case([QUEUED], 5, (2, 5, None, 7), "cancelled"),
    "cancelled in the decode": Case([QUEUED, FIRST, Step(1, token)], 5, (2, 4, 6, 12), "cancelled"),
    "late in the queue": Case([Step(9, late)], 0, (9, None, None, 9), "error"),
    "late in the prefill": Case([QUEUED, Step(9, late)], 0, (2, 9, None, 11), "error"),
    "late while preempted": Case([QUEUED, FIRST, Step(9, late)], 0, (2, 4, 9, 15), "error"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_stages(case: Case) -> None:
    """The line has each stage that was reached, and the metrics have the very same times."""
    asked = Asked()
    line = await asked.line(*case.script, sending=case.sending)
    assert tuple(line[key] for key in HISTOGRAMS) == case.times
    assert str(line["finish"]) == case.finish
    measured = measured_by(asked.metrics)
    for key, name in HISTOGRAMS.items():
        assert measured[f"{name}_count",] == (line[key] is not None)
        assert measured[f"{name}_sum",] == (line[key] or 0)


async def test_first_token_and_later_tokens() -> None:
    """The line's times of tokens agree with its stages."""
    line = await Asked().line(QUEUED, FIRST, Step(1, token), Step(2, token), Step(0.5, stopped))
    assert (line["ttft_ms"], line["itl_ms"]) == (6000, 1500.0)
    assert line["ttft_ms"] == (line["queue_s"] + line["prefill_s"]) * 1e3


async def test_a_slow_reader_is_in_the_total_only() -> None:
    """However late an answer is read, its stages are those of the engine."""
    asked = Asked()
    with structlog.testing.capture_logs() as lines:
        async with asked.generation as answer:
            for seconds, event in (QUEUED, FIRST, Step(1, stopped)):
                asked.deliver(seconds, event)
            asked.clock.advance(100)
            while await answer.next() is not None:
                asked.clock.advance(100)
    (line,) = lines
    assert [line[key] for key in HISTOGRAMS] == [2, 4, 1, 307]


async def test_a_request_that_the_queue_refuses_has_no_times() -> None:
    """It is counted as refused, by who answers it."""
    asked = Asked(queue_limit=0)
    with structlog.testing.capture_logs() as lines, pytest.raises(QueueFullError):
        async with asked.generation:
            pass
    assert lines == []
    measured = measured_by(asked.metrics)
    assert all(measured[f"{name}_count",] == 0 for name in HISTOGRAMS.values())


@given(st.lists(st.floats(0, 4000), min_size=5, max_size=5))
def test_stages_are_never_more_than_the_total(moments: list[float]) -> None:
    """Also as they are written, whatever the clock says."""
    arrived, start, first, computed, sent = sorted(moments)
    times = RequestTimes(arrived, MagicMock())
    times.start(start)
    times.add_token(first)
    times.end(computed, sent)
    line = times.log_stages()
    written = [round((line[key] or 0) * 1e3) for key in HISTOGRAMS]
    assert min(written) >= 0
    assert sum(written[:3]) <= written[3]


async def test_refusals_are_counted_by_reason() -> None:
    """The reason is the code that the client hears; a request that only looks counts too."""
    entry = Entry(Settings())
    entry.models = serving()
    with structlog.testing.capture_logs() as lines:
        async with TestClient(TestServer(application(entry))) as client:
            await client.post("/v1/chat/completions", data=b"{")
            await client.post("/v1/chat/completions", json={"messages": []})
            await client.post("/no/such/place", json={})
            await client.get("/no/such/place")
    refused = [line for line in lines if line["event"] == "refused"]
    assert [line["code"] for line in refused] == ["invalid_json", None, "not_found", "not_found"]
    assert all(line["e2e_s"] >= 0 for line in refused)
    operator = cast("Any", SimpleNamespace(watches_only=None))
    measured = samples(entry.render_metrics(operator).decode())
    reasons = {key[1]: n for key, n in measured.items() if key[0] == "umbel_refusals_total"}
    assert reasons == {"invalid_json": 1, "invalid_request_error": 1, "not_found": 2}
