"""The engine loop: schedule, run, publish."""

import statistics
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from umbel.scheduler.engine import Engine
from umbel.scheduler.errors import ComputationError, DeadlineExceededError
from umbel.scheduler.kv_cache_manager import KVCacheManager
from umbel.scheduler.lifecycle import Step, StepSummary
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.paging import Paging
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent
from umbel.scheduler.sequence import Sequence, SequenceStatus
from umbel.scheduler.tenants import TenantUse, Terms
from umbel.scheduler.thread import Pace

from ..fakes import (
    FakeClock,
    FakeOutput,
    FakePlan,
    FakeRunner,
    FakeState,
    make_request,
    next_token,
    no_reuse,
    reference,
)

if TYPE_CHECKING:
    from umbel.scheduler.statistics import EngineStatistics


class PanicError(BaseException):
    """Panic of a Rust extension: not an `Exception`."""


class Bench:
    """An engine over a fake model, and everything that it published."""

    def __init__(
        self,
        *,
        max_batch: int = 1,
        prefill_chunk: int = 4,
        eos_ids: Iterable[int] = (),
        max_stall: float = 0.2,
        terms: Terms = Terms(),  # noqa: B008  (it is frozen)
    ) -> None:
        self.runner = FakeRunner()
        self.clock = FakeClock()
        self.queue = ConversationQueue(1000, TenantUse(lambda _: terms), self.clock)
        self.events: dict[str, list[Event]] = {}
        self.order: list[tuple[str, Event]] = []
        self.engine = Engine(
            *no_reuse(self.runner),
            self.queue,
            self._publish,
            eos_ids=frozenset(eos_ids),
            prefill_chunk=prefill_chunk,
            max_batch=max_batch,
            max_stall=max_stall,
            clock=self.clock,
        )

    def _publish(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        for sequence, event in events:
            self.events.setdefault(sequence.request.id, []).append(event)
            self.order.append((sequence.request.id, event))

    def put(
        self,
        request_id: str,
        prompt: list[int] | None = None,
        *,
        conversation: str | None = None,
        **more: Any,
    ) -> Sequence:
        """Queue a request."""
        request = make_request(request_id, prompt, conversation=conversation, **more)
        sequence = Sequence(request)
        self.queue.put(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> bool:
        """Cancel as the hand-off does; True when it still waited and the engine will not say."""
        sequence.cancelled = True
        return self.queue.remove(sequence.request.id) is not None

    def drain(self) -> None:
        """Step until the engine says that there is nothing to do."""
        for _ in range(10_000):
            if not self.engine.step():
                return
        raise AssertionError("the engine never came to rest")

    def tokens(self, request_id: str) -> list[int]:
        """Collect what was published of an answer."""
        return [e.token for e in self.events.get(request_id, []) if isinstance(e, TokenEvent)]

    def end(self, request_id: str) -> Finished:
        """Find how a request ended; exactly once, and last."""
        *before, last = self.events[request_id]
        assert isinstance(last, Finished)
        assert not any(isinstance(event, Finished) for event in before)
        return last

    def check_idle(self) -> None:
        """Nothing is held for anyone any more."""
        assert self.runner.live_states == 0
        assert self.engine.statistics().running == ()
        assert len(self.queue) == 0
        assert len(self.queue._claimed) == 0


class TestAnswers:
    """Computed tokens, and the cached state that they start from."""

    def test_events_come_in_order(self) -> None:
        """Started, every token, and the end; nothing else."""
        bench = Bench()
        bench.put("a", [1, 2, 3], max_tokens=3)
        bench.drain()
        answer, _ = reference([1, 2, 3], 3)
        assert bench.events["a"] == [
            Started(0, 0, 100.0),
            *(TokenEvent(token, 100.0) for token in answer),
            Finished(FinishReason.LENGTH),
        ]
        bench.check_idle()

    def test_a_tenant_without_tokens_left_keeps_the_engine_waiting(self) -> None:
        """Not busy: it looks again after a while, and goes on when there are tokens."""
        bench = Bench(terms=Terms(tokens_per_minute=4))
        for name in "ab":
            bench.put(name, [1, 2, 3], max_tokens=3)
        while not bench.events.get("a") or not isinstance(bench.events["a"][-1], Finished):
            bench.engine.step()
        assert [bench.engine.step() for _ in range(3)] == [Pace.WAITING] * 3
        assert "b" not in bench.events
        bench.clock.now += 60
        bench.drain()
        assert bench.tokens("b") == bench.tokens("a")
        bench.check_idle()

    def test_one_that_is_cancelled_as_it_yields_is_gone(self) -> None:
        bench = Bench()
        sequence = bench.put("a", [1, 2], max_tokens=50)
        bench.engine.step()
        sequence.cancelled = True
        step = Step(StepSummary())
        bench.engine._put_back(sequence, step)
        bench.engine._publish_events(step)
        assert len(bench.queue) == 0
        bench.put("b", [3], conversation="a", max_tokens=1)
        bench.drain()
        assert bench.end("a").reason is FinishReason.CANCELLED
        assert bench.tokens("b") == reference([3], 1)[0]
        bench.check_idle()

    def test_an_empty_queue_is_no_work(self) -> None:
        """An idle engine says so, and publishes nothing."""
        bench = Bench()
        assert not bench.engine.step()
        assert bench.order == []

    def test_the_engine_asks_for_another_step_while_it_has_work(self) -> None:
        """It is idle with the end of the last sequence, not a step later."""
        bench = Bench()
        bench.put("a", [1], max_tokens=2)
        bench.put("b", [2], max_tokens=1)
        assert [bench.engine.step() for _ in range(3)] == [Pace.BUSY, Pace.BUSY, Pace.IDLE]

    def test_tokens_wait_for_no_step_where_nothing_overlaps(self) -> None:
        """A device that computes only while the host waits gives each step's token in it."""
        bench = Bench()
        bench.runner.overlaps = False
        bench.put("a", [1], max_tokens=3)
        for count in (1, 2, 3):
            bench.engine.step()
            assert len(bench.tokens("a")) == count
        bench.check_idle()

    def test_the_next_step_is_launched_before_the_last_one_is_read(self) -> None:
        """Where device and host overlap, a token is read when the one after it is on its way."""
        bench = Bench()
        sequence = bench.put("a", [1], max_tokens=3)
        seen = []
        for _ in range(3):
            bench.engine.step()
            seen.append((len(bench.runner.fed[0]), len(sequence.output)))
        assert seen == [(1, 1), (2, 1), (3, 3)]

    def test_prefill_runs_in_chunks_on_the_grid(self) -> None:
        """The prompt is computed in pieces of the chunk size, up to its end."""
        bench = Bench(prefill_chunk=4)
        bench.put("a", list(range(11)), max_tokens=1)
        bench.drain()
        assert bench.runner.chunks == [(0, 4), (4, 8), (8, 11)]
        assert bench.tokens("a") == reference(list(range(11)), 1)[0]

    def test_the_last_chunk_gives_the_first_token(self) -> None:
        """Also of a prompt of one token, in the first step."""
        bench = Bench()
        bench.put("a", [5], max_tokens=1)
        bench.engine.step()
        assert bench.runner.chunks == [(0, 1)]
        assert bench.tokens("a") == [next_token([5])]

    def test_a_chunk_that_gives_many_logits_is_short(self) -> None:
        """The model says how long it may be."""
        bench = Bench(prefill_chunk=16)
        bench.runner.max_completing = 3
        bench.put("a", list(range(11)), max_tokens=2)
        bench.drain()
        assert bench.runner.chunks == [(0, 8), (8, 11)]
        assert bench.tokens("a") == reference(list(range(11)), 2)[0]

    def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(self) -> None:
        """The client sees the tokens before it, and the reason."""
        answer, _ = reference([1, 2], 4)
        bench = Bench(eos_ids=[answer[2]])
        bench.put("a", [1, 2], max_tokens=10)
        bench.drain()
        assert bench.tokens("a") == answer[:2]
        assert bench.end("a") == Finished(FinishReason.STOP)

    def test_an_answer_may_be_empty(self) -> None:
        """A stop token as the very first one is an answer without tokens, not an error."""
        bench = Bench(eos_ids=[next_token([1, 2])])
        bench.put("a", [1, 2])
        bench.drain()
        assert bench.events["a"] == [Started(0, 0, 100.0), Finished(FinishReason.STOP)]

    @given(
        prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), max_size=8),
        chunk=st.integers(1, 9),
        max_batch=st.integers(1, 5),
        max_tokens=st.integers(1, 6),
        eos_below=st.sampled_from([0, 100, 400]),
    )
    def test_answers_do_not_depend_on_chunks_or_company(
        self, prompts: list[list[int]], chunk: int, max_batch: int, max_tokens: int, eos_below: int
    ) -> None:
        """Each answer is the reference's, and each token was fed once, in order."""
        eos_ids = range(eos_below)
        bench = Bench(max_batch=max_batch, prefill_chunk=chunk, eos_ids=eos_ids)
        for number, prompt in enumerate(prompts):
            bench.put(str(number), prompt, max_tokens=max_tokens)
        bench.drain()
        fed = []
        for number, prompt in enumerate(prompts):
            answer, reason = reference(prompt, max_tokens, eos_ids)
            assert bench.tokens(str(number)) == answer
            assert bench.end(str(number)) == Finished(reason)
            fed.append(prompt + (answer if reason is FinishReason.STOP else answer[:-1]))
        for was_fed, needed in zip(bench.runner.fed, fed, strict=True):
            # The next step is launched before it is known that the answer ended.
            ahead = was_fed[len(needed) :]
            assert was_fed[: len(needed)] == needed
            assert ahead == [] or ahead == [next_token(needed)]
            assert not ahead or ahead[0] in eos_ids
        bench.check_idle()


