"""Steps that compute prompts in the call of those who decode, over a fake model."""

from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test
from structlog.testing import capture_logs

from umbel.scheduler.errors import ComputationError
from umbel.scheduler.request import Finished, FinishReason
from umbel.scheduler.sequence import SequenceStatus

from ..fakes import FakeOutput, FakePlan, FakeState, reference
from .test_engine import Bench, EngineMachine


class Mixing(Bench):
    """An engine whose model mixes, and a stream that decodes."""

    def __init__(
        self, *, prefill_chunk: int = 512, max_batch: int = 8, max_stall: float = 0.2
    ) -> None:
        super().__init__(
            max_batch=max_batch, prefill_chunk=prefill_chunk, together=True, max_stall=max_stall
        )
        self.runner.mixes, self.runner.overlaps = True, False  # as on a CPU
        self.stream = self.put("stream", [5, 6], max_tokens=30)
        while len(self.stream.output) < 3:
            self.engine.step()
        self.runner.mixed.clear()

    def is_answered(self, name: str, prompt: list[int], max_tokens: int = 4) -> None:
        """Check that a request has its whole answer."""
        assert self.tokens(name) == reference(prompt, max_tokens)[0]
        assert self.end(name) == Finished(FinishReason.LENGTH)


def test_a_prompt_begins_its_answer_in_the_call_of_others() -> None:
    """Its last token is computed there, too: no step of decoding comes before its first."""
    bench, prompt = Mixing(), [1, 2, 3, 4]
    sequence, before = bench.put("a", prompt), len(bench.tokens("stream"))
    bench.engine.step()
    assert bench.runner.mixed == [(1, 1)]
    assert bench.runner.chunks[-1] == (0, 4)
    assert bench.tokens("a") == reference(prompt, 1)[0]
    assert len(bench.tokens("stream")) == before + 1
    assert sequence.status is SequenceStatus.DECODE
    bench.engine.step()
    assert bench.runner.mixed == [(1, 1)]
    assert bench.tokens("a") == reference(prompt, 2)[0]
    bench.drain()
    bench.is_answered("a", prompt)
    bench.is_answered("stream", [5, 6], 30)
    seen = bench.engine.statistics()
    assert (seen.prompt_tokens, seen.prefill_tokens) == (6, 6)
    assert seen.generation_tokens == 34
    bench.check_idle()


def test_a_long_prompt_is_mixed_chunk_by_chunk() -> None:
    """Its answer begins with the last one, which has its last token."""
    bench, prompt = Mixing(prefill_chunk=4), [*range(1, 11)]
    bench.put("a", prompt)
    starts = []
    while not bench.tokens("a"):
        starts.append(len(bench.tokens("stream")))
        bench.engine.step()
    assert bench.runner.chunks[-3:] == [(0, 4), (4, 8), (8, 10)]
    assert bench.runner.mixed == [(1, 1)] * 3
    assert starts == [*range(starts[0], starts[0] + 3)], "the stream went on with each"
    bench.drain()
    bench.is_answered("a", prompt)


def test_a_prompt_by_itself_begins_its_answer_in_its_last_chunks_call() -> None:
    """No step of decoding comes before the first token; chunks before have no logits."""
    bench, prompt = Bench(prefill_chunk=4, together=True), [*range(1, 11)]
    bench.runner.mixes, bench.runner.overlaps = True, False
    sequence = bench.put("a", prompt)
    for chunk, mixed in (((0, 4), []), ((4, 8), []), ((8, 10), [(0, 1)])):
        assert bench.tokens("a") == []
        bench.engine.step()
        assert (bench.runner.chunks[-1], bench.runner.mixed) == (chunk, mixed)
    assert bench.tokens("a") == reference(prompt, 1)[0]
    assert sequence.status is SequenceStatus.DECODE
    bench.drain()
    assert bench.tokens("a") == reference(prompt, 4)[0]
    assert len(bench.runner.mixed) == 1
    seen = bench.engine.statistics()
    assert (seen.prefill_tokens, seen.generation_tokens) == (10, 4)
    bench.check_idle()


def test_prompts_by_themselves_begin_their_answers_together() -> None:
    """All that a call completes have their first tokens of it; what it took is a call's time."""
    bench, taken = Bench(max_batch=8, prefill_chunk=512, together=True), []
    bench.runner.mixes, bench.runner.overlaps = True, False
    stall = bench.engine._prefiller._stall
    stall.observe = lambda *call, **_: taken.append(call)  # type: ignore[method-assign]
    mix = bench.runner.mix

    def slow(*call: Any) -> FakeOutput:
        bench.clock.advance(0.25)
        return mix(*call)

    bench.runner.mix = slow  # type: ignore[method-assign, assignment]
    prompts = {name: [n, 2, 3] for n, name in enumerate("abc", 4)}
    for name, prompt in prompts.items():
        bench.put(name, prompt)
    bench.engine.step()
    assert bench.runner.mixed == [(0, 3)]
    assert taken == [(9, 0.25, 3)]
    for name, prompt in prompts.items():
        assert bench.tokens(name) == reference(prompt, 1)[0]
    bench.drain()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == reference(prompt, 4)[0]


