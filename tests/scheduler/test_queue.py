"""Requests that wait, in order within each conversation."""

import random
import threading
import time
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from umbel.scheduler.errors import (
    QueueFullError,
    QuotaSpentError,
    RetryLaterError,
    UnavailableError,
)
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.tenants import TenantUse, Terms
from umbel.scheduler.times import Activity

from ..fakes import PATIENCE, busy, make_request


def waiting(request_id: str, conversation: str = "c", deadline: float = float("inf")) -> Sequence:
    """Build a sequence that has not run yet."""
    return Sequence(make_request(request_id, conversation=conversation, deadline=deadline))


def filled(*sequences: Sequence, limit: int = 10) -> ConversationQueue:
    """Build a queue in which these wait."""
    queue = ConversationQueue(limit)
    for sequence in sequences:
        queue.put(sequence)
    return queue


def offered(queue: ConversationQueue) -> list[Sequence]:
    """Ids that may start."""
    return [sequence for _, sequence in queue.offers()]


def take(queue: ConversationQueue) -> Sequence | None:
    """Claim the first that is offered."""
    return next((s for s in offered(queue) if queue.claim(s)), None)


def test_an_empty_queue_has_nothing_to_take() -> None:
    """Taking never waits."""
    assert ConversationQueue(1).offers() == []


def test_the_queue_is_bounded() -> None:
    """One request too many is refused with a time to come back; a place freed is a place."""
    first = waiting("1", "a")
    queue = filled(first, waiting("2", "b"), limit=2)
    with pytest.raises(QueueFullError, match="2 requests are waiting") as refusal:
        queue.put(waiting("3"))
    assert refusal.value.retry_after > 0
    assert len(queue) == 2
    assert take(queue) is first
    queue.put(waiting("3"))
    assert len(queue) == 2


def test_a_running_request_cannot_be_removed() -> None:
    """Removing finds waiting requests only, and does not free a running conversation."""
    first, second = waiting("1"), waiting("2")
    queue = filled(first, second)
    take(queue)
    assert queue.remove("1") is None
    assert take(queue) is None


def test_expired_requests_are_handed_out_once() -> None:
    """A deadline is over at its very moment; who has time left stays."""
    past, now, later = waiting("1", deadline=4), waiting("2", deadline=5), waiting("3", deadline=6)
    queue = filled(later, past, now)
    assert queue.expired(5) == [past, now]
    assert queue.expired(5) == []
    assert take(queue) is later


def test_a_closed_queue_hands_out_what_waits_and_refuses_more() -> None:
    running, left = waiting("1"), waiting("2")
    queue = filled(running, left)
    take(queue)
    assert queue.close() == [left]
    assert queue.close() == []
    assert len(queue) == 0
    with pytest.raises(UnavailableError, match="stopping") as refusal:
        queue.put(waiting("3"))
    assert isinstance(refusal.value, RetryLaterError)
    queue.release(running)
    assert take(queue) is None


class Traffic:
    """Putters, takers and a canceller at work on one queue, and what they saw."""

    PUTTERS = 4
    EACH = 400
    CONVERSATIONS = 7

    def __init__(self) -> None:
        self.queue = ConversationQueue(50)
        self.lock = threading.Lock()
        self.busy: set[str] = set()
        self.taken: dict[str, list[str]] = defaultdict(list)
        self.removed: list[str] = []
        self.errors: list[str] = []
        self.putting = self.PUTTERS

    def put(self, putter: int) -> None:
        """Put every request of this putter, waiting for a place where it must."""
        for number in range(self.EACH):
            conversation = f"c{(putter + number) % self.CONVERSATIONS}"
            sequence = waiting(f"{putter}:{number}", conversation)
            while True:
                try:
                    self.queue.put(sequence)
                    break
                except QueueFullError:
                    time.sleep(0)
        with self.lock:
            self.putting -= 1

    def take(self) -> None:
        """Take and release until all is done, noting who else has the conversation."""
        while (sequence := take(self.queue)) or self.putting or len(self.queue):
            if sequence is None:
                time.sleep(0)
                continue
            conversation = sequence.request.conversation
            with self.lock:
                if conversation in self.busy:
                    self.errors.append(f"two of {conversation} at once")
                self.busy.add(conversation)
                self.taken[conversation].append(sequence.request.id)
            time.sleep(0)
            with self.lock:
                self.busy.discard(conversation)
            self.queue.release(sequence)

    def cancel(self) -> None:
        """Remove requests at random, most of which do not wait."""
        pick = random.Random(0)  # noqa: S311  (not for secrets)
        while self.putting:
            name = f"{pick.randrange(self.PUTTERS)}:{pick.randrange(self.EACH)}"
            if self.queue.remove(name) is not None:
                self.removed.append(name)
            time.sleep(0)