class TestOrder:
    """Order in which sequences run."""

    def test_a_crowd_starts_a_few_at_a_time_beside_a_stream(self) -> None:
        """As many as start in a tenth of the stall bound; without a stream all do."""
        for streams in (0, 1):
            bench = Bench(max_batch=40, prefill_chunk=64)
            _take_time(bench, own=0.0, each=0.0, step=0.0, start=0.004)
            if streams:
                bench.put("stream", [5, 6], max_tokens=100)
                bench.engine.step()
            names = [str(number) for number in range(12)]
            for name in names:
                bench.put(name, [1, 2, 3], max_tokens=2)
            starts = []
            while any(name not in bench.events for name in names):
                before = len(bench.events)
                assert bench.engine.step()
                starts.append(len(bench.events) - before)
            assert starts == ([5, 5, 2] if streams else [12])

    def test_one_that_takes_long_to_start_starts(self) -> None:
        """Longer than all may take beside a stream: one a step does in any case."""
        bench = Bench(max_batch=4)
        _take_time(bench, own=0.0, each=0.0, step=0.0, start=5.0)
        bench.put("stream", [5, 6], max_tokens=9)
        for name in ("a", "b"):
            bench.put(name, [1, 2, 3], max_tokens=2)
        bench.drain()
        assert [bench.end(name).reason for name in ("a", "b")] == [FinishReason.LENGTH] * 2

    def test_the_disk_knows_when_sequences_run(self) -> None:
        """The engine is idle before the first step and after the last; short memory counts too."""
        bench = Bench(max_batch=4)
        heard = _told_to_the_disk(bench)
        for name in ("a", "b"):
            bench.put(name, [5, 6, 7], max_tokens=9)
        for _ in range(3):
            bench.engine.step()
        assert heard == [False, True, True]
        bench.engine._last = StepSummary(is_short=True)
        bench.engine.step()
        assert heard[-1] is False
        bench.drain()
        bench.engine.step()
        assert heard[-2:] == [True, False]

    def test_an_idle_engine_has_new_state_written(self) -> None:
        """It asks for one more step where nothing is being written yet, and rests then."""
        bench = Bench()
        paging = bench.engine._kv_cache.paging
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(paging), "unwritten", True)
            bench.put("a", [1, 2], max_tokens=1)
            while bench.engine.step() is Pace.BUSY:
                pass
            assert bench.engine.step() is Pace.WAITING
        assert bench.engine.step() is Pace.IDLE

    def test_a_long_prompt_does_not_stall_live_answers(self) -> None:
        """While one sequence prefills, another gets a token in every step."""
        bench = Bench(max_batch=2, prefill_chunk=2)
        bench.put("live", [1], max_tokens=50)
        bench.engine.step()
        bench.put("long", list(range(40)), max_tokens=1)
        for expected in range(2, 12):
            bench.engine.step()
            assert len(bench.tokens("live")) == expected
        assert bench.tokens("long") == []

    def test_statistics_describe_what_runs(self) -> None:
        """`/status` sees the running sequences as of the last step."""
        bench = Bench(prefill_chunk=4)
        bench.put("a", [1] * 6, conversation="c", max_tokens=3)
        bench.engine.step()
        (running,) = bench.engine.statistics().running
        assert (running.request, running.tenant, running.conversation) == ("a", "default", "c")
        assert running.status is SequenceStatus.PREFILL
        assert (running.prompt_tokens, running.computed_tokens, running.output_tokens) == (6, 4, 0)
        bench.engine.step()
        (running,) = bench.engine.statistics().running
        assert running.status is SequenceStatus.DECODE
        # Read at once: it is the first token, of the last chunk.
        assert (running.computed_tokens, running.output_tokens) == (6, 1)
        bench.engine.step()
        (running,) = bench.engine.statistics().running
        assert (running.computed_tokens, running.output_tokens) == (7, 1)  # launched, not read


