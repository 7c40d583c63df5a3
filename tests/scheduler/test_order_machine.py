"""Admission, order, cancel, deadlines, quotas and reloads together, in any order of events.

Two models are served, with a queue each; what is agreed with a tenant holds for both together.
Invariants, with the methods that assert them:

1. A request waits, runs, lacks memory or has ended; queue, order, scheduler and the counts of
   tenants agree (`everybody_is_in_one_place`).
2. A request starts once and ends at most once, and its end is its last event
   (`each_ends_at_most_once_and_last`).
3. Requests of a unit start first in, first out, so many at a time as they say
   (`units_keep_their_order`).
4. No more requests of a tenant run than may, with all models together, and none is refused or let
   in against its bounds (`one_step`, `_try`).
5. A model whose request may go on, since a request of another model ended, is woken (`one_step`).
6. `/status` says what each request waits for (`units_keep_their_order`,
   `who_waits_for_its_tenant_says_so`), and the seconds of each activity are those that it had
   (`times_are_what_they_did`).
7. A tenant that could start a request has no less service than the floor, as long as no charge is
   taken back (`time_without_requests_earns_nothing`).
8. In the end each request was served whole, or its client or its time was gone; what was served is
   charged once, and nothing is kept (`teardown`).
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import zip_longest
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
from umbel.scheduler.order import Priority
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent
from umbel.scheduler.sequence import Sequence, SequenceStatus
from umbel.scheduler.tenants import Quotas, TenantUse, Terms
from umbel.scheduler.thread import Pace
from umbel.scheduler.times import Activity

from ..fakes import FakeClock, FakeRunner, make_request, no_reuse, reference

TENANTS, UNITS, MODELS = "abc", "wxyz", 2
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
    """A request: its model, its unit and lengths in tokens."""

    model: int
    unit: str
    parallel: int
    priority: Priority
    prompt: int
    answer: int


ASKS = st.builds(
    Ask,
    st.integers(0, MODELS - 1),
    st.sampled_from(UNITS),
    st.integers(1, 3),
    st.sampled_from(Priority),
    st.integers(1, LONGEST_PROMPT),
    st.integers(1, LONGEST_ANSWER),
)


class Unit(NamedTuple):
    """Within which requests keep their order."""

    model: int
    tenant: str
    name: str


class Model:
    """A real queue, scheduler and engine over a fake model, as one of several.

    Attributes:
        pace: of its next step, as the thread would have it.
    """

    def __init__(self, machine: "OrderMachine", number: int, max_batch: int, room: int) -> None:
        self.number = number
        self.queue = ConversationQueue(20, machine.use, machine.clock, machine.wake)
        self.runner = FakeRunner()
        unkept = no_reuse(self.runner, room)
        self.pool = unkept.kv_cache.cache.pool
        self.engine = Engine(
            *unkept,
            self.queue,
            partial(machine.publish, self),
            eos_ids=frozenset(),
            prefill_chunk=3,
            max_batch=max_batch,
            clock=machine.clock,
        )
        self.scheduler = self.engine._scheduler
        self.pace = Pace.BUSY

    def at_work(self) -> list[Sequence]:
        """Those that run, or lack the memory to."""
        return [*self.scheduler.running, *self.scheduler.preempted]


class OrderMachine(RuleBasedStateMachine):
    """Models that share what tenants may use, against a plain account."""

    @initialize(
        max_batch=st.integers(1, 4), room=st.sampled_from(ROOMS), running=st.lists(_bounds(3))
    )
    def begin(self, max_batch: int, room: int, running: list[int | None]) -> None:
        """Open the doors; nothing but what runs is bounded yet."""
        bounds = zip_longest(TENANTS, running[: len(TENANTS)])
        self.terms = {tenant: Terms(running=most) for tenant, most in bounds}
        self.clock = FakeClock()
        self.use = TenantUse(self.terms.__getitem__)
        self.use.quotas = self.quotas = CountingQuotas(self.terms)
        self.models: list[Model] = []
        self.max_batch, self.room, self.limit = max_batch, room, 20
        for number in range(MODELS):
            self.models.append(Model(self, number, max_batch, room))
        self.accepted: dict[str, Sequence] = {}
        self.home: dict[str, Model] = {}
        self.taken_out: set[str] = set()
        self.met: set[str] = set()
        self.events: dict[str, list[Event]] = {}
        self.starts: dict[Unit, list[int]] = {}
        self.did: dict[str, dict[Activity, float]] = {}
        self.closed = False
        self.count = 0

    def wake(self) -> None:
        """Each engine does a step."""
        for model in self.models:
            model.pace = Pace.BUSY

    def publish(self, model: Model, events: Iterable[tuple[Sequence, Event]]) -> None:
        """Note what requests hear."""
        for sequence, event in events:
            name = sequence.request.id
            self.events.setdefault(name, []).append(event)
            if isinstance(event, Started):
                self.starts.setdefault(unit_of(model, sequence), []).append(int(name))

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
            model = self.models[ask.model]
            seconds = self._try(model, Sequence(request))
            if seconds and patient:
                self.advance(seconds)
                assert not self._try(model, Sequence(request)), "it was told when to come again"
        self.step(steps)

    def _try(self, model: Model, sequence: Sequence) -> int:
        """Queue a request; returns in how many seconds it may come, if its quota is spent."""
        tenant = sequence.request.tenant
        most = self.terms[tenant].waiting
        waiting = [s for s in self.waiting() if s.request.tenant == tenant]
        full = len(self.waiting()) >= self.limit
        full |= most is not None and len(waiting) >= most
        if not self.closed:
            self.met.add(tenant)
        full |= len(self.met) > 1 and len(waiting) >= 8 * (self.limit - len(self.waiting()))
        if self.closed or full:
            with pytest.raises(UnavailableError if self.closed else QueueFullError):
                model.queue.put(sequence)
            return 0
        try:
            model.queue.put(sequence)
        except QuotaSpentError as error:
            return error.retry_after or 0
        self.accepted[sequence.request.id], self.home[sequence.request.id] = sequence, model
        self.wake()
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
        """The settings are loaded again."""
        self.terms[tenant] = Terms(weight, running, waiting, tokens)
        self.use.terms_changed()

    @rule(limit=st.integers(1, 20))
    def change_limit(self, limit: int) -> None:
        """The daemon takes more or fewer."""
        self.limit = limit
        for model in self.models:
            model.queue.limit = limit

    def step(self, steps: int) -> None:
        """The engines work."""
        for _ in range(steps):
            self.turn()

    @rule(room=st.sampled_from(ROOMS))
    def change_room(self, room: int) -> None:
        """There is more memory, or less."""
        self.room = room
        for model in self.models:
            model.pool.resize(Size(room, 1 << 40))

    @rule(steps=st.integers(1, 9))
    def work(self, steps: int) -> None:
        """Time passes without requests."""
        self.step(steps)

    def turn(self) -> None:
        """Step each engine that has something to do, as the thread does."""
        for model in self.models:
            if model.pace is not Pace.IDLE:
                self.one_step(model)

    def one_step(self, model: Model) -> None:
        """Do a step; no request starts beyond its tenant's bound, or is left too late."""
        before = {sequence.request.id for sequence in self.at_work()}
        blocked = self.blocked()
        model.pace = Pace.IDLE
        pace = model.engine.step()
        order = [Pace.IDLE, Pace.WAITING, Pace.BUSY]
        model.pace = max(model.pace, pace, key=order.index)
        for tenant, terms in self.terms.items():
            now = {s.request.id for s in self.at_work() if s.request.tenant == tenant}
            assert terms.running is None or len(now) <= terms.running or now <= before
        for other, tenant in blocked - self.blocked():
            assert other is model or other.pace is Pace.BUSY, f"{tenant} has a place: it must hear"
        late = [s for s in self.waiting() if s.request.deadline <= self.clock.now]
        assert all(self.home[s.request.id] is not model for s in late)

    def blocked(self) -> set[tuple[Model, str]]:
        """Tenants that wait for a place at a model, and have none anywhere."""
        running = Counter(sequence.request.tenant for sequence in self.at_work())
        return {
            (self.home[sequence.request.id], tenant)
            for sequence in self.waiting()
            if (tenant := sequence.request.tenant)
            and (most := self.terms[tenant].running) is not None
            and running[tenant] >= most
        }

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A client goes away, perhaps when its request has ended."""
        sequence = self.accepted[data.draw(st.sampled_from(sorted(self.accepted)))]
        self._cancel(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        name = sequence.request.id
        sequence.cancelled = True
        if self.home[name].queue.remove(name) is not None:
            self.taken_out.add(name)
        self.wake()

    @precondition(lambda self: self.count > 15)
    @rule(number=st.integers(0, MODELS - 1))
    def unload(self, number: int) -> None:
        """A model is unloaded when its clients are gone, and nothing of it is left."""
        gone = self.models[number]
        for name, sequence in self.accepted.items():
            if self.home[name] is gone and name not in self.taken_out and not self.end(name):
                self._cancel(sequence)
                self.taken_out.add(name)
        gone.queue.leave()
        self.models[number] = Model(self, number, self.max_batch, self.room)
        self.models[number].queue.limit = self.limit
        if self.closed:
            self.models[number].queue.close()

    @rule(seconds=st.sampled_from([0.5, 3, 30]))
    def pass_time(self, seconds: float) -> None:
        """Deadlines come near, and quotas refill."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass, and note what each request does in it."""
        for name, sequence in self.accepted.items():
            assert sequence.times is not None
            did, activity = self.did.setdefault(name, {}), sequence.times.activity
            did[activity] = did.get(activity, 0.0) + seconds
        self.clock.advance(seconds)

    @precondition(lambda self: self.count > 30 and not self.closed)
    @rule()
    def close(self) -> None:
        """The daemon stops: those that never ran are handed out."""
        new = [s for s in self.waiting() if s.status is SequenceStatus.WAITING]
        closed = {s.request.id for model in self.models for s in model.queue.close()}
        assert closed == {s.request.id for s in new}
        self.taken_out |= {s.request.id for s in new}
        self.closed = True

    # -- what is always so -----------------------------------------------------------------

    def at_work(self) -> list[Sequence]:
        """Those that run, or lack the memory to, with any model."""
        return [sequence for model in self.models for sequence in model.at_work()]

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
        for model in self.models:
            waiting = [s for s in self.waiting() if self.home[s.request.id] is model]
            assert len(model.queue) == model.queue._places.waiting == len(waiting)
            assert len(model.queue._claimed) == len(model.at_work())
            assert len(model.scheduler.running) <= self.max_batch
            places = model.queue._places
            for counted, there in (
                (places.waits, waiting),
                (places.runs, model.at_work()),
            ):
                assert counted == Counter(sequence.request.tenant for sequence in there)
        assert self.use.waiting == len(self.waiting())

    @invariant()
    def each_ends_at_most_once_and_last(self) -> None:
        """It starts once, whatever it yields to, and hears nothing after its end."""
        for name, events in self.events.items():
            assert name not in self.taken_out or not self.end(name)
            assert not any(isinstance(event, Finished) for event in events[:-1])
            assert not any(isinstance(event, Started) for event in events[1:])

    @invariant()
    def units_keep_their_order(self) -> None:
        """First in, first out, so many at a time; and `/status` says what waits for others."""
        self.look()
        assert all(numbers == sorted(numbers) for numbers in self.starts.values())
        running = Counter(map(self.unit_of, self.at_work()))
        for unit, count in running.items():
            there = [s for s in self.at_work() if self.unit_of(s) == unit]
            assert count <= max(s.request.parallel for s in there)
        heads: set[Unit] = set()
        for sequence in self.waiting():
            unit = self.unit_of(sequence)
            behind = unit in heads or running[unit] >= sequence.request.parallel
            heads.add(unit)
            assert sequence.times is not None
            assert behind == (sequence.times.activity is Activity.CONVERSATION)
            assert sequence.times.activity.is_wait

    def look(self) -> None:
        """Ask for the status of all models, as a client does."""
        for model in self.models:
            model.queue.requests(1000)

    def unit_of(self, sequence: Sequence) -> Unit:
        """The unit of a request."""
        return unit_of(self.home[sequence.request.id], sequence)

    @invariant()
    def who_waits_for_its_tenant_says_so(self) -> None:
        """Whichever model the others run with."""
        self.look()
        running = Counter(sequence.request.tenant for sequence in self.at_work())
        for sequence in self.waiting():
            tenant, queue = sequence.request.tenant, self.home[sequence.request.id].queue
            assert sequence.times is not None
            activity, most = sequence.times.activity, self.terms[tenant].running
            if activity is Activity.CONVERSATION:
                continue
            resumes = sequence.status is SequenceStatus.PREEMPTED
            held = tenant in queue._spent
            assert held or activity is not Activity.QUOTA
            assert not held or activity is Activity.QUOTA or resumes
            if not held:
                full = most is not None and running[tenant] >= most
                assert full == (activity is Activity.TENANT)

    @invariant()
    def time_without_requests_earns_nothing(self) -> None:
        """Neither for a tenant that was away, nor for one that had reached a bound."""
        if self.taken_out or any(self.end(name) for name in self.events):
            return  # what was charged for its prompt may have been taken back
        for model in self.models:
            order, queue = model.queue._order, model.queue
            for share in queue.claimants():
                assert share.service >= order._floor

    @invariant()
    def times_are_what_they_did(self) -> None:
        """For as long as a request said that it does something, it did."""
        for name, did in self.did.items():
            times = self.accepted[name].times
            assert times is not None
            seconds = times.seconds(self.clock.now)
            assert {each: passed for each, passed in seconds.items() if passed} == pytest.approx(
                did
            )

    # -- the end ---------------------------------------------------------------------------

    def teardown(self) -> None:
        """With time all are served to their right ends, and nothing is left of them."""
        if not hasattr(self, "models"):
            return
        for _ in range(_STEPS):
            self.turn()
            paces = {model.pace for model in self.models}
            if paces == {Pace.IDLE}:
                break
            if Pace.BUSY not in paces:
                self.advance(10)
        assert paces == {Pace.IDLE}, "a request waits for ever"
        for name in self.accepted.keys() - self.taken_out:
            self.check_end(name)
        self.check_charges()
        self.clock.advance(1e6)  # until all quotas are full again
        assert len(self.use._parts) == MODELS
        for model in self.models:
            self.check_empty(model)

    def check_empty(self, model: Model) -> None:
        """Nothing is left of what it served."""
        queue, order, places = model.queue, model.queue._order, model.queue._places
        assert queue.offers() == []
        for left in (
            queue._spent,
            queue._claimed,
            queue._waiting,
            places.runs,
            places.waits,
        ):
            assert not left
        assert not queue._found
        for gone in (order._tenants, order._waiting, order._running):
            assert not gone
        assert model.runner.live_states == 0

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
        """Requests that were served whole are charged once, and never for more than they asked."""
        least, most = Counter[str](), Counter[str]()
        for unit, numbers in self.starts.items():
            for sequence in (self.accepted[f"{number}"] for number in numbers):
                request, end = sequence.request, self.end(sequence.request.id)
                whole = len(request.prompt) + request.max_tokens
                most[unit.tenant] += whole
                if end is not None and end.reason is FinishReason.LENGTH:
                    least[unit.tenant] += whole
        for tenant in TENANTS:
            assert least[tenant] <= self.quotas.charged[tenant] <= most[tenant]


def unit_of(model: Model, sequence: Sequence) -> Unit:
    """The unit of a request."""
    request = sequence.request
    return Unit(model.number, request.tenant, request.unit or request.conversation)


def test_nobody_is_lost_served_twice_or_left_waiting() -> None:
    """Random schedules of requests, cancellations, time, quotas and new settings."""
    run_state_machine_as_test(
        OrderMachine,
        settings=settings(max_examples=2 * settings().max_examples, stateful_step_count=40),
    )