def test_threads_lose_and_duplicate_nothing() -> None:
    """With many threads each request is taken or removed once, in its conversation's order."""
    traffic = Traffic()
    threads = [threading.Thread(target=traffic.put, args=(n,)) for n in range(Traffic.PUTTERS)]
    threads += [threading.Thread(target=traffic.take) for _ in range(3)]
    threads.append(threading.Thread(target=traffic.cancel))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()

    assert traffic.errors == []
    seen = [name for names in traffic.taken.values() for name in names] + traffic.removed
    assert sorted(seen) == sorted(
        f"{putter}:{number}" for putter in range(Traffic.PUTTERS) for number in range(Traffic.EACH)
    )
    for names in traffic.taken.values():
        for putter in range(Traffic.PUTTERS):
            numbers = [int(n.split(":")[1]) for n in names if n.startswith(f"{putter}:")]
            assert numbers == sorted(numbers)


def of(tenant: str, request_id: str, **more: Any) -> Sequence:
    """Build a tenant's sequence, in a conversation of its own."""
    return Sequence(make_request(request_id, tenant=tenant, **more))


class Bounded:
    """A queue with terms for two tenants, `a` and `b`, and a clock that stands still."""

    def __init__(self, terms: Terms) -> None:
        self.now = 100.0
        self.terms = {"a": terms}
        self.queue = ConversationQueue(
            100,
            TenantUse(lambda tenant: self.terms.get(tenant, Terms())),
            lambda: self.now,
        )

    def put(self, *names: str) -> list[Sequence]:
        """Queue requests; the first letter names the tenant."""
        made = [of(name[0], name) for name in names]
        for each in made:
            self.queue.put(each)
        return made

    def offered(self) -> list[str]:
        """Ids that may start."""
        return sorted(each.request.id for each in offered(self.queue))


def test_a_tenants_bound_is_its_own() -> None:
    """So many of it may wait; others are not refused for it."""
    bounded = Bounded(Terms(waiting=2))
    first, _ = bounded.put("a1", "a2")
    with pytest.raises(QueueFullError, match="2 requests of tenant a are waiting") as refusal:
        bounded.put("a3")
    assert refusal.value.retry_after > 0
    bounded.put("b1", "b2", "b3")
    assert bounded.queue.claim(first)
    bounded.put("a3")


def test_spent_tokens_come_back() -> None:
    bounded = Bounded(Terms(tokens_per_minute=60))
    first, *_ = bounded.put("a1", "a2")
    assert bounded.queue.claim(first, 50)
    assert bounded.offered() == ["a2"]
    bounded.queue.charge([(first, 25)])
    bounded.put("b1")
    assert bounded.offered() == ["b1"]
    with pytest.raises(QuotaSpentError, match=r"its 60 tokens a minute; .* in 16 s") as refusal:
        bounded.put("a3")
    assert refusal.value.retry_after == 16
    bounded.now += 15
    assert bounded.offered() == ["b1"]
    bounded.now += 1
    assert bounded.offered() == ["a2", "b1"]
    bounded.put("a3")


def test_what_ran_goes_on_when_its_tenant_has_spent_its_tokens() -> None:
    bounded = Bounded(Terms(tokens_per_minute=60))
    first, *_ = bounded.put("a1", "a2", "b1")
    assert bounded.queue.claim(first, 600)
    first.preempt(replay=False)
    bounded.queue.put_back(first)
    assert bounded.offered() == ["b1"]
    passed = {"b1"}
    assert [each.entry.id for each, _ in bounded.queue.offers(passed)] == ["a1"]
    assert bounded.queue.claim(first)
    assert bounded.queue.offers(passed) == []


