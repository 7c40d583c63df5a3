"""Causes and times of queued requests' waits."""

from functools import partial

import msgspec
import pytest

from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.tenants import TenantUse, Terms
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
        """Seconds of each activity so far."""
        return times_of(sequence).seconds(self.clock.now)


def times_of(sequence: Sequence) -> Times:
    """Its activities."""
    assert sequence.times is not None
    return sequence.times


def test_a_tenants_bound_is_noted_at_the_next_look() -> None:
    """Once a step, or when `/status` asks, for every sequence that waits."""
    waits = Waits(Terms(running=1))
    first, second, third = waits.put("a1", "a2", "a3")
    waits.clock.advance(1)
    assert waits.queue.claim(first)
    waits.queue.note({})
    waits.clock.advance(2)
    assert [row.activity for row in waits.queue.requests(9)][1:] == [TENANT, TENANT]
    waits.queue.release(first)
    assert [row.activity for row in waits.queue.requests(9)] == [SLOT, SLOT]
    waits.clock.advance(4)
    assert waits.seconds(second) == waits.seconds(third) == {SLOT: 5, TENANT: 2}
    assert times_of(second).longest_wait(waits.clock.now) == (SLOT, 5)
    assert waits.queue.claim(second)
    (row, *_) = waits.queue.requests(9)
    assert row.seconds == {SLOT: 5, TENANT: 2}


def test_who_ended_waits_for_nothing_any_more() -> None:
    waits = Waits(Terms(running=1))
    first, second, _ = waits.put("a1", "a2", "a3")
    waits.clock.advance(2)
    assert waits.queue.claim(first)
    waits.queue.note({})
    waits.clock.advance(3)
    assert waits.queue.remove("a2") is second
    ended = waits.clock.now
    waits.queue.release(first)
    waits.queue.note({})
    waits.clock.advance(5)
    assert times_of(first).seconds(ended) == {SLOT: 5}, "the engine did not say that it prefills"
    assert times_of(second).seconds(ended) == {SLOT: 2, TENANT: 3}


def test_what_the_scheduler_found_counts_until_it_looks_again() -> None:
    """It lacked memory; meanwhile its tenant reached its bound, and then had a place again."""
    waits = Waits(Terms(running=1))
    first, second = waits.put("a1", "a2")
    waits.clock.advance(1)
    waits.queue.note({second: MEMORY})
    waits.clock.advance(2)
    assert waits.queue.requests(9)[1].activity is MEMORY
    waits.put("a3")
    waits.clock.advance(4)
    assert waits.queue.claim(first)
    waits.queue.note({second: MEMORY})
    waits.clock.advance(8)
    waits.queue.release(first)
    waits.queue.note({})
    waits.clock.advance(16)
    expected = {SLOT: 17, MEMORY: 6, TENANT: 8}
    assert (waits.seconds(second), times_of(second).activity) == (expected, SLOT)
    assert waits.queue.claim(second)
    assert waits.seconds(second) == expected


def test_activities_are_noted_after_a_change_only() -> None:
    """A step in which no request comes, starts or ends walks nothing, however many wait."""
    waits = Waits(Terms(running=1))
    sequences = waits.put_many(1000)
    waits.queue.note({})
    assert lines_run(partial(waits.queue.note, {})) < 40
    assert waits.queue.claim(sequences[0])
    waits.queue.note({})
    assert {times_of(each).activity for each in sequences[1:]} == {TENANT}
    assert lines_run(partial(waits.queue.note, {})) < 40


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
