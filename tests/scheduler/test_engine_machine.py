"""The engine's specification: any schedule of requests, cancellations, faults and memory.

Invariants, with the methods that assert them:

1. Each request ends once, by a `Finished` that is its last event, and starts once
   (`each_ends_once_and_last`).
2. What it hears is the beginning of its own answer, and the whole of it unless its client, its time
   or its own computation failed; another request's fault never touches it (`check_end`).
3. A state is fed the tokens of one request, each once, in order, also after a restart
   (`states_are_fed_in_order`).
4. A state lives as long as its sequence runs; no more run than may, one of a conversation
   (`states_belong_to_running_sequences`).
5. Events are published by a step, and by nothing else (`publish`).
6. A step leaves the tokens of a lone decode, and a frozen summary: no token waits for a chunk, what
   was reserved is given back, and the engine keeps the same parts (`one_step`).
7. Requests of a conversation start in their order (`teardown`).
8. The counters are those of what was published and computed (`check_statistics`).
9. The engine comes to rest, and nothing is left (`teardown`).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from structlog.testing import capture_logs

from umbel.cachestore.ledger import Size
from umbel.scheduler.errors import ComputationError, DeadlineExceededError
from umbel.scheduler.lifecycle import StepSummary
from umbel.scheduler.order import Priority
from umbel.scheduler.request import Event, Finished, FinishReason, Started
from umbel.scheduler.sequence import Sequence

from ..fakes import busy, next_token, reference
from .test_engine import Bench

EOS = range(10)
MAX_BATCH = 3
ROOMS = (40, 60, 1 << 40)
"""Bytes of memory, of which a token takes one: in the least each request runs alone."""


class Ask(NamedTuple):
    """A request: its lengths in tokens, the seconds that it has, the token at which it fails."""

    conversation: str
    tenant: str
    priority: Priority
    length: int
    max_tokens: int
    time: int | None
    fault: int | None


ASKS = st.builds(
    Ask,
    st.sampled_from("abcd"),
    st.sampled_from("xyz"),
    st.sampled_from(Priority),
    st.integers(1, 10),
    st.integers(1, 25) | st.just(25),
    st.none() | st.none() | st.integers(0, 9),
    st.none() | st.none() | st.integers(0, 30),
)


class EngineMachine(RuleBasedStateMachine):
    """An engine over a fake model, against what any engine must do."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(max_batch=MAX_BATCH, prefill_chunk=3, eos_ids=EOS)
        self.engine = self.bench.engine
        self.heard, self.engine._publish = self.engine._publish, self.publish
        self.sequences: dict[str, Sequence] = {}
        self.faults: dict[str, int] = {}
        self.harmed: set[str] = set()  # at work when a call or a step failed for several
        self.removed: set[str] = set()
        self.stepping = False
        self.parts = self.kept()

    def publish(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        """Take events, in a step only."""
        assert self.stepping
        self.heard(events)

    def kept(self) -> dict[str, int]:
        """Say which parts the engine keeps from step to step."""
        return {name: id(part) for name, part in vars(self.engine).items() if name != "_last"}

    # -- what happens ----------------------------------------------------------------------

    @rule(asks=st.lists(ASKS, min_size=1, max_size=4), steps=st.integers(0, 12))
    def put(self, asks: list[Ask], steps: int) -> None:
        """Queue requests, some of which will fail or run out of time."""
        for ask in asks:
            name = str(len(self.sequences))
            prompt = [1000 + len(self.sequences), *range(1, ask.length)]  # its own first token
            if ask.fault is not None:
                self.faults[name] = ask.fault
                self.bench.runner.fail_at(prompt, ask.fault, ValueError(name))
            self.sequences[name] = self.bench.put(
                name,
                prompt,
                conversation=ask.conversation,
                max_tokens=ask.max_tokens,
                deadline=float("inf") if ask.time is None else self.bench.clock.now + ask.time,
                tenant=ask.tenant,
                priority=ask.priority,
            )
        self.step(steps)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        """Let the engine work."""
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> object:
        """Do a step, and look at what it leaves."""
        chunks = len(self.bench.runner.chunks)
        self.stepping = True
        pace = self.engine.step()
        self.stepping = False
        pending = self.engine._decoder.pending
        assert not (pending and len(self.bench.runner.chunks) > chunks)
        assert pending or not self.engine._memory.use().transient
        assert self.kept() == self.parts
        assert type(self.engine._last) is StepSummary
        return pace

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a request, wherever it is."""
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        if self.bench.cancel(self.sequences[name]):
            self.removed.add(name)

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        """Let time pass."""
        self.bench.clock.advance(seconds)

    @rule(room=st.sampled_from(ROOMS))
    def change_room(self, room: int) -> None:
        """There is more memory, or less."""
        self.engine._kv_cache.cache.pool.resize(Size(room, 1 << 40))

    @rule(name=st.sampled_from(["run", "sample", "plan"]))
    def break_call(self, name: str) -> None:
        """The model fails for all of a call once, or a step does, and goes on."""
        runner = self.bench.runner
        if name in vars(runner):
            return
        works = getattr(runner, name)

        def fails(*_: Any, **__: Any) -> Any:
            setattr(runner, name, works)
            vars(runner).pop(name)
            self.harmed |= {s.request.id for s in self.engine._scheduler.at_work}
            raise ValueError("planted")

        vars(runner)[name] = fails

    # -- what is always so -----------------------------------------------------------------

    @invariant()
    def each_ends_once_and_last(self) -> None:
        """Nothing follows a `Finished`, and a started request is a taken one."""
        for name, events in self.bench.events.items():
            assert name not in self.removed or not isinstance(events[-1], Finished)
            assert not any(isinstance(event, Finished) for event in events[:-1])
            assert not any(isinstance(event, Started) for event in events[1:])

    @invariant()
    def states_belong_to_running_sequences(self) -> None:
        """A state lives exactly as long as its sequence runs."""
        scheduler = self.engine._scheduler
        assert self.bench.runner.live_states == len(scheduler.running) <= MAX_BATCH
        places = [(s.request.tenant, s.request.conversation) for s in scheduler.at_work]
        assert len(places) == len(set(places))
        assert busy(self.bench.queue) == set(places)

    @invariant()
    def states_are_fed_in_order(self) -> None:
        """The model sees a request's prompt and its answer, and a token ahead at most."""
        for fed in self.bench.runner.fed:
            if fed:
                whole = list(self.sequences[str(fed[0] - 1000)].request.prompt)
                while len(whole) < len(fed):
                    whole.append(next_token(whole))
                assert fed == whole[: len(fed)]

    # -- the end ---------------------------------------------------------------------------

    def teardown(self) -> None:
        """Everyone who was not removed has ended, for a reason that is true."""
        for _ in range(2000):
            if not self.one_step():
                break
        self.bench.check_idle()
        assert set(self.sequences) - set(self.bench.events) <= self.removed
        for name in self.sequences.keys() - self.removed:
            self.check_end(name)
        self.check_statistics()
        starts: dict[tuple[str, str], list[int]] = {}
        for name, event in self.bench.order:
            if isinstance(event, Started):
                request = self.sequences[name].request
                starts.setdefault((request.tenant, request.conversation), []).append(int(name))
        assert all(order == sorted(order) for order in starts.values())

    def check_end(self, name: str) -> None:
        """Compare one request's end with what was done to it."""
        sequence, end = self.sequences[name], self.bench.end(name)
        prompt = sequence.request.prompt
        answer, reason = reference(prompt, sequence.request.max_tokens, EOS)
        fed = len(prompt) + len(answer) - (reason is FinishReason.LENGTH)
        fails = self.faults.get(name, fed) < fed
        tokens = self.bench.tokens(name)
        assert tokens == answer[: len(tokens)]
        if end.reason is FinishReason.CANCELLED:
            assert sequence.cancelled
        elif isinstance(end.error, DeadlineExceededError):
            assert sequence.request.deadline <= self.bench.clock.now
        elif isinstance(end.error, ComputationError):
            assert fails or name in self.harmed
            if name not in self.harmed:
                assert len(tokens) == max(0, self.faults[name] - len(prompt) + 1)
        else:
            assert not fails
            assert end == Finished(reason)
            assert tokens == answer

    def check_statistics(self) -> None:
        """Compare the counters with what was published and computed."""
        seen = self.engine.statistics()
        started = [n for n, e in self.bench.order if isinstance(e, Started)]
        assert seen.prompt_tokens == sum(self.sequences[n].num_prompt_tokens for n in started)
        assert seen.generation_tokens == sum(len(self.bench.tokens(n)) for n in started)
        assert seen.prefill_tokens == sum(end - start for start, end in self.bench.runner.chunks)


def test_every_request_ends_once_whatever_happens() -> None:
    """Over random schedules each request ends once, last, truly, and leaves nothing behind."""
    with capture_logs():  # writing out every traceback takes longer than all the rest
        run_state_machine_as_test(
            EngineMachine,
            settings=settings(max_examples=2 * settings().max_examples, stateful_step_count=40),
        )