class TestPrompts:
    """One prompt advances a step, for as long as streams can wait."""

    def test_short_prompts_come_one_after_the_other(self) -> None:
        """Their answers are what each has alone."""
        bench = Bench(max_batch=8, prefill_chunk=16)
        prompts = {str(n): [n + 1] * 6 for n in range(8)}
        for name, prompt in prompts.items():
            bench.put(name, prompt)
        bench.drain()
        assert bench.runner.chunks == [(0, 6)] * 8
        for name, prompt in prompts.items():
            assert bench.tokens(name) == reference(prompt, 4)[0]
        assert bench.engine.statistics().prefill_tokens == 8 * 6

    def test_a_stream_waits_no_longer_than_the_bound(self) -> None:
        """Beside a long prompt, once the first calls were measured; a decode comes besides."""
        bench = Bench(max_batch=4, prefill_chunk=512, max_stall=0.2)
        _take_time(bench, own=0.02, each=0.001, step=0.01)
        bench.put("stream", [5, 6], max_tokens=200)
        bench.engine.step()
        bench.put("long", list(range(3000)), max_tokens=2)
        gaps, last = [], bench.clock()
        while "long" not in bench.events or not bench.tokens("long"):
            before = len(bench.tokens("stream"))
            bench.engine.step()
            if len(bench.tokens("stream")) > before:
                gaps.append(bench.clock() - last)
                last = bench.clock()
        assert max(gaps) <= 0.2 + 0.01
        assert statistics.median(gaps) >= 0.1  # and not much shorter, which would cost the prompt
        bench.drain()
        assert bench.tokens("stream") == reference([5, 6], 200)[0]

    def test_who_is_passed_over_ages_by_what_others_computed(self) -> None:
        """A long prompt counts the tokens of those that go before."""
        bench = Bench(max_batch=8, prefill_chunk=8)
        long = bench.put("long", [9] * 60)
        shorts = [bench.put(str(n), [n + 1] * 4) for n in range(2)]
        for _ in shorts:
            bench.engine.step()
        assert [short.num_left_to_prefill for short in shorts] == [0, 0]
        assert long.prefill.passed_over == 2 * 4
        bench.drain()
        assert bench.tokens("long") == reference([9] * 60, 4)[0]


