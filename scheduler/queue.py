"""Requests that wait, in a fair order. Safe to call from any thread."""

import heapq
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from operator import itemgetter

from .errors import UnavailableError
from .limits import RETRY_AFTER, check_tokens, check_waiting
from .order import Candidate, Entry, FairOrder
from .request import entry_of
from .sequence import Sequence, SequenceStatus
from .statistics import RequestStatistics, describe_request
from .tenants import Share, TenantUse
from .times import Activity, Times


class ConversationQueue:
    """A bounded queue in the order of `FairOrder`, which also knows what runs.

    Its lock is the only one of the order. Nothing is done under it but taking, giving, charging
    and noting what each request waits for. A sequence runs from `claim` to `release`; no more of
    its unit run at once than it says, and they are claimed in the order in which they were put.

    Args:
        limit: the most requests that may wait, here and in other queues. It may change.
        use: what tenants use, here and in other queues, and their terms, if there are any.
        wake: called when a request that waits for a place may go on, as one elsewhere left it.
    """

    def __init__(
        self,
        limit: int,
        use: TenantUse | None = None,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self.limit = limit
        self._use = use or TenantUse()
        self._clock = clock
        self._lock = threading.Lock()
        self._places = self._use.join(wake)
        self._order = FairOrder(weight=self.weight)
        self._waiting: dict[str, Sequence] = {}
        self._claimed: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; some have left since
        self._spent = frozenset[str]()  # tenants without tokens, at the last look
        self._found: dict[Sequence, Activity] = {}
        self._noted = -1  # value of `changes` when activities were noted last
        self._closed = False
        self._changes = 0

    def put(self, sequence: Sequence) -> None:
        """Add a sequence at the end.

        Raises:
            QueueFullError: as many wait as may wait, of all or of its tenant.
            QuotaSpentError: its tenant has spent its tokens of this minute.
            UnavailableError: the queue was closed.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
            request, now = sequence.request, self._clock()
            check_waiting(self._use, request.tenant, self.limit, now, placed=request.placed)
            check_tokens(self._use, request.tenant, now)
            self._changes += 1
            self._order.put(entry_of(request))
            self._wait(sequence)

    def remove(self, request_id: str) -> Sequence | None:
        """Take one waiting sequence out; None when it does not wait (any more)."""
        with self._lock:
            return self._take(request_id)

    def expired(self, now: float) -> list[Sequence]:
        """Take out the waiting sequences whose deadline has passed, the earliest first."""
        late = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                sequence = self._take(heapq.heappop(self._deadlines)[1])
                late += [] if sequence is None else [sequence]
        return late

    def close(self) -> list[Sequence]:
        """Refuse new sequences from now on, and hand out those that have never run."""
        with self._lock:
            self._closed = True
            new = [s for s in self._waiting.values() if s.status is SequenceStatus.WAITING]
            for sequence in new:
                self._take(sequence.request.id)
            return new

    def leave(self) -> None:
        """Refuse new sequences, and count the rest for no tenant: no engine serves this queue."""
        with self._lock:
            self._closed = True
        self._use.leave(self._places)

    def offers(
        self, passed: Container[str] = frozenset(), tenant: str | None = None
    ) -> list[tuple[Candidate, Sequence]]:
        """List the sequences that may be claimed now, a bounded number; see `FairOrder.window`.

        No lock is held while the caller looks at them, and some may leave meanwhile.

        Args:
            passed: ids of those that were looked at and could not start.
            tenant: list only its interactive ones, within the quantum or beyond.
        """
        with self._lock:
            self._refresh()
            if tenant is not None:
                found = self._order.offers(tenant, passed)
            else:
                found = self._order.window(self._may_start, passed)
                if not found:  # a yielded request goes on, though its tenant has no tokens
                    found = self._order.yielded(self._use.has_place, passed)
            return [(each, self._waiting[each.entry.id]) for each in found]

    def claimants(self, among: Collection[str] | None = None) -> list[Share]:
        """List the tenants that could start an interactive request, the least served first.

        They are `among` these, however much they were served, or those to which others yield.
        """
        with self._lock:
            self._refresh()
            if among is None:
                return self._order.claimants(self._may_start)
            able = (each for each in among if self._may_start(each) and self._order.offers(each))
            return sorted(map(self._order.share, able), key=itemgetter(1, 0))

    def weight(self, tenant: str) -> float:
        """Return a tenant's share, positive."""
        return self._use.agreed(tenant).weight

    def runs(self, ids: Iterable[str]) -> list[tuple[Entry, Share, bool]]:
        """List running requests, the oldest first: entry, share of the tenant, started as due."""
        with self._lock:
            found = self._order.runs(ids)
            return [(entry, self._order.share(entry.tenant), is_due) for entry, is_due in found]

    def waits(self, sequence: Sequence) -> bool:
        """Return True if a sequence is in the queue."""
        return sequence.request.id in self._waiting

    @property
    def changes(self) -> int:
        """Grows when a request comes, starts, ends or waits again, or a tenant may start more."""
        return self._changes + self._places.changes

    def __len__(self) -> int:
        return len(self._waiting)

    def claim(self, sequence: Sequence, tokens: float = 0.0) -> bool:
        """Take an offered sequence out, at the cost of its prompt; False if it may not start.

        A sequence that yielded has been charged.
        """
        request, quotas = sequence.request, self._use.quotas
        with self._lock:
            if request.id not in self._waiting or not self._order.is_head(entry_of(request)):
                return False
            yielded = sequence.status is SequenceStatus.PREEMPTED
            if not yielded and quotas.refills_in(request.tenant, self._clock()):
                return False
            if not self._places.start(request.tenant):
                return False
            self._order.start(request.id, tokens)
            self._changes += 1
            self._claimed[request.id] = sequence
            self._leave(sequence)
            if not yielded:  # it took that place by yielding
                self._use.drained.note(request.tenant, self._clock())
            quotas.charge(request.tenant, tokens, self._clock())
            return True

    def charge(self, costs: Iterable[tuple[Sequence, float]]) -> None:
        """Charge running sequences for tokens, or take back what they were charged for."""
        with self._lock:
            for sequence, tokens in costs:
                self._order.charge(sequence.request.id, tokens)
                self._use.quotas.charge(sequence.request.tenant, tokens, self._clock())

    def put_back(self, sequence: Sequence) -> None:
        """Return a running sequence to its old place: no bound and no end refuse it."""
        with self._lock:
            self._changes += 1
            self._order.preempt(sequence.request.id)
            self._places.stop(sequence.request.tenant)
            del self._claimed[sequence.request.id]
            self._wait(sequence)

    def release(self, sequence: Sequence) -> None:
        """Let the next of its unit run: a claimed sequence has ended. Idempotent."""
        with self._lock, suppress(KeyError):
            del self._claimed[sequence.request.id]
            self._changes += 1
            self._order.end(sequence.request.id)
            self._places.stop(sequence.request.tenant)

    def note(self, found: Mapping[Sequence, Activity]) -> None:
        """Note what each waiting sequence waits for: `found` has those that were looked at last."""
        with self._lock:
            self._refresh()
            if found != self._found or self._noted != self.changes:
                self._found = dict(found)
                self._note_activities()

    def requests(self, most: int, tenant: str | None = None) -> list[RequestStatistics]:
        """Describe some requests, of one tenant or all: those that run, then those that wait."""
        with self._lock:
            self._refresh()
            self._note_activities()
            there = [*self._claimed.values(), *self._waiting.values()]
        own = (each for each in there if tenant in {None, each.request.tenant})
        now = self._clock()
        return [describe_request(each, now) for each in islice(own, most)]

    def _note_activities(self) -> None:
        self._noted, now = self.changes, self._clock()
        for sequence in self._waiting.values():
            sequence.note(self._activity_of(sequence), now)

    def _activity_of(self, sequence: Sequence) -> Activity:
        entry = entry_of(sequence.request)
        if not self._order.is_head(entry):
            return Activity.CONVERSATION
        if entry.tenant in self._spent and sequence.status is not SequenceStatus.PREEMPTED:
            return Activity.QUOTA
        if not self._use.has_place(entry.tenant):
            return Activity.TENANT
        return self._found.get(sequence, Activity.SLOT)

    def _may_start(self, tenant: str) -> bool:
        return tenant not in self._spent and self._use.has_place(tenant)

    def _refresh(self) -> None:
        now, quotas = self._clock(), self._use.quotas
        spent = frozenset(t for t in self._order.tenants if quotas.refills_in(t, now))
        if spent != self._spent:
            self._spent = spent
            self._changes += 1

    def _wait(self, sequence: Sequence) -> None:
        """Add a sequence that the order has already."""
        request, now = sequence.request, self._clock()
        self._places.wait(request.tenant)
        self._waiting[request.id] = sequence
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._deadlines = [(s.request.deadline, name) for name, s in self._waiting.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        activity = self._activity_of(sequence)
        if sequence.times is None:
            sequence.times = Times(activity, now, request.before)
        sequence.note(activity, now)

    def _take(self, request_id: str) -> Sequence | None:
        sequence = self._waiting.get(request_id)
        if sequence is not None:
            self._changes += 1
            self._order.remove(request_id)
            self._places.leave(sequence.request.tenant)
            self._leave(sequence)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        del self._waiting[sequence.request.id]
        self._found.pop(sequence, None)