def test_a_prompt_by_itself_that_fails_ends() -> None:
    """It is nobody else's fault: it is not computed again, and others mix as ever."""
    bench, prompt = Bench(max_batch=8, together=True), [7, 8]
    bench.runner.mixes, bench.runner.overlaps = True, False
    bench.runner.fail_at(prompt, 1, ValueError("no"))
    sequence = bench.put("bad", prompt)
    with capture_logs() as logs:
        bench.engine.step()
    assert isinstance(bench.end("bad").error, ComputationError)
    assert not sequence.is_alone
    assert [entry["event"] for entry in logs] == ["request failed"]
    bench.put("a", [1, 2, 3])
    bench.drain()
    assert bench.tokens("a") == reference([1, 2, 3], 4)[0]
    assert bench.runner.mixed[-1] == (0, 1)
    bench.check_idle()


def test_what_a_first_token_waits_for_is_no_time_of_its_call() -> None:
    """Whether an answer is complete may take long to know; the next chunks are no shorter."""
    bench, taken = Bench(max_batch=8, together=True), []
    bench.runner.mixes, bench.runner.overlaps = True, False
    stall = bench.engine._prefiller._stall
    stall.observe = lambda *call, **_: taken.append(call)  # type: ignore[method-assign]
    mix, sample = bench.runner.mix, bench.runner.sample

    def slow(*call: Any) -> FakeOutput:
        bench.clock.advance(0.25)
        return mix(*call)

    def slower(*call: Any) -> Any:
        bench.clock.advance(9.0)
        return sample(*call)

    bench.runner.mix, bench.runner.sample = slow, slower  # type: ignore[method-assign, assignment]
    bench.put("a", [1, 2, 3])
    bench.engine.step()
    assert taken == [(3, 0.25, 1)]


def test_one_at_fault_among_prompts_by_themselves_is_alone_with_it() -> None:
    """All are computed again, each by itself, and only that one ends."""
    bench, prompts = Bench(max_batch=8, together=True), {"a": [1, 2, 3], "bad": [7, 8], "b": [4, 5]}
    bench.runner.mixes, bench.runner.overlaps = True, False
    bench.runner.fail_at(prompts["bad"], 1, ValueError("no"))
    for name, prompt in prompts.items():
        bench.put(name, prompt)
    with capture_logs():
        bench.drain()
    assert isinstance(bench.end("bad").error, ComputationError)
    for name in ("a", "b"):
        assert bench.tokens(name) == reference(prompts[name], 4)[0]
        assert bench.end(name) == Finished(FinishReason.LENGTH)
    bench.check_idle()


def test_an_answer_may_end_in_the_step_that_begins_it() -> None:
    """One token was asked for: nothing of it is left, and its row goes to nobody."""
    bench, prompt = Mixing(), [1, 2, 3]
    bench.put("a", prompt, max_tokens=1)
    bench.engine.step()
    bench.is_answered("a", prompt, 1)
    assert bench.runner.live_states == 1
    bench.drain()
    bench.is_answered("stream", [5, 6], 30)
    bench.check_idle()


def test_who_begins_in_a_mixed_step_enters_the_batch_in_the_next() -> None:
    """What that takes the decode is counted as it is for all who enter."""
    bench, seen = Mixing(), []
    observe = bench.engine._prefiller._stall.observe_decode

    def observed(seconds: float, entered: int, rows: int, *, ended: bool = False) -> None:
        seen.append((entered, rows))
        observe(seconds, entered, rows, ended=ended)

    bench.engine._prefiller._stall.observe_decode = observed  # type: ignore[method-assign]
    bench.put("a", [1, 2, 3])
    for _ in range(3):
        bench.engine.step()
    assert seen == [(1, 2), (0, 2)]


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_prompts_fault_touches_nobody_else(at: int) -> None:
    """All of the call start again, each apart: the one at fault ends, the others are answered."""
    bench, prompts = Mixing(), {"a": [1, 2, 3], "bad": [7, 8, 9], "b": [4, 5, 6]}
    bench.runner.fail_at(prompts["bad"], at, ValueError("no"))
    for name, prompt in prompts.items():
        bench.put(name, prompt)
    with capture_logs() as logs:
        bench.drain()
    assert isinstance(bench.end("bad").error, ComputationError)
    for name in ("a", "b"):
        bench.is_answered(name, prompts[name])
    bench.is_answered("stream", [5, 6], 30)
    failed = [entry for entry in logs if "computed apart" in entry["event"]]
    assert len(failed) == (at < 3), "what fails later is its own decode"
    bench.check_idle()


def test_a_streams_fault_touches_nobody_else() -> None:
    """It fails in the call that a prompt is in: that one is computed again, and the stream ends."""
    bench, prompt = Mixing(), [1, 2, 3]
    bench.runner.fail_at([5, 6], 2 + len(bench.stream.output) - 1, ValueError("no"))
    bench.put("a", prompt)
    bench.drain()
    assert isinstance(bench.end("stream").error, ComputationError)
    bench.is_answered("a", prompt)
    assert bench.runner.mixed == [(1, 1)]
    bench.check_idle()