def _told_to_the_disk(bench: Bench) -> list[bool]:
    """Record whether paging is told that the engine is busy, in each step from here on."""
    heard: list[bool] = []

    def page(*, busy: bool) -> bool:
        heard.append(busy)
        return False

    bench.engine._kv_cache.paging.step = page  # type: ignore[method-assign, assignment]
    return heard


def _take_time(bench: Bench, *, own: float, each: float, step: float, start: float = 0.0) -> None:
    """Make calls take seconds.

    Args:
        bench: whose.
        own: of a chunk.
        each: of its tokens.
        step: of a decode.
        start: for each sequence whose state is made.
    """
    runner = bench.runner
    prefill, run, open_ = runner.prefill, runner.run, runner.open

    def slow_open(*args: Any) -> FakeState:
        bench.clock.advance(start)
        return open_(*args)

    def slow_prefill(tokens: Items[int], cache: FakeState) -> None:
        bench.clock.advance(own + each * len(tokens))
        prefill(tokens, cache)

    def slow_run(*args: Any) -> FakeOutput:
        bench.clock.advance(step)
        return run(*args)

    runner.prefill = slow_prefill  # type: ignore[method-assign]
    runner.run = slow_run  # type: ignore[method-assign, assignment]
    runner.open = slow_open  # type: ignore[method-assign, assignment]


