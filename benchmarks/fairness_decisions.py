"""Time that the daemon's order and scheduler take of the engine's thread: for `fairness.py`.

The queue and the scheduler are the daemon's own; what they ask of cache and memory is answered at
once, so that only their own time counts.
"""

import statistics
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, cast

from umbel.cachestore.ledger import Size
from umbel.cachestore.restoration import Known
from umbel.models.params import SamplingParams
from umbel.scheduler.order import Entry, FairOrder, Priority, rank
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Request
from umbel.scheduler.scheduler import Scheduler, Selection
from umbel.scheduler.sequence import Sequence, SequenceStatus
from umbel.scheduler.tenants import TenantUse, Terms

CONVERSATIONS = 1_000
BATCH = 32
_PROMPT = [0] * 512
_ROUNDS = 500


class Cache:
    """Has some of each prompt, and nothing on disk."""

    @property
    def paging(self) -> "Cache":
        """It answers itself."""
        return self

    def awaited(self, sequence: Sequence, running: Iterable[Sequence], /) -> None:
        """No other request computes it."""
        del sequence, running

    def is_on_disk(self, sequence: Sequence, /) -> bool:
        """All is in memory."""
        del sequence
        return False

    def known(self, sequence: Sequence, /) -> Known:
        """Some, as the id has it."""
        cached = 37 * int(sequence.request.id) % len(_PROMPT)
        return Known(cached, cached, Size())


class Room:
    """Memory that holds everything."""

    def admits(self, sequence: Sequence, known: Known, running: list[Sequence], /) -> bool:
        """It does."""
        del sequence, known, running
        return True


class Waiting:
    """A scheduler for which requests wait.

    Args:
        tenants: of the conversations.
        requests: of `CONVERSATIONS`, in turns.
        batch: the most that run.
        terms: of tenant 0; nothing is agreed with others.
        priority: of the requests.
    """

    def __init__(
        self,
        tenants: int,
        requests: int,
        batch: int = BATCH,
        terms: Terms | None = None,
        priority: Priority = Priority.INTERACTIVE,
    ) -> None:
        self.terms = {"0": terms or Terms()}
        use = TenantUse(lambda tenant: self.terms.get(tenant, Terms()))
        self.queue = ConversationQueue(2 * requests, use)
        self.scheduler = Scheduler(self.queue, cast("Any", Cache()), cast("Any", Room()), batch)
        self._last = Selection()
        self._tenants = tenants
        self._count = 0
        for _ in range(requests):
            self.put(priority=priority)

    def put(self, tenant: str | None = None, priority: Priority = Priority.INTERACTIVE) -> None:
        """Another one comes: the next, or a given tenant's in a new conversation."""
        name = self._count % CONVERSATIONS
        request = Request(
            id=str(self._count),
            tenant=str(name % self._tenants) if tenant is None else tenant,
            conversation=str(name) if tenant is None else f"new {self._count}",
            prompt=_PROMPT,
            max_tokens=1 << 20,
            sampling=SamplingParams(seed=0),
            deadline=1e9 + self._count,
            priority=priority,
        )
        self.queue.put(Sequence(request))
        self._count += 1

    def start_next(self) -> Sequence | None:
        """Start the next one, as the engine does."""
        if len(self.queue):
            self.scheduler.charge()
        ranking = self.scheduler.ranking()
        found = self._last = self.scheduler.next_start(ranking, self._last.reserved_for)
        if found.start is None:
            self.queue.note(found.waits)
        else:
            self.scheduler.start(found.start, Cache().known(found.start))
        return found.start

    def yield_slot(self) -> Sequence | None:
        """Let a request yield if one must."""
        if not self.scheduler.may_yield(self._last):
            return None
        self.scheduler.charge()
        found = self.scheduler.next_to_yield(self.scheduler.ranking())
        if found.victim is not None:
            found.victim.preempt(replay=False)
            self.scheduler.put_back(found.victim)
            self._last = self._last._replace(reserved_for=found.claimant)
        return found.victim

    def start(self) -> None:
        """One starts, ends, and another one comes."""
        sequence = self.start_next()
        assert sequence is not None  # noqa: S101  (else nothing is measured)
        self.scheduler.remove(sequence)
        self.put()

    def fill(self) -> None:
        """Start as many as may run, and let them decode."""
        while (sequence := self.start_next()) is not None:
            sequence.status = SequenceStatus.DECODE

    def spend(self) -> None:
        """Fill all slots but one, and have tenant 0 spend its tokens; then one of another comes."""
        self.terms["0"] = Terms(running=BATCH - 1)
        self.fill()
        self.terms["0"] = Terms(tokens_per_minute=1)
        self.put("other")

    def pass_by(self) -> None:
        """Give each running request a token; start one of another tenant, end one, add one."""
        for sequence in self.scheduler.running:
            sequence.output.append(0)
        started = self.start_next()
        assert started is not None  # noqa: S101  (else nothing is measured)
        self.scheduler.remove(started)
        self.put("other")

    def give_way(self) -> None:
        """Of answers of a batch one yields to an interactive request, which ends; it goes on."""
        for sequence in self.scheduler.running:
            sequence.status = SequenceStatus.DECODE
            sequence.num_computed_tokens = sequence.num_known_tokens
        self.put("0")
        yielding = self.yield_slot()
        assert yielding is not None  # noqa: S101  (else nothing is measured)
        started = self.start_next()
        assert started is not None  # noqa: S101
        self.scheduler.remove(started)
        assert self.start_next() is yielding  # noqa: S101

    def step(self) -> None:
        """Do what a step does: each gets a token, some are late, one may have to yield."""
        for sequence in self.scheduler.running:
            sequence.output.append(0)
        self.queue.expired(0.0)
        self.start_next()
        if self.yield_slot() is not None:
            self.fill()


def decisions(tenants: int, requests: int) -> float:
    """Measure the milliseconds of the order: look, rank, start, charge, end, and one more."""
    order = FairOrder()
    for number in range(requests):
        name = number % CONVERSATIONS
        order.put(Entry(str(number), str(name % tenants), str(name)))

    def decide() -> None:
        chosen = rank(order.window(), lambda entry: 37 * int(entry.id) % 4096)[0]
        order.start(chosen.id, 300.0)
        order.charge(chosen.id, 512.0)
        order.end(chosen.id)
        order.put(chosen)

    return _median(decide)


def starts(tenants: int, requests: int) -> float:
    """Measure the milliseconds of the scheduler: a request starts, ends, and one comes."""
    return _median(Waiting(tenants, requests).start)


def steps(tenants: int, requests: int) -> float:
    """Measure the milliseconds of the scheduler in a step with a full batch."""
    waiting = Waiting(tenants, requests)
    waiting.fill()
    return _median(waiting.step)


def bounded(requests: int) -> float:
    """Measure the milliseconds of a start and an end where a tenant reaches its bound each time."""
    return _median(Waiting(1, requests, terms=Terms(running=1)).start)


def spent(requests: int) -> float:
    """Measure the milliseconds of another's start, beside a tenant that has spent its tokens."""
    waiting = Waiting(1, requests + BATCH - 1)
    waiting.spend()
    return _median(waiting.pass_by)


def own_yields(requests: int) -> float:
    """Measure the milliseconds of a batch answer that yields to its tenant, and goes on."""
    waiting = Waiting(1, requests, priority=Priority.BATCH)
    waiting.fill()
    return _median(waiting.give_way)


def _median(work: Callable[[], None]) -> float:
    took = []
    for _ in range(_ROUNDS):
        began = perf_counter()
        work()
        took.append(perf_counter() - began)
    return statistics.median(took) * 1e3
