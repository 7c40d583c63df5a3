"""Requests that wait, in a fair order. Safe to call from any thread."""

import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import suppress
from itertools import islice

from .bounds import RETRY_AFTER, check_tokens, check_waiting
from .deadlines import Deadlines
from .errors import UnavailableError
from .fairness.entry import Candidate
from .fairness.order import FairOrder
from .fairness.slots import Share
from .fairness.use import TenantUse
from .request import entry_of
from .sequence import Sequence, SequenceStatus
from .statistics import RequestStatistics, describe_request
from .times import Activity, Times


class ConversationQueue:
    """A bounded queue in the order of `FairOrder`, which also knows who runs.

    Nothing is done under the lock but taking, giving and charging.

    Args:
        limit: the most requests that may wait, here and in other queues. It may change.
        use: what tenants use, here and in other queues, of what is agreed with them; None where
            there are no others, and nothing is agreed.
        clock: seconds, monotonic.
        wake: called when who waits for a place that another queue's request had may go on.

    Invariants: a sequence runs from `claim` to `release`; no more of its unit run at once than
    it says, and they are claimed in the order in which they were put.
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
        self._agreed, self._quotas = self._use.agreed, self._use.quotas
        self._clock = clock
        self._lock = threading.Lock()
        self._places = self._use.join(wake)
        self._order = FairOrder(agreed=self._agreed, places=self._places)
        self._waiting: dict[str, Sequence] = {}
        self._claimed: dict[str, Sequence] = {}
        self._found: dict[Sequence, Activity] = {}
        self._noted = -1  # of the changes, those after which activities were noted
        self._deadlines = Deadlines(self._waiting)
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
            self._order.put(entry_of(sequence.request))
            self._wait(sequence)

    def offers(
        self, passed: Container[str] = frozenset(), tenant: str | None = None
    ) -> list[tuple[Candidate, Sequence]]:
        """List the sequences that may be claimed now; see `FairOrder.window`.

        Args:
            passed: ids of those that were looked at and could not start.
            tenant: list only its interactive ones, with credit or without.

        Returns:
            A bounded number. Whoever looks at them holds no lock, and some may leave meanwhile.
        """
        with self._lock:
            self._refresh()
            if tenant is not None:
                found = self._order.offers(tenant, passed)
            else:
                found = self._order.window(passed) or self._order.yielded_of_held(passed)
            return [(each, self._waiting[each.entry.id]) for each in found]

    def claimants(self, among: Collection[str] | None = None) -> list[Share]:
        """The tenants that could start an interactive request, the least served first.

        Args:
            among: which of these, whatever they were served; None for those to which other
                tenants yield: see `FairOrder.claimants`.
        """
        with self._lock:
            self._refresh()
            for tenant in self._claimants(among):  # nobody yields to one that cannot start
                if self._quotas.refills_in(tenant, self._clock()):
                    self._hold(tenant)
            return list(map(self._share, self._claimants(among)))

    def shares(self, tenants: Iterable[str]) -> dict[str, Share]:
        """What tenants were given."""
        with self._lock:
            return {tenant: self._share(tenant) for tenant in tenants}

    def claim(self, sequence: Sequence, tokens: float = 0.0) -> bool:
        """Take an offered sequence out; False if it may not start any more.

        Args:
            sequence: one of `offers`.
            tokens: what its prompt costs; a sequence that yielded has been charged.
        """
        with self._lock:
            if sequence.request.id not in self._waiting or self._spent(sequence):
                return False
            try:
                self._order.start(sequence.request.id, tokens)
            except ValueError:  # another one of its unit has started since
                return False
            self._changes += 1
            self._claimed[sequence.request.id] = sequence
            self._leave(sequence)
            if sequence.status is not SequenceStatus.PREEMPTED:  # it took that place by yielding
                self._use.drained.note(sequence.request.tenant, self._clock())
            self._spend(sequence.request.tenant, tokens)
            return True

    def waits(self, sequence: Sequence) -> bool:
        """Whether a sequence is in the queue."""
        return sequence.request.id in self._waiting

    def charge(self, costs: Iterable[tuple[Sequence, float]]) -> None:
        """Charge running sequences for tokens, or take back what they were charged for."""
        with self._lock:
            for sequence, tokens in costs:
                self._order.charge(sequence.request.id, tokens)
                self._spend(sequence.request.tenant, tokens)

    def put_back(self, sequence: Sequence) -> None:
        """Have a running sequence wait again, at its old place: it yields its slot.

        That is no new request, so that neither the bound nor the end of the queue holds it up.
        """
        with self._lock:
            entry = entry_of(sequence.request)
            self._changes += 1
            self._order.preempt(entry.id)
            del self._claimed[entry.id]
            self._wait(sequence)

    def release(self, sequence: Sequence) -> None:
        """Let what comes after a claimed sequence run: it has ended. Idempotent."""
        with self._lock, suppress(KeyError):
            del self._claimed[sequence.request.id]
            self._changes += 1
            self._order.end(sequence.request.id)

    def note(self, found: Mapping[Sequence, Activity]) -> None:
        """Note what each waiting sequence waits for.

        Args:
            found: the reasons of those that were looked at last and did not start.
        """
        with self._lock:
            self._refresh()
            if found != self._found or self._noted != self.changes:
                self._found = dict(found)
                self._note_activities()

    def requests(self, most: int, tenant: str | None = None) -> list[RequestStatistics]:
        """Describe all that run and then those that wait, the oldest first.

        Args:
            most: how many at most.
            tenant: whose; None for everybody's.
        """
        with self._lock:
            self._refresh()
            self._note_activities()
            everybody = [*self._claimed.values(), *self._waiting.values()]
        own = (each for each in everybody if tenant in {None, each.request.tenant})
        now = self._clock()
        return [describe_request(each, now) for each in islice(own, most)]

    def remove(self, request_id: str) -> Sequence | None:
        """Take one waiting sequence out; None when it does not wait (any more)."""
        with self._lock:
            return self._take(request_id)

    def expired(self, now: float) -> list[Sequence]:
        """Take out the waiting sequences whose deadline has passed, the earliest first."""
        with self._lock:
            late = map(self._take, self._deadlines.take_late(now))
            return [sequence for sequence in late if sequence is not None]

    def close(self) -> list[Sequence]:
        """Refuse new sequences from now on, and hand out those that have never run."""
        with self._lock:
            self._closed = True
            new = [s for s in self._waiting.values() if s.status is SequenceStatus.WAITING]
            for sequence in new:
                self._take(sequence.request.id)
            return new

    def leave(self) -> None:
        """Refuse new sequences, and count nothing of what is left for tenants: nobody serves it."""
        with self._lock:
            self._closed = True
        self._use.leave(self._places)

    @property
    def changes(self) -> int:
        """Grows whenever one comes, starts, ends or waits again, or a place elsewhere is free."""
        return self._changes + self._places.changes

    @property
    def running(self) -> int:
        """How many are claimed and not released."""
        return self._order.running

    def __len__(self) -> int:
        return len(self._waiting)

    def _claimants(self, among: Collection[str] | None) -> list[str]:
        if among is None:
            return self._order.claimants()
        able = (each for each in among if self._order.may_start(each) and self._order.offers(each))
        return sorted(able, key=lambda each: (self._order.service(each), each))

    def _spent(self, sequence: Sequence) -> bool:
        """Whether a sequence must not start, as its tenant has spent its tokens with any model."""
        tenant = sequence.request.tenant
        if sequence.status is SequenceStatus.PREEMPTED:
            return False
        if not self._quotas.refills_in(tenant, self._clock()):
            return False
        self._hold(tenant)
        return True

    def _hold(self, tenant: str) -> None:
        if tenant not in self._order.held:
            self._changes += 1
            self._order.hold(tenant)

    def _spend(self, tenant: str, tokens: float) -> None:
        """Take tokens from a tenant's minute; when they are spent, it is held until it has more."""
        now = self._clock()
        self._quotas.charge(tenant, tokens, now)
        if self._quotas.refills_in(tenant, now):
            self._hold(tenant)

    def _refresh(self) -> None:
        """Take note of who has tokens again, and of places that other queues took or gave back."""
        for tenant in self._places.take_changed():
            self._order.look_at(tenant)
        now = self._clock()
        for tenant in [t for t in self._order.held if not self._quotas.refills_in(t, now)]:
            self._changes += 1
            self._order.let_go(tenant)

    def _wait(self, sequence: Sequence) -> None:
        request = sequence.request
        self._waiting[request.id] = sequence
        self._deadlines.add(sequence)
        now, activity = self._clock(), self._activity_of(sequence)
        if sequence.times is None:
            sequence.times = Times(activity, now, request.before)
        sequence.note(activity, now)

    def _note_activities(self) -> None:
        self._noted, now = self.changes, self._clock()
        for sequence in self._waiting.values():
            sequence.note(self._activity_of(sequence), now)

    def _activity_of(self, sequence: Sequence) -> Activity:
        """Say what a waiting sequence waits for."""
        entry = entry_of(sequence.request)
        if self._order.head(entry.tenant, entry.conversation) != entry.id:
            return Activity.CONVERSATION
        if entry.tenant in self._order.held:
            resumes = sequence.status is SequenceStatus.PREEMPTED
            return self._found.get(sequence, Activity.QUOTA) if resumes else Activity.QUOTA
        if not self._order.may_start(entry.tenant):
            return Activity.TENANT
        return self._found.get(sequence, Activity.SLOT)

    def _take(self, request_id: str) -> Sequence | None:
        sequence = self._waiting.get(request_id)
        if sequence is not None:
            self._changes += 1
            self._order.remove(request_id)
            self._leave(sequence)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has left the order."""
        del self._waiting[sequence.request.id]
        self._found.pop(sequence, None)

    def _share(self, tenant: str) -> Share:
        return Share(tenant, self._order.service(tenant), self._order.weight(tenant))