class TestStatistics:
    """Counters that others add up."""

    def test_steps_and_their_time_are_told(self) -> None:
        """A watchdog reads when the last step ended."""
        bench = Bench()
        assert bench.engine.statistics().last_step_at == 100.0
        bench.clock.advance(7)
        bench.engine.step()
        assert bench.engine.statistics().last_step_at == 107.0
        assert bench.engine.statistics().steps == 1

    def test_a_step_is_seen_while_it_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench()
        seen: list[EngineStatistics] = []
        compute = bench.runner.prefill

        def watched_prefill(tokens: Items[int], cache: FakeState) -> None:
            seen.append(bench.engine.statistics())
            compute(tokens, cache)

        monkeypatch.setattr(bench.runner, "prefill", watched_prefill)
        bench.put("a", [1, 2, 3, 4, 5])
        bench.engine.step()
        (first,) = seen
        (watched,) = first.running
        assert (watched.request, watched.computed_tokens) == ("a", 0)
        assert (first.steps, first.prefill_tokens) == (0, 0)

    def test_time_of_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps and what comes between them while requests run are counted, idle time is not."""
        bench = Bench(prefill_chunk=4)
        compute = bench.runner.prefill

        def slow_prefill(tokens: Items[int], cache: FakeState) -> None:
            bench.clock.advance(2)
            compute(tokens, cache)

        monkeypatch.setattr(bench.runner, "prefill", slow_prefill)
        bench.clock.advance(50)
        bench.put("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
        bench.engine.step()
        assert bench.engine.statistics().step_seconds == 2
        bench.clock.advance(1)
        bench.drain()
        assert bench.engine.statistics().step_seconds == 7
        bench.clock.advance(50)
        bench.engine.step()
        assert bench.engine.statistics().step_seconds == 7


class TestCancel:
    """Ending what is no longer wanted."""

    def test_a_waiting_request_leaves_without_a_trace(self) -> None:
        """It gets no state; who waits behind it in the conversation is next."""
        bench = Bench()
        bench.put("a", [1, 2], conversation="c")
        bench.engine.step()
        waiting = bench.put("b", [3, 4], conversation="c")
        bench.put("c", [5, 6], conversation="c")
        assert bench.cancel(waiting)
        bench.drain()
        assert "b" not in bench.events
        assert len(bench.runner.fed) == 2
        assert bench.tokens("c") == reference([5, 6], 4)[0]
        bench.check_idle()

    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
    def test_a_running_request_ends_at_the_next_step(self, steps: int) -> None:
        """In prefill or decode: its state is freed, nothing more computed, the next one runs."""
        bench = Bench(prefill_chunk=2)
        running = bench.put("a", [1, 2, 3, 4, 5, 6], conversation="c", max_tokens=9)
        bench.put("b", [7, 8], conversation="c")
        for _ in range(steps):
            bench.engine.step()
        fed = list(bench.runner.fed[0])
        in_prefill = running.status is SequenceStatus.PREFILL
        assert in_prefill == (steps <= 2)
        assert not bench.cancel(running)
        bench.engine.step()
        assert bench.end("a") == Finished(FinishReason.CANCELLED)
        assert bench.runner.fed[0] == fed
        assert bench.runner.live_states == 1
        bench.drain()
        assert bench.tokens("b") == reference([7, 8], 4)[0]
        bench.check_idle()


class TestShortOfMemory:
    """A request that needs what the disk tier holds."""

    def test_a_disk_that_writes_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However slowly; ten seconds without a write are the end."""
        bench, written = Bench(), [0]
        monkeypatch.setattr(KVCacheManager, "writing", property(lambda _: True))
        monkeypatch.setattr(Paging, "writes", property(lambda _: written[0]))
        monkeypatch.setattr(MemoryPlanner, "admits", lambda *_: False)
        bench.put("a", [1])
        for _ in range(5):
            assert bench.engine.step() is Pace.WAITING
            bench.clock.advance(9)
            written[0] += 1
        assert bench.engine.step() is Pace.WAITING
        bench.clock.advance(9)
        assert bench.engine.step() is Pace.WAITING
        assert "a" not in bench.events
        bench.clock.advance(2)
        bench.drain()
        assert bench.end("a").reason is FinishReason.ERROR
        bench.check_idle()