def test_no_prompt_is_mixed_with_who_failed_before() -> None:
    """It would be computed again for each: prompts have calls of their own beside it."""
    bench = Mixing()
    mix, failures = bench.runner.mix, [0]

    def fails(
        plan: object, caches: object, tokens: object, chunks: Items[tuple[Items[int], FakeState]]
    ) -> None:
        del plan, caches, tokens, chunks
        failures[0] += 1
        raise MemoryError

    bench.runner.mix = fails  # type: ignore[method-assign, assignment]
    bench.put("a", [1, 2, 3], max_tokens=20)
    for _ in range(3):
        bench.engine.step()
    bench.runner.mix = mix  # type: ignore[method-assign]
    bench.put("b", [4, 5, 6], max_tokens=9)
    bench.drain()
    assert failures == [1]
    assert bench.runner.mixed == []
    for name, prompt, tokens in (("a", [1, 2, 3], 20), ("b", [4, 5, 6], 9)):
        bench.is_answered(name, prompt, tokens)
    bench.is_answered("stream", [5, 6], 30)


def test_no_step_is_mixed_while_one_runs_that_failed() -> None:
    """Calls are then as long as those of prompts by themselves."""
    bench = Mixing()
    assert bench.engine._prefiller.mixes
    bench.stream.is_alone = True
    assert not bench.engine._prefiller.mixes
    bench.drain()
    assert bench.engine._prefiller.mixes


def test_when_many_end_those_who_come_beside_the_last_are_served() -> None:
    """A mixed step of one row takes less than the decodes of 16 did: that is no negative time."""
    bench = Bench(max_batch=16, prefill_chunk=512, together=True)
    bench.runner.mixes, bench.runner.overlaps = True, False
    run, mix, prefill = bench.runner.run, bench.runner.mix, bench.runner.prefill

    def slow_run(plan: FakePlan, caches: Items[FakeState], *rest: Any) -> FakeOutput:
        bench.clock.advance(0.06 + 0.003 * len(caches))
        return run(plan, caches, *rest)

    def slow_mix(
        plan: FakePlan,
        caches: Items[FakeState],
        tokens: Items[int],
        chunks: Items[tuple[Items[int], FakeState]],
    ) -> FakeOutput:
        computed = sum(len(fed) for fed, _ in chunks)
        bench.clock.advance(0.06 + 0.002 * (len(caches) + computed))
        return mix(plan, caches, tokens, chunks)

    def slow_prefill(chunks: Items[tuple[Items[int], FakeState]]) -> None:
        bench.clock.advance(0.05 + 0.002 * sum(len(fed) for fed, _ in chunks))
        prefill(chunks)

    bench.runner.run = slow_run  # type: ignore[method-assign, assignment]
    bench.runner.mix = slow_mix  # type: ignore[method-assign]
    bench.runner.prefill = slow_prefill  # type: ignore[method-assign]
    prompts = {f"first {n}": [n + 1, 2, 3] for n in range(16)}
    for number, (name, prompt) in enumerate(prompts.items()):
        bench.put(name, prompt, max_tokens=9 if number else 60)
    while len(bench.engine._running) != 1 or not bench.tokens("first 0"):
        bench.engine.step()
    for turn in range(4):
        for number in range(2):
            name = f"{turn} {number}"
            prompts[name] = [turn + 30, number + 50, *range(60, 64 + 30 * turn)]
            bench.put(name, prompts[name])
            for _ in range(2):
                bench.engine.step()
    bench.drain()
    for name, prompt in prompts.items():
        tokens = {"first 0": 60}.get(name, 9 if name.startswith("first") else 4)
        assert bench.tokens(name) == reference(prompt, tokens)[0]
    assert len(bench.runner.mixed) >= 8


class MixingMachine(EngineMachine):
    """Any schedule of requests, over a model that mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.bench.runner.prefills_together = self.bench.runner.mixes = True

    @initialize(overlaps=st.booleans())
    def begin(self, *, overlaps: bool) -> None:
        """Tokens may be on their way when the step of others begins."""
        self.bench.runner.overlaps = overlaps

    @invariant()
    def states_belong_to_running_sequences(self) -> None:
        """As in any schedule; who starts again has none."""
        statistics = self.bench.engine.statistics().running
        running = [each for each in statistics if each.status is not SequenceStatus.PREEMPTED]
        assert self.bench.runner.live_states == len(running) <= 3

    def check_statistics(self) -> None:
        """Compare the counters with what was published: who fails together is computed again."""
        self.check_published()


def test_every_request_ends_once_whatever_is_mixed() -> None:
    """Over random schedules each request ends once, last, truly, and leaves nothing behind."""
    with capture_logs():  # as in `test_engine`
        run_state_machine_as_test(
            MixingMachine, settings=settings(max_examples=80, stateful_step_count=30, deadline=None)
        )
