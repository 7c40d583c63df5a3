"""For how long requests waited for what, whether or not anybody asked meanwhile."""

from functools import partial

import msgspec
import pytest

from umbel.scheduler.fairness.terms import Terms
from umbel.scheduler.fairness.use import TenantUse
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.times import Activity, Times

from ..fakes import FakeClock, make_request
from .costs import lines_run

SLOT, TENANT, MEMORY = Activity.SLOT, Activity.TENANT, Activity.MEMORY


class Waits:
    """A queue with terms for tenant `a`, and a clock that stands still."""

    def __init__(self, terms: Terms) -> None:
        self.clock = FakeClock()
        self.terms = terms
        self.queue = ConversationQueue(10_000, TenantUse(self.agreed), self.clock)

    def agreed(self, tenant: str) -> Terms:
        """Nothing with others."""
        return self.terms if tenant == "a" else Terms()

    def put(self, *names: str) -> list[Sequence]:
        """Queue requests in conversations of their own; the first letter names the tenant."""
        made = [Sequence(make_request(name, tenant=name[0])) for name in names]
        for each in made:
            self.queue.put(each)
        return made

    def put_many(self, number: int) -> list[Sequence]:
        """Queue so many of tenant `a`."""
        return self.put(*(f"a{each}" for each in range(number)))

    def seconds(self, sequence: Sequence) -> dict[Activity, float]:
        """For how long it did what, without asking the queue."""
        return times_of(sequence).seconds(self.clock.now)


def times_of(sequence: Sequence) -> Times:
    """What it did."""
    assert sequence.times is not None
    return sequence.times


@pytest.mark.parametrize("asked", [False, True])
def test_all_of_a_tenant_wait_for_its_bound_from_the_first_start_on(*, asked: bool) -> None:
    """However many wait, and though none of them is looked at until it starts itself."""
    waits = Waits(Terms(running=1))
    sequences = waits.put_many(200)
    for number, sequence in enumerate(sequences[:150]):
        if asked and number == 60:
            assert len(waits.queue.requests(1000)) == 140
        assert waits.queue.claim(sequence)
        waits.clock.advance(1)
        waits.queue.release(sequence)
        if number > 1:
            assert times_of(sequence).longest_wait(waits.clock.now) == (TENANT, number)
    assert waits.seconds(sequences[149]) == {SLOT: 1, TENANT: 149}
    assert waits.seconds(sequences[150]) == {SLOT: 0, TENANT: 150}
    row = waits.queue.requests(1000)[-1]
    assert (row.activity, row.seconds) == (SLOT, {SLOT: 0, TENANT: 150})


def test_who_ended_waits_for_nothing_any_more() -> None:
    """What its tenant waits for from then on is not its own, if it was cancelled or runs."""
    waits = Waits(Terms(running=1))
    first, second, _ = waits.put("a1", "a2", "a3")
    waits.clock.advance(2)
    assert waits.queue.claim(first)
    waits.clock.advance(3)
    assert waits.queue.remove("a2") is second
    ended = waits.clock.now
    waits.queue.release(first)
    waits.clock.advance(5)
    assert times_of(first).seconds(ended) == {SLOT: 5}, "nobody said that it is prefilled"
    assert times_of(second).seconds(ended) == {SLOT: 2, TENANT: 3}


def test_what_the_scheduler_found_counts_until_the_tenant_waits_for_something_else() -> None:
    """It lacked memory; then its tenant reached its bound, and then had a place again."""
    waits = Waits(Terms(running=1))
    first, second = waits.put("a1", "a2")
    waits.clock.advance(1)
    waits.queue.note([(second, MEMORY)])
    waits.clock.advance(2)
    waits.queue.note([(second, MEMORY)])
    assert waits.queue.requests(9)[1].activity is MEMORY
    waits.put("a3")
    waits.clock.advance(4)
    assert waits.queue.claim(first)
    waits.queue.note([(second, MEMORY), (first, MEMORY)])  # it was looked at just before
    waits.clock.advance(8)
    waits.queue.release(first)
    waits.clock.advance(16)
    expected = {SLOT: 17, MEMORY: 6, TENANT: 8}
    assert (waits.seconds(second), times_of(second).activity) == (expected, SLOT)
    assert waits.queue.requests(9)[0].seconds == expected
    waits.queue.note([(second, MEMORY)])
    waits.clock.advance(32)
    waits.queue.note([(second, SLOT)])
    waits.clock.advance(64)
    assert waits.seconds(second) == {SLOT: 81, MEMORY: 38, TENANT: 8}
    assert waits.queue.claim(second)
    assert waits.seconds(second) == {SLOT: 81, MEMORY: 38, TENANT: 8}