class TestDeadlines:
    """Requests whose time is over."""

    def test_a_waiting_request_expires(self) -> None:
        """It is told that it waited too long; the running one and the next go on."""
        bench = Bench()
        bench.put("running", [1, 2])
        bench.engine.step()
        bench.put("late", [3, 4], deadline=105)
        bench.put("patient", [5, 6], deadline=106)
        bench.clock.advance(5)
        bench.engine.step()
        end = bench.end("late")
        assert end.reason is FinishReason.ERROR
        assert isinstance(end.error, DeadlineExceededError)
        assert "waited" in str(end.error)
        assert bench.events["late"] == [end]
        bench.drain()
        assert bench.end("running").reason is FinishReason.LENGTH
        assert bench.end("patient").reason is FinishReason.LENGTH
        bench.check_idle()

    @pytest.mark.parametrize("steps", [1, 4])
    def test_a_running_request_is_cut_off(self, steps: int) -> None:
        """In prefill or decode: what it had is kept, its state is freed, the next one runs."""
        bench = Bench(prefill_chunk=2)
        late = bench.put("late", [1, 2, 3, 4, 5], conversation="c", max_tokens=9, deadline=105)
        bench.put("next", [6], conversation="c")
        for _ in range(steps):
            bench.engine.step()
        bench.clock.advance(4.999)
        bench.engine.step()
        tokens = list(late.output)
        assert not isinstance(bench.events["late"][-1], Finished)
        bench.clock.advance(0.001)
        bench.drain()
        end = bench.end("late")
        assert end.reason is FinishReason.ERROR
        assert isinstance(end.error, DeadlineExceededError)
        assert "ran" in str(end.error)
        assert bench.tokens("late") == tokens
        assert bench.tokens("next") == reference([6], 4)[0]
        bench.check_idle()

    def test_a_request_that_ends_in_time_is_not_late(self) -> None:
        """A deadline that passes after the last token changes nothing."""
        bench = Bench()
        bench.put("a", [1], max_tokens=1, deadline=105)
        bench.engine.step()
        bench.clock.advance(50)
        bench.drain()
        assert bench.end("a") == Finished(FinishReason.LENGTH)


def errors() -> list[BaseException]:
    """List what a model may raise: its own faults, and a panic in native code."""
    return [ValueError("broken weights"), PanicError("index out of bounds")]


