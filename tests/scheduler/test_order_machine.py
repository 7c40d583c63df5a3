"""Admission, order, cancel, deadlines, quotas and reloads together, in any order of events."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from umbel.cachestore.ledger import Size
from umbel.scheduler.engine import Engine
from umbel.scheduler.errors import (
    DeadlineExceededError,
    QueueFullError,
    QuotaSpentError,
    UnavailableError,
)
from umbel.scheduler.fairness.entry import Priority
from umbel.scheduler.fairness.terms import Quotas, Terms
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent
from umbel.scheduler.sequence import Sequence, SequenceStatus
from umbel.scheduler.thread import Pace
from umbel.scheduler.times import Activity

from ..fakes import FakeClock, FakeRunner, make_request, no_reuse, reference

TENANTS, UNITS = "abc", "wxyz"
LONGEST_PROMPT, LONGEST_ANSWER = 8, 24
ROOMS = (100, 300, 1000)
"""Bytes of memory, of which a token takes one: in the least each runs alone."""

_STEPS = 3000


def _bounds(most: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, most)


class CountingQuotas(Quotas):
    """Notes what each tenant is charged in all."""

    def __init__(self, terms: dict[str, Terms]) -> None:
        super().__init__(terms.__getitem__)
        self.charged: Counter[str] = Counter()

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """Note it, and charge."""
        self.charged[tenant] += round(tokens)
        super().charge(tenant, tokens, now)


class Ask(NamedTuple):
    """A request: its unit and lengths in tokens."""

    unit: str
    parallel: int
    priority: Priority
    prompt: int
    answer: int


ASKS = st.builds(
    Ask,
    st.sampled_from(UNITS),
    st.integers(1, 3),
    st.sampled_from(Priority),
    st.integers(1, LONGEST_PROMPT),
    st.integers(1, LONGEST_ANSWER),
)


class Unit(NamedTuple):
    """Within which requests keep their order."""

    tenant: str
    name: str


class OrderMachine(RuleBasedStateMachine):
    """A real queue, scheduler and engine over a fake model, against a plain account."""

    @initialize(max_batch=st.integers(1, 4), room=st.sampled_from(ROOMS))
    def begin(self, max_batch: int, room: int) -> None:
        """Open the doors; nothing is bounded yet."""
        self.terms = dict.fromkeys(TENANTS, Terms())
        self.clock = FakeClock()
        self.quotas = CountingQuotas(self.terms)
        self.queue = ConversationQueue(20, self.terms.__getitem__, self.quotas, self.clock)
        self.runner = FakeRunner()
        unkept = no_reuse(self.runner, room)
        self.pool = unkept.kv_cache._cache.pool
        self.engine = Engine(
            self.runner,
            *unkept,
            self.queue,
            self._publish,
            eos_ids=frozenset(),
            prefill_chunk=3,
            max_batch=max_batch,
            clock=self.clock,
        )
        self.scheduler = self.engine._scheduler
        self.max_batch = max_batch
        self.accepted: dict[str, Sequence] = {}
        self.taken_out: set[str] = set()
        self.events: dict[str, list[Event]] = {}
        self.starts: dict[Unit, list[int]] = {}
        self.closed = False
        self.count = 0

    def _publish(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        for sequence, event in events:
            name = sequence.request.id
            self.events.setdefault(name, []).append(event)
            if isinstance(event, Started):
                self.starts.setdefault(unit_of(sequence), []).append(int(name))

    # -- what happens ----------------------------------------------------------------------

    @rule(
        tenant=st.sampled_from(TENANTS),
        asks=st.lists(ASKS, min_size=1, max_size=6),
        time=st.none() | st.integers(0, 60),
        patient=st.booleans(),
        steps=st.integers(0, 6),
    )
    def put(
        self, tenant: str, asks: list[Ask], time: int | None, steps: int, *, patient: bool
    ) -> None:
        """Requests come, and are let in or refused for the right reason; the engine goes on."""
        for ask in asks:
            self.count += 1
            request = msgspec.structs.replace(
                make_request(f"{self.count}", [1000 + self.count, *range(1, ask.prompt)]),
                tenant=tenant,
                unit=ask.unit,
                max_tokens=ask.answer,
                parallel=ask.parallel,
                priority=ask.priority,
                deadline=float("inf") if time is None else self.clock.now + time,
            )
            seconds = self._try(Sequence(request))
            if seconds and patient:
                self.clock.advance(seconds)
                assert not self._try(Sequence(request)), "it was told when to come again"
        self.step(steps)

    def _try(self, sequence: Sequence) -> int:
        """Queue a request; returns in how many seconds it may come, if its quota is spent."""
        tenant = sequence.request.tenant
        most = self.terms[tenant].waiting
        waiting = [s for s in self.waiting() if s.request.tenant == tenant]
        full = len(self.waiting()) >= self.queue.limit
        full |= most is not None and len(waiting) >= most
        if self.closed or full:
            with pytest.raises(UnavailableError if self.closed else QueueFullError):
                self.queue.put(sequence)
            return 0
        try:
            self.queue.put(sequence)
        except QuotaSpentError as error:
            return error.retry_after or 0
        self.accepted[sequence.request.id] = sequence
        return 0

    @rule(
        tenant=st.sampled_from(TENANTS),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        running=_bounds(3),
        waiting=_bounds(4),
        tokens=_bounds(60),
    )
    def change_terms(
        self,
        tenant: str,
        weight: float,
        running: int | None,
        waiting: int | None,
        tokens: int | None,
    ) -> None:
        """The settings are loaded anew."""
        self.terms[tenant] = Terms(weight, running, waiting, tokens)

    @rule(limit=st.integers(1, 20))
    def change_limit(self, limit: int) -> None:
        """The daemon takes more or fewer."""
        self.queue.limit = limit

    def step(self, steps: int) -> None:
        """The engine works."""
        for _ in range(steps):
            self.one_step()

    @rule(room=st.sampled_from(ROOMS))
    def change_room(self, room: int) -> None:
        """There is more memory, or less."""
        self.pool.resize(Size(room, 1 << 40))

    @rule(steps=st.integers(1, 9))
    def work(self, steps: int) -> None:
        """Nobody comes for a while."""
        self.step(steps)

    def one_step(self) -> Pace:
        """Do a step; nobody has started in it beyond its tenant's bound, or was left too late."""
        before = {sequence.request.id for sequence in self.at_work()}
        pace = self.engine.step()
        for tenant, terms in self.terms.items():
            now = {s.request.id for s in self.at_work() if s.request.tenant == tenant}
            assert terms.running is None or len(now) <= terms.running or now <= before
        assert all(s.request.deadline > self.clock.now for s in self.waiting())
        return pace

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A client goes away, perhaps when its request has ended."""
        sequence = self.accepted[data.draw(st.sampled_from(sorted(self.accepted)))]
        sequence.cancelled = True
        if self.queue.remove(sequence.request.id) is not None:
            self.taken_out.add(sequence.request.id)

    @rule(seconds=st.sampled_from([0.5, 3, 30]))
    def pass_time(self, seconds: float) -> None:
        """Deadlines come near, and quotas refill."""
        self.clock.advance(seconds)

    @precondition(lambda self: self.count > 30 and not self.closed)
    @rule()
    def close(self) -> None:
        """The daemon stops: those that never ran are handed out."""
        new = [s for s in self.waiting() if s.status is SequenceStatus.WAITING]
        assert {s.request.id for s in self.queue.close()} == {s.request.id for s in new}
        self.taken_out |= {s.request.id for s in new}
        self.closed = True

    # -- what is always so -----------------------------------------------------------------

    def at_work(self) -> list[Sequence]:
        """Those that run, or lack the memory to."""
        return [*self.scheduler.running, *self.scheduler.preempted]

    def waiting(self) -> list[Sequence]:
        """Those that were let in, are neither at work nor have ended, the oldest first."""
        there = {sequence.request.id for sequence in self.at_work()} | self.taken_out
        return [s for name, s in self.accepted.items() if name not in there and not self.end(name)]

    def end(self, name: str) -> Finished | None:
        """How a request ended, if it has."""
        last = self.events[name][-1] if name in self.events else None
        return last if isinstance(last, Finished) else None

    @invariant()
    def everybody_is_in_one_place(self) -> None:
        """The queue, the order and the scheduler say the same of who waits and who runs."""
        assert len(self.queue) == len(self.waiting())
        assert self.queue.running == len(self.at_work())
        assert len(self.scheduler.running) <= self.max_batch
        for which, there in (("waiting", self.waiting()), ("running", self.at_work())):
            found = {
                name: count
                for name, tenant in self.queue._order._tenants.items()
                if (count := getattr(tenant, which))
            }
            assert found == Counter(sequence.request.tenant for sequence in there)

    @invariant()
    def each_ends_at_most_once_and_last(self) -> None:
        """It starts once, whatever it yields to, and hears nothing after its end."""
        for name, events in self.events.items():
            assert name not in self.taken_out or not self.end(name)
            assert not any(isinstance(event, Finished) for event in events[:-1])
            assert not any(isinstance(event, Started) for event in events[1:])

    @invariant()
    def units_keep_their_order(self) -> None:
        """First in, first out, so many at a time; and what waits for others says so."""
        assert all(numbers == sorted(numbers) for numbers in self.starts.values())
        running = Counter(map(unit_of, self.at_work()))
        for unit, count in running.items():
            assert count <= max(s.request.parallel for s in self.at_work() if unit_of(s) == unit)
        heads: set[Unit] = set()
        for sequence in self.waiting():
            unit = unit_of(sequence)
            behind = unit in heads or running[unit] >= sequence.request.parallel
            heads.add(unit)
            assert sequence.times is not None
            assert behind == (sequence.times.activity is Activity.CONVERSATION)
            assert sequence.times.activity.is_wait

    # -- the end ---------------------------------------------------------------------------

    def teardown(self) -> None:
        """With time all are served to their right ends, and nothing is left of them."""
        if not hasattr(self, "engine"):
            return
        for _ in range(_STEPS):
            pace = self.one_step()
            if pace is Pace.IDLE:
                break
            if pace is Pace.WAITING:
                self.clock.advance(10)
        assert pace is Pace.IDLE, "somebody waits for ever"
        for name in self.accepted.keys() - self.taken_out:
            self.check_end(name)
        self.check_charges()
        self.clock.advance(1e6)  # until all quotas are full again
        assert self.queue.offers() == []
        order = self.queue._order
        for left in (order.held, self.queue._claimed, self.queue._waiting):
            assert not left
        for gone in (order._tenants, order._waiting, order._running, order._accounts._ready):
            assert not gone
        assert self.runner.live_states == 0

    def check_end(self, name: str) -> None:
        """It was served whole, unless its client or its time was gone."""
        sequence, end = self.accepted[name], self.end(name)
        assert end is not None, "it was lost"
        answer, _ = reference(sequence.request.prompt, sequence.request.max_tokens)
        tokens = [e.token for e in self.events[name] if isinstance(e, TokenEvent)]
        if end.reason is FinishReason.CANCELLED:
            assert sequence.cancelled
        elif end.reason is FinishReason.ERROR:
            assert isinstance(end.error, DeadlineExceededError)
            assert sequence.request.deadline <= self.clock.now
        else:
            assert end == Finished(FinishReason.LENGTH)
            assert tokens == answer
        assert tokens == answer[: len(tokens)]

    def check_charges(self) -> None:
        """What was served whole is charged once, and nothing more than was asked for."""
        least, most = Counter[str](), Counter[str]()
        for unit, numbers in self.starts.items():
            for sequence in (self.accepted[f"{number}"] for number in numbers):
                request, end = sequence.request, self.end(sequence.request.id)
                whole = len(request.prompt) - 1 + request.max_tokens
                most[unit.tenant] += whole
                if end is not None and end.reason is FinishReason.LENGTH:
                    least[unit.tenant] += whole
        for tenant in TENANTS:
            assert least[tenant] <= self.quotas.charged[tenant] <= most[tenant]


def unit_of(sequence: Sequence) -> Unit:
    """The unit of a request."""
    return Unit(sequence.request.tenant, sequence.request.unit or sequence.request.conversation)


def test_nobody_is_lost_served_twice_or_left_waiting() -> None:
    """Random schedules of requests, cancellations, time, quotas and new settings."""
    run_state_machine_as_test(
        OrderMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )
