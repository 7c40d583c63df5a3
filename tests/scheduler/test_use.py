"""Tenants' use is counted over the queues of all models."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from umbel.scheduler.errors import QueueFullError, UnavailableError
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.tenants import Quotas, TenantUse, Terms
from umbel.scheduler.times import Activity

from ..fakes import make_request


class Models:
    """The queues of two models; the first letter of a request's name is its tenant's."""

    def __init__(self, limit: int = 100, **terms: Terms) -> None:
        self.terms = terms
        self.woken: list[int] = []
        self.use = TenantUse(lambda tenant: self.terms.get(tenant, Terms()))
        self.queues = [
            ConversationQueue(limit, self.use, lambda: 1.0, self._waker(number))
            for number in range(2)
        ]

    def _waker(self, number: int) -> Callable[[], object]:
        return lambda: self.woken.append(number)

    def put(self, number: int, *names: str, **more: Any) -> list[Sequence]:
        """Queue requests for a model."""
        made = []
        for name in names:
            request = msgspec.structs.replace(make_request(name), tenant=name[0], **more)
            made.append(Sequence(request))
            self.queues[number].put(made[-1])
        return made

    def claim(self, number: int, sequence: Sequence) -> bool:
        """Start one request of a model."""
        return self.queues[number].claim(sequence)

    def offered(self, number: int) -> list[str]:
        """Requests that may start with a model."""
        return sorted(each.request.id for _, each in self.queues[number].offers())

    def activities(self, number: int) -> dict[str, Activity]:
        """Requests of a model in `/status`."""
        return {row.request: row.activity for row in self.queues[number].requests(100)}


def test_what_runs_with_one_model_has_its_place_with_all() -> None:
    models = Models(a=Terms(running=1))
    (first,), (second, _) = models.put(0, "a1"), models.put(1, "a2", "b1")
    assert models.offered(1) == ["a2", "b1"]
    assert models.claim(0, first)
    assert not models.claim(1, second), "its place was taken since it was offered"
    assert models.offered(1) == ["b1"]
    assert [share.tenant for share in models.queues[1].claimants()] == ["b"]
    assert models.activities(1)["a2"] is Activity.TENANT
    assert models.woken == []
    before = models.queues[1].changes
    models.queues[0].release(first)
    assert models.queues[1].changes > before
    assert models.woken == [1]
    assert models.activities(1)["a2"] is Activity.SLOT
    assert models.offered(1) == ["a2", "b1"]
    assert models.claim(1, second)


def test_a_slot_that_is_given_up_is_another_models() -> None:
    """One that yields waits for its tenant's bound like any other, and keeps what it has."""
    models = Models(a=Terms(running=1))
    (first,), (second,) = models.put(0, "a1"), models.put(1, "a2")
    assert models.claim(0, first)
    models.queues[0].put_back(first)
    assert models.woken == [1]
    assert models.claim(1, second)
    assert models.offered(0) == []
    models.queues[1].release(second)
    assert models.woken == [1, 0]
    assert models.offered(0) == ["a1"]


def test_who_has_no_bound_wakes_nobody() -> None:
    """Nor does one whose requests wait for no other model."""
    models = Models(a=Terms(running=1))
    first, other = models.put(0, "b1", "a1")
    models.put(1, "b2")
    assert models.claim(0, first)
    assert models.claim(0, other)
    models.queues[0].release(first)
    models.queues[0].release(other)
    assert models.woken == []


def test_what_waits_is_counted_with_all_models() -> None:
    """A tenant's own, and all."""
    models = Models(limit=3, a=Terms(waiting=2))
    models.put(0, "a1")
    second, *_ = models.put(1, "a2")
    for number in range(2):
        with pytest.raises(QueueFullError, match="2 requests of tenant a are waiting"):
            models.put(number, "a3")
    models.put(0, "b1")
    for number in range(2):
        with pytest.raises(QueueFullError, match="3 requests are waiting"):
            models.put(number, "b2")
    models.queues[1].remove(second.request.id)
    models.put(0, "a3")


def test_when_to_come_again_is_told_by_what_all_models_start() -> None:
    """A queue that has started nothing yet knows of the others."""
    now = [0.0]
    use = TenantUse()
    one, other = (ConversationQueue(1, use, lambda: now[0]) for _ in range(2))
    sequence = Sequence(make_request("1"))
    one.put(sequence)
    assert one.claim(sequence)
    now[0] = 30.0
    one.put(Sequence(make_request("2")))
    with pytest.raises(QueueFullError) as refusal:
        other.put(Sequence(make_request("3")))
    assert refusal.value.retry_after == 30