class TestFaults:
    """Faults of one request end that request only."""

    @pytest.mark.parametrize("error", errors())
    @pytest.mark.parametrize("position", range(9))
    def test_a_fault_at_any_position_ends_that_request_only(
        self, position: int, error: BaseException
    ) -> None:
        """Its client hears why; three neighbours and its conversation's next are unharmed."""
        bench = Bench(max_batch=4, prefill_chunk=2)
        prompts = {name: [number, 2, 3, 4, 5] for number, name in enumerate("abcd")}
        bench.runner.fail_at(prompts["b"], position, error)
        with capture_logs() as logs:
            for name, prompt in prompts.items():
                bench.put(name, prompt, max_tokens=5)
            bench.put("next", [9, 9], conversation="b")
            bench.drain()
        end = bench.end("b")
        assert end.reason is FinishReason.ERROR
        assert isinstance(end.error, ComputationError)
        assert type(error).__name__ in str(end.error)
        assert str(error) in str(end.error)
        assert bench.tokens("b") == reference(prompts["b"], 5)[0][: max(0, position - 4)]
        assert [log["request"] for log in logs if log["event"] == "request failed"] == ["b"]
        for name in "acd":
            assert bench.tokens(name) == reference(prompts[name], 5)[0]
            assert bench.end(name) == Finished(FinishReason.LENGTH)
        assert bench.tokens("next") == reference([9, 9], 4)[0]
        bench.check_idle()

    @pytest.mark.parametrize("error", errors())
    def test_a_fault_while_a_state_is_made_ends_that_request_only(
        self, error: BaseException
    ) -> None:
        """A request that could not even start ends in words, and frees its conversation."""
        bench = Bench(max_batch=2)
        bench.runner.fail_next_state(error)
        bench.put("a", [1, 2], conversation="c")
        bench.put("b", [3, 4], conversation="c")
        bench.put("d", [5, 6])
        bench.drain()
        assert isinstance(bench.end("a").error, ComputationError)
        assert len(bench.events["a"]) == 1
        assert bench.tokens("b") == reference([3, 4], 4)[0]
        assert bench.tokens("d") == reference([5, 6], 4)[0]
        assert bench.engine.statistics().prompt_tokens == 4
        bench.check_idle()

    @pytest.mark.parametrize("error", errors())
    @pytest.mark.parametrize("late", [True, False])
    def test_a_fault_while_a_state_is_kept_costs_the_state_only(
        self, error: BaseException, monkeypatch: pytest.MonkeyPatch, *, late: bool
    ) -> None:
        """The request ends as it would have, its lease is closed, and the next one runs."""
        bench = Bench()
        end, closed = bench.engine._kv_cache.end, list[Sequence]()

        def fail_to_keep(sequence: Sequence, *, keep: bool) -> None:
            if keep:
                raise error
            end(sequence, keep=False)
            closed.append(sequence)

        monkeypatch.setattr(bench.engine._kv_cache, "end", fail_to_keep)
        ending = bench.put("a", [1, 2, 3], conversation="c", deadline=105)
        bench.put("b", [4, 5], conversation="c")
        bench.engine.step()
        if late:
            bench.clock.advance(5)
        bench.drain()
        if late:
            assert isinstance(bench.end("a").error, DeadlineExceededError)
        else:
            assert bench.end("a") == Finished(FinishReason.LENGTH)
            assert bench.tokens("a") == reference([1, 2, 3], 4)[0]
        assert ending in closed
        assert bench.tokens("b") == reference([4, 5], 4)[0]
        bench.check_idle()

    def test_a_call_that_fails_for_several_is_retried_for_each(self) -> None:
        """Only the sequence that fails by itself ends; the others' answers go on."""
        bench = Bench(max_batch=4, prefill_chunk=16)
        prompts = {name: [number, 2, 3] for number, name in enumerate("abc")}
        run, fault = bench.runner.run, ValueError("no")
        bench.runner.fail_at(prompts["b"], 4, fault)

        def failing(plan: FakePlan, caches: Items[FakeState], tokens: Items[int]) -> FakeOutput:
            output = run(plan, caches, tokens)
            if output.errors:
                raise fault
            return output

        bench.runner.run = failing  # type: ignore[method-assign]
        with capture_logs() as logs:
            for name, prompt in prompts.items():
                bench.put(name, prompt, max_tokens=6)
            bench.drain()
        assert isinstance(bench.end("b").error, ComputationError)
        assert bench.tokens("b") == reference(prompts["b"], 2)[0]
        for name in "ac":
            assert bench.tokens(name) == reference(prompts[name], 6)[0]
            assert bench.end(name) == Finished(FinishReason.LENGTH)
        said = [line["event"] for line in logs if line["log_level"] in {"warning", "error"}]
        assert said == ["the call of several sequences failed", "request failed"]
        bench.check_idle()

    def test_a_call_that_fails_for_ever_is_retried_a_few_times(self) -> None:
        """Each request ends in words."""
        bench = Bench(max_batch=4, prefill_chunk=16)

        def failing(*_: Any) -> FakeOutput:
            raise ValueError("no")

        bench.runner.run = failing  # type: ignore[method-assign, assignment]
        for number in range(3):
            bench.put(str(number), [number, 2, 3], max_tokens=9)
        with capture_logs():
            bench.drain()
        for number in range(3):
            assert isinstance(bench.end(str(number)).error, ComputationError)
            assert len(bench.tokens(str(number))) <= 3
        bench.check_idle()