def test_a_tenant_that_waits_for_nothing_is_forgotten() -> None:
    """Its next request begins to wait when it comes."""
    waits = Waits(Terms(running=1))
    first, second = waits.put("a1", "a2")
    assert waits.queue.claim(first)
    waits.queue.remove("a2")
    assert not waits.queue._wait_times
    waits.clock.advance(1)
    (third,) = waits.put("a3")
    waits.clock.advance(2)
    assert waits.seconds(third) == {TENANT: 2}
    waits.queue.put_back(first)
    assert times_of(first).activity is SLOT
    assert times_of(second).activity is TENANT


@pytest.mark.parametrize("running", [1, 30])
def test_tokens_that_are_spent_cost_no_more_the_more_wait(running: int) -> None:
    """Neither to charge what runs, nor to look for what may go on."""
    charged, looked = [], []
    for waiting in (10, 1000):
        waits = Waits(Terms(tokens_per_minute=60))
        sequences = waits.put_many(waiting + running + 1)
        runs = sequences[: running + 1]
        for each in runs:
            assert waits.queue.claim(each)
        waits.queue.charge([(runs[0], 600)])
        runs[0].preempt(replay=False)
        waits.queue.put_back(runs[0])
        costs = [(each, 1.0) for each in runs[1:]]
        charged.append(lines_run(partial(waits.queue.charge, costs)))
        looked.append(lines_run(waits.queue.offers))
        assert [each for _, each in waits.queue.offers()] == [runs[0]]
    assert charged[1] <= 1.1 * charged[0] + 20
    assert looked[1] <= 1.1 * looked[0] + 20


def test_a_bound_that_is_reached_costs_no_more_the_more_wait() -> None:
    """Nor does one that is left."""
    started, ended = [], []
    for waiting in (10, 1000):
        waits = Waits(Terms(running=1))
        first, *_ = waits.put_many(waiting)
        started.append(lines_run(partial(waits.queue.claim, first)))
        ended.append(lines_run(partial(waits.queue.release, first)))
    assert started[1] <= 1.1 * started[0] + 20
    assert ended[1] <= 1.1 * ended[0] + 20


def test_what_yielded_and_waits_for_its_conversation_is_not_offered() -> None:
    """Of a tenant that has spent its tokens: the first of what ran goes on, the oldest first."""
    waits = Waits(Terms(tokens_per_minute=60))
    runs = []
    for name, unit in (("1", "x"), ("2", "y"), ("3", "y")):
        request = make_request(name, tenant="a", conversation=unit)
        runs.append(Sequence(msgspec.structs.replace(request, parallel=2)))
        waits.queue.put(runs[-1])
    for each in runs:
        assert waits.queue.claim(each)
    waits.queue.charge([(runs[0], 600)])
    for each in reversed(runs):
        each.preempt(replay=False)
        waits.queue.put_back(each)
    assert [each for _, each in waits.queue.offers()] == runs[:2]
    assert [each for _, each in waits.queue.offers({"1"})] == runs[1:2]
    waits.queue.remove("2")
    assert [each for _, each in waits.queue.offers()] == [runs[0], runs[2]]


def test_who_describes_many_requests_holds_nobody_up_for_long() -> None:
    """The lock is held for a bounded part of them at a time."""
    waits = Waits(Terms(running=1))
    waits.put_many(1000)
    longest = []

    class Counted:
        """A lock that notes how many times are read while it is held."""

        def __enter__(self) -> None:
            longest.append(0)

        def __exit__(self, *_: object) -> None:
            assert longest[-1] <= 50

    real = Times.snapshot

    def snapshot(times: Times, now: float) -> Times:
        longest[-1] += 1
        return real(times, now)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waits.queue, "_lock", Counted())
        patched.setattr(Times, "snapshot", snapshot)
        assert len(waits.queue.requests(1000)) == 1000
    assert sum(longest) == 1000