def test_who_has_spent_its_tokens_with_one_model_starts_with_none() -> None:
    """Also what waited for another before."""
    use = TenantUse(lambda _: Terms(tokens_per_minute=60))
    one, other = (ConversationQueue(9, use, lambda: 1.0) for _ in range(2))
    first, second = of("a", "1"), of("a", "2")
    one.put(first)
    other.put(second)
    assert one.claim(first, 61)
    assert other.claimants() == [], "or others would yield to it in vain"
    assert not other.claim(second)
    assert other.offers() == []


def test_a_quota_that_is_lifted_holds_nobody() -> None:
    """From the next look on."""
    bounded = Bounded(Terms(tokens_per_minute=60))
    first, *_ = bounded.put("a1", "a2")
    assert bounded.queue.claim(first, 6000)
    assert bounded.offered() == []
    bounded.terms["a"] = Terms()
    assert bounded.offered() == ["a2"]


def test_queues_of_several_models_share_a_quota() -> None:
    use = TenantUse(lambda _: Terms(tokens_per_minute=60))
    queues = [ConversationQueue(9, use, lambda: 1.0) for _ in range(2)]
    first = of("a", "1")
    queues[0].put(first)
    queues[0].claim(first, 61)
    with pytest.raises(QuotaSpentError):
        queues[1].put(of("a", "2"))


def test_who_is_refused_comes_back_when_a_place_is_likely() -> None:
    now = [0.0]
    queue = ConversationQueue(1, clock=lambda: now[0])
    for number, (passes, seconds) in enumerate([(0, 2), (4, 4), (20, 12), (0.1, 9), (1000, 60)]):
        queue.put(of("a", f"{number}"))
        now[0] += passes
        with pytest.raises(QueueFullError) as refusal:
            queue.put(of("a", "more"))
        assert refusal.value.retry_after == seconds, passes
        assert queue.claim(offered(queue)[0])


def test_a_candidate_that_left_is_not_claimed() -> None:
    """Between the look and the claim anybody may be cancelled, or claimed by another."""
    removed, claimed = waiting("1", "a"), waiting("2", "b")
    queue = filled(removed, claimed)
    assert offered(queue) == [removed, claimed]
    queue.remove("1")
    assert not queue.claim(removed)
    assert queue.claim(claimed)
    assert not queue.claim(claimed)
    assert busy(queue) == {(claimed.request.tenant, "b")}


def test_a_bound_that_was_lowered_holds_at_once() -> None:
    terms = {"default": Terms()}
    queue = ConversationQueue(10, TenantUse(terms.__getitem__))
    first, second = waiting("1", "a"), waiting("2", "b")
    for each in (first, second):
        queue.put(each)
    assert queue.claim(first)
    terms["default"] = Terms(running=1)
    assert not queue.claim(second)
    assert offered(queue) == []
    queue.release(first)
    assert take(queue) is second


def test_a_tenants_requests_are_found_behind_others() -> None:
    """As many as are asked for of its own, those that run first."""
    queue = ConversationQueue(100)
    sequences = [of("b", f"b{number}") for number in range(9)] + [of("a", f"{n}") for n in (1, 2)]
    for sequence in sequences:
        queue.put(sequence)
    assert queue.claim(sequences[-1])
    assert [row.request for row in queue.requests(2, "a")] == ["2", "1"]
    assert [row.request for row in queue.requests(2)] == ["2", "b0"]
    assert [row.request for row in queue.requests(1, "a")] == ["2"]
    assert queue.requests(2, "c") == []


def test_what_is_displaced_by_one_that_yielded_waits_for_it() -> None:
    """It was next in its conversation, and says that it is not any more."""
    first, second = (
        Sequence(msgspec.structs.replace(w.request, parallel=2))
        for w in (waiting("1"), waiting("2"))
    )
    queue = filled(first, second)
    assert queue.claim(first)
    assert [row.activity for row in queue.requests(2)] == [Activity.SLOT, Activity.SLOT]
    queue.put_back(first)
    found = {row.request: row.activity for row in queue.requests(2)}
    assert found == {"1": Activity.SLOT, "2": Activity.CONVERSATION}