def test_when_to_come_again_is_told_by_what_blocks() -> None:
    """For a tenant's own bound that is how fast its own start, whatever others' do."""
    now = [0.0]
    use = TenantUse(lambda tenant: Terms(waiting=1) if tenant in "ab" else Terms())
    queue = ConversationQueue(3, use, lambda: now[0])

    def put(name: str) -> Sequence:
        request = msgspec.structs.replace(make_request(name), tenant=name[0])
        sequence = Sequence(request)
        queue.put(sequence)
        return sequence

    def told(name: str) -> int:
        with pytest.raises(QueueFullError) as refusal:
            put(name)
        return refusal.value.retry_after

    put("b1")
    assert queue.claim(put("a1"))
    put("a2")
    for number in range(19):
        now[0] += 2
        assert queue.claim(put(f"c{number}"))
    assert (told("a3"), told("b2")) == (38, 2), "nothing of b has ever started"
    put("c")
    assert told("c") == 2, "all places are taken, and all starts count"


def test_of_who_is_gone_no_rate_is_kept() -> None:
    """One entry a tenant that has requests, however they end and whichever models they use."""
    models = Models()
    for name in ("a1", "b1", "c1"):
        assert models.claim(0, models.put(0, name)[0])
    (waits,), (runs,) = models.put(1, "a2"), models.put(1, "b2")
    assert models.claim(1, runs)
    assert len(models.use.drained._left) - 1 == 3
    models.queues[0].leave()
    assert len(models.use.drained._left) - 1 == 2
    models.queues[1].remove(waits.request.id)
    assert len(models.use.drained._left) - 1 == 1
    models.queues[1].put_back(runs)
    assert models.claim(1, runs)
    models.queues[1].release(runs)
    assert len(models.use.drained._left) - 1 == 0


def test_to_yield_makes_no_place() -> None:
    now = [0.0]
    queue = ConversationQueue(1, clock=lambda: now[0])
    sequence = Sequence(make_request("1"))
    queue.put(sequence)
    assert queue.claim(sequence)
    for _ in range(20):
        now[0] += 1
        sequence.preempt(replay=False)
        queue.put_back(sequence)
        assert queue.claim(sequence)
    queue.put(Sequence(make_request("2")))
    with pytest.raises(QueueFullError) as refusal:
        queue.put(Sequence(make_request("3")))
    assert refusal.value.retry_after == 20


def test_a_model_that_goes_leaves_nothing_behind() -> None:
    models = Models(limit=3, a=Terms(running=1, waiting=2))
    first, _, _ = models.put(0, "a1", "a2", "b1")
    assert models.claim(0, first)
    models.put(1, "a3")
    assert models.offered(1) == []
    models.queues[0].leave()
    assert models.woken == [1]
    assert models.offered(1) == ["a3"]
    assert (models.use.waiting, models.use.waiting_of("a")) == (1, 1)
    with pytest.raises(UnavailableError):
        models.put(0, "b2")
    models.queues[0].leave()
    models.put(1, "a4", "b3")


def test_changed_terms_hold_at_once() -> None:
    """Nothing has ended with the model that waits, nor need it."""
    models = Models(a=Terms(running=1))
    (first,), (second, _) = models.put(0, "a1"), models.put(1, "a2", "a3")
    assert models.claim(0, first)
    assert models.offered(1) == []
    models.terms["a"] = Terms(running=2)
    models.use.terms_changed()
    assert models.woken == [0, 1]
    assert models.offered(1) == ["a2", "a3"]
    assert models.claim(1, second)
    assert models.offered(1) == []
    models.terms["a"] = Terms()
    models.use.terms_changed()
    assert models.offered(1) == ["a3"]


def test_what_waits_for_no_place_counts_no_changes() -> None:
    """No order looks at what waits for a model."""
    use = TenantUse(lambda _: Terms(running=1))
    part, queue = use.join(), use.join(lambda: None)
    for each in (part, queue):
        each.wait("a")
    use.tell("a")
    assert (part.changes, queue.changes) == (0, 1)


@pytest.mark.parametrize(
    ("most", "spent", "now"),
    [
        (2, 18.966666666666665, 1.0000000000000637),  # 509 s, less a rounding
        (1, 17.833333333333332, 10.000000000000114),
        (26, 27.3, 7.0),
        (60, 61.0, 0.0),
        (7, 7.0, 3.3),
    ],
)
def test_there_is_something_when_it_was_said(most: int, spent: float, now: float) -> None:
    quotas = Quotas(lambda _: Terms(1.0, None, None, most))
    quotas.charge("a", spent, now)
    seconds = quotas.refills_in("a", now)
    assert (spent - most) * 60 / most <= seconds <= (spent - most) * 60 / most + 1.1
    assert quotas.refills_in("a", now + seconds) == 0
    assert quotas.refills_in("b", now) == 0
