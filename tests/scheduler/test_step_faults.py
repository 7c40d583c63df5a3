"""A fault in a step itself, outside of what one request's guard sees, ends requests in words."""

from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from umbel.scheduler.errors import ComputationError
from umbel.scheduler.request import Finished, FinishReason
from umbel.scheduler.thread import Pace

from ..fakes import reference
from .test_engine import Bench, PanicError

PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [2, 3, 4, 5, 6, 7], "c": [3, 4, 5]}
PLACES: dict[str, Callable[[Bench], Any]] = {
    "refresh": lambda bench: bench.engine._kv_cache,
    "plan": lambda bench: bench.runner,
    "cost": lambda bench: bench.runner,
    "sample": lambda bench: bench.runner,
    "afford": lambda bench: bench.engine._memory,
    "record": lambda bench: bench.engine._memory,
    "prompt_precedence": lambda bench: bench.engine._scheduler,
    "may_yield": lambda bench: bench.engine._scheduler,
    "next_start": lambda bench: bench.engine._scheduler,
    "note": lambda bench: bench.queue,
    "claim": lambda bench: bench.queue,
    "_chunk_size": lambda bench: bench.engine,
    "advance_prompt": lambda bench: bench.engine._scheduler,
    "read": lambda bench: bench.engine._decoder,
    "end_step": lambda bench: bench.engine._report,
    "publish": lambda bench: bench.engine._report,
    "step": lambda bench: bench.engine._kv_cache.paging,
}
"""Methods that a step calls, and whose they are."""


def fail_at(owner: object, name: str, call: int, error: BaseException) -> pytest.MonkeyPatch:
    """Make one call of a method raise."""
    patch, works, calls = pytest.MonkeyPatch(), getattr(owner, name), iter(range(1 << 30))

    def fails(*args: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise error
        return works(*args, **named)

    patch.setattr(owner, name, fails)
    return patch


@pytest.mark.parametrize("error", [ValueError("broken"), PanicError("broken")], ids=type)
@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.parametrize("place", PLACES)
def test_fault_in_a_step_ends_requests_in_words(
    place: str, call: int, error: BaseException
) -> None:
    """The requests at work end at once, the others and later ones get right answers."""
    bench = Bench(max_batch=2)
    for name, prompt in PROMPTS.items():
        bench.put(name, prompt, max_tokens=8)
    patch = fail_at(PLACES[place](bench), place, call, error)
    with capture_logs() as logs:
        bench.drain()
    patch.undo()
    failed = {name for name in PROMPTS if bench.end(name).reason is FinishReason.ERROR}
    for name in failed:
        assert isinstance(bench.end(name).error, ComputationError)
        assert str(bench.end(name).error).endswith(f"{type(error).__name__}: broken")
    assert bool(failed) is any("a step failed" in log["event"] for log in logs)
    for name in PROMPTS.keys() - failed:
        assert bench.tokens(name) == reference(PROMPTS[name], 8)[0]
    assert failed or call  # the first call of each is in some step
    bench.put("later", [7, 8, 9], max_tokens=5)
    bench.drain()
    assert bench.tokens("later") == reference([7, 8, 9], 5)[0]
    bench.check_idle()


def test_fault_that_stays_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request ends though no step succeeds, and the engine sleeps then."""
    bench = Bench(max_batch=2)

    def fail(**_: object) -> bool:
        raise ValueError("broken")

    monkeypatch.setattr(bench.engine._kv_cache.paging, "step", fail)
    for name, prompt in PROMPTS.items():
        bench.put(name, prompt, deadline=1000)
    bench.drain()
    assert {bench.end(name).reason for name in PROMPTS} == {FinishReason.ERROR}
    assert bench.engine.step() is Pace.IDLE
    monkeypatch.undo()
    bench.check_idle()


def test_end_that_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends in words even if nothing that belongs to its end works."""
    bench = Bench(max_batch=2)
    bench.put("a", PROMPTS["a"])
    bench.engine.step()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("broken")

    for owner, name in (
        (bench.engine._memory, "afford"),
        (bench.engine._memory, "release"),
        (bench.engine._scheduler, "remove"),
    ):
        monkeypatch.setattr(owner, name, fail)
    bench.engine.step()
    end = bench.end("a")
    assert end == Finished(FinishReason.ERROR, end.error)
    assert isinstance(end.error, ComputationError)
    assert bench.engine._scheduler.running == []


PARTS: dict[str, Callable[[Bench], Any]] = {
    "forget": lambda bench: bench.engine._scheduler,
    "remove": lambda bench: bench.engine._scheduler,
    "charge": lambda bench: bench.engine._scheduler,
    "release": lambda bench: bench.queue,
    "end": lambda bench: bench.engine._kv_cache,
}
"""Methods that the end of a sequence calls, and whose they are."""


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("part", PARTS)
def test_fault_in_one_end_keeps_no_other_from_ending(part: str, call: int) -> None:
    """All requests of a step that failed end in words, and hold nothing; the fault is logged once.

    A sequence whose end fails in one part does the others.
    """
    bench = Bench(max_batch=3)
    for name, prompt in PROMPTS.items():
        bench.put(name, prompt, conversation=name)
    bench.engine.step()
    assert len(bench.engine._scheduler.running) == 3
    patches = [
        fail_at(bench.engine._memory, "afford", 0, ValueError("broken")),
        fail_at(PARTS[part](bench), part, call, PanicError("broken too")),
    ]
    with capture_logs() as logs:
        bench.engine.step()
    for patch in patches:
        patch.undo()
    for name in PROMPTS:
        assert isinstance(bench.end(name).error, ComputationError)
        assert str(bench.end(name).error).endswith("ValueError: broken")
        assert [type(event) for event in bench.events[name]].count(Finished) == 1
    told = [log["event"] for log in logs if log["log_level"] == "error"]
    told = [event for event in told if event != "request failed"]
    assert told[0] == "a step failed; the requests at work end"
    assert told[1:] in (["request not ended in order"], ["state not kept"])
    bench.engine.step()
    assert bench.runner.live_states == 0
    assert bench.engine._scheduler.running == []
    assert len(bench.queue._claimed) == 0
    for name in PROMPTS:
        bench.put(f"{name} again", [7, 8, 9], conversation=name, max_tokens=5)
    bench.drain()
    for name in PROMPTS:
        assert bench.tokens(f"{name} again") == reference([7, 8, 9], 5)[0]