class TestWhenEventsArePublished:
    """Once the next step is launched, and at a step's end."""

    @staticmethod
    def watched(*, overlaps: bool = True) -> tuple["Bench", list[str]]:
        """Note launches and tokens that are published, in their order."""
        bench, seen = Bench(max_batch=4), list[str]()
        bench.runner.overlaps = overlaps
        run, prefill, publish = bench.runner.run, bench.runner.prefill, bench.engine._publish

        def launched(*rest: Any) -> Any:
            seen.append("launched")
            return run(*rest)

        def computed(*rest: Any) -> Any:
            seen.append("prompt")
            return prefill(*rest)

        def published(events: Any) -> None:
            events = list(events)
            seen.extend("start" for _, event in events if isinstance(event, Started))
            seen.extend("token" for _, event in events if isinstance(event, TokenEvent))
            seen.extend("end" for _, event in events if isinstance(event, Finished))
            publish(events)

        bench.runner.run = launched  # type: ignore[method-assign, assignment]
        bench.runner.prefill = computed  # type: ignore[method-assign, assignment]
        bench.engine._publish = published
        return bench, seen

    def test_tokens_are_when_the_next_step_is_launched(self) -> None:
        """The first at once, and the last where no step follows."""
        bench, seen = self.watched()
        bench.put("a", [1, 2, 3], max_tokens=4)
        bench.drain()
        assert seen == [
            *("start", "prompt", "token"),
            "launched",
            *("launched", "token"),
            *("launched", "token", "token", "end"),
        ]

    def test_all_are_before_a_prompts_call(self) -> None:
        """It takes long."""
        bench, seen = self.watched()
        bench.put("a", [1], max_tokens=30)
        for _ in range(4):
            bench.engine.step()
        del seen[:]
        bench.put("b", [2] * 6, max_tokens=2)
        bench.engine.step()
        assert seen == ["launched", "start", "token", "token", "prompt"]

    def test_what_came_before_a_fault_is_not_lost(self) -> None:
        """The step that fails publishes it, and the ends of those at work."""
        bench, seen = self.watched()
        bench.put("a", [1], max_tokens=30)
        bench.engine.step()
        del seen[:]
        bench.engine._plan = lambda _: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        bench.engine.step()
        assert seen == ["end"]

    def test_tokens_are_at_once_where_the_device_does_not_overlap(self) -> None:
        """Each step gives its own."""
        bench, seen = self.watched(overlaps=False)
        bench.put("a", [1, 2, 3], max_tokens=3)
        bench.drain()
        assert seen == ["start", "prompt", "token", *("launched", "token") * 2, "end"]
