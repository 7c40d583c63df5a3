"""The orders that are compared: first come, longest prefix, VTC, and the daemon's own."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from fairness_workload import Job

from umbel.scheduler.order import Entry, FairOrder, Policy, rank
from umbel.scheduler.policy import Slot, preemption


class Order(Protocol):
    """Holds the jobs that wait."""

    def put(self, job: Job) -> None:
        """Let a job wait."""
        ...

    def choose(self, cached: Callable[[Job], int]) -> Job | None:
        """Name the job that starts next, if any waits."""
        ...

    def start(self, job: Job, tokens: float) -> None:
        """Take the job out, and charge it for its prompt."""
        ...

    def charge(self, job: Job, tokens: float) -> None:
        """Charge a running job."""
        ...

    def preempt(self, running: Sequence[Job]) -> Job | None:
        """Choose who gives up its slot in a full batch; it waits again."""
        ...

    def end(self, job: Job) -> None:
        """Forget a running job."""
        ...


class FirstCome:
    """FCFS: who came first goes first."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()

    def put(self, job: Job) -> None:
        """At the end."""
        self._waiting.append(job)

    def choose(self, cached: Callable[[Job], int]) -> Job | None:
        """Name the first."""
        del cached
        return self._waiting[0] if self._waiting else None

    def start(self, job: Job, tokens: float) -> None:
        """Take it out."""
        del tokens
        self._waiting.remove(job)

    def charge(self, job: Job, tokens: float) -> None:
        """Charge nothing."""

    def preempt(self, running: Sequence[Job]) -> Job | None:
        """Return nothing: no request yields."""
        del running
        return None

    def end(self, job: Job) -> None:
        """Nothing is known of it."""


class LongestPrefix(FirstCome):
    """LPM: of all that wait, the longest cached prefix goes first (SGLang's order)."""

    def choose(self, cached: Callable[[Job], int]) -> Job | None:
        """Look at all of them."""
        return max(self._waiting, key=cached, default=None)


class VirtualTokenCounter(FirstCome):
    """VTC: the least served tenant's oldest job goes first (arXiv 2401.00588).

    It charges prompt tokens that are computed, where the paper charges all: it has no cache.
    """

    def __init__(self, tenants: int) -> None:
        super().__init__()
        self._queues: list[deque[Job]] = [deque() for _ in range(tenants)]
        self._counters = [0.0] * tenants
        self._last = 0

    def put(self, job: Job) -> None:
        """A tenant that comes back is lifted to the least of those that wait."""
        if not self._queues[job.tenant]:
            active = [c for c, q in zip(self._counters, self._queues, strict=True) if q]
            least = min(active) if active else self._counters[self._last]
            self._counters[job.tenant] = max(self._counters[job.tenant], least)
        self._queues[job.tenant].append(job)

    def choose(self, cached: Callable[[Job], int]) -> Job | None:
        """Look at one job of each tenant."""
        del cached
        waiting = [tenant for tenant, queue in enumerate(self._queues) if queue]
        if not waiting:
            return None
        return self._queues[min(waiting, key=lambda tenant: self._counters[tenant])][0]

    def start(self, job: Job, tokens: float) -> None:
        """Take it out, and charge its tenant."""
        self._queues[job.tenant].popleft()
        if not self._queues[job.tenant]:
            self._last = job.tenant
        self.charge(job, tokens)

    def charge(self, job: Job, tokens: float) -> None:
        """Charge its tenant."""
        self._counters[job.tenant] += tokens


class Fair:
    """The daemon's order, with preemption where `gap` is given."""

    def __init__(self, policy: Policy, gap: float | None) -> None:
        self._order = FairOrder(policy)
        self._gap = gap
        self._claimant: str | None = None
        self._jobs: dict[str, Job] = {}

    def put(self, job: Job) -> None:
        """Under its tenant and its conversation."""
        self._jobs[job.id] = job
        self._order.put(Entry(job.id, str(job.tenant), str(job.conversation.name)))

    def choose(self, cached: Callable[[Job], int]) -> Job | None:
        """Look at a window of them, or at those of a tenant for which a slot was freed."""
        claimant, self._claimant = self._claimant, None
        window = self._order.window() if claimant is None else self._order.offers(claimant)
        ranked = rank(window, lambda entry: cached(self._jobs[entry.id]))
        return self._jobs[ranked[0].id] if ranked else None

    def start(self, job: Job, tokens: float) -> None:
        """Take it out, and charge tenant and conversation."""
        self._order.start(job.id, tokens)

    def charge(self, job: Job, tokens: float) -> None:
        """Charge tenant and conversation."""
        self._order.charge(job.id, tokens)

    def preempt(self, running: Sequence[Job]) -> Job | None:
        """Where a tenant has less than its part of the slots, or was served too little."""
        if self._gap is None:
            return None
        slots = [
            Slot(job.id, self._order.share(str(job.tenant)), not job.left)
            for job in sorted(running, key=lambda job: job.started)
        ]
        for claimant in self._order.claimants():
            if chosen := preemption(slots, claimant, self._gap):
                self._claimant = claimant.tenant
                self._order.preempt(chosen.id)
                return self._jobs[chosen.id]
        return None

    def end(self, job: Job) -> None:
        """Let its conversation go on."""
        self._order.end(job.id)
        del self._jobs[job.id]
