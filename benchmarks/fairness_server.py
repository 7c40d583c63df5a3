"""A server that is not there: slots, a prefix cache, and a linear price for a step."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from fairness_orders import Order
from fairness_workload import Job, Segment, Workload
from numpy.typing import NDArray


class Costs(NamedTuple):
    """Costs of a step, in seconds, and resources of the server.

    Attributes:
        step: to read the weights.
        row: for each sequence that decodes.
        token: for each prompt token.
        chunk: the most prompt tokens of a step.
        slots: sequences at once.
        cache: tokens that the prefix cache holds beside those in use.
        decoded: the service of a decoded token, in prompt tokens; 2 as in VTC.
    """

    step: float = 0.0084
    row: float = 0.0007
    token: float = 0.00084
    chunk: int = 512
    slots: int = 16
    cache: int = 128_000
    decoded: float = 2.0


class PrefixCache:
    """Segments of prompts; what was used longest ago goes first, the deepest first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held: dict[tuple[object, ...], int] = {}  # how many use it
        self._unused: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._size = 0

    def cached(self, path: list[Segment]) -> int:
        """Tokens of a prompt that are there. What is there begins at its beginning."""
        for index in range(len(path), 0, -1):
            if path[index - 1].key in self._held:
                return sum(segment.tokens for segment in path[:index])
        return 0

    def lease(self, path: list[Segment]) -> None:
        """Hold what is there of a path, and bring in the rest."""
        for key, _ in path:
            self._size -= self._unused.pop(key, 0)
            self._held[key] = self._held.get(key, 0) + 1

    def release(self, path: list[Segment]) -> None:
        """Release a path; runs without another holder may be evicted."""
        for key, tokens in reversed(path):
            self._held[key] -= 1
            if not self._held[key]:
                self._unused[key] = tokens
                self._size += tokens
        while self._size > self._budget:
            key, tokens = self._unused.popitem(last=False)
            del self._held[key]
            self._size -= tokens


@dataclass
class Outcome:
    """Results of an order on a workload.

    Attributes:
        makespan: seconds until all was served.
        full: seconds in which requests waited for a slot.
        in_full: tokens of prompts that started and of answers in that time.
        decoded: tokens of all answers.
        prompt: tokens of all prompts.
        cached: how many of them were there when their request first started.
        queued: seconds in the queue of each request, by tenant.
        gap: the most that two tenants' services moved apart while both waited.
        wanted: answer tokens asked for while arrivals lasted, by tenant.
        given: answer tokens decoded while arrivals lasted, by tenant.
        longest_prompt: tokens computed for one request, at most.
        preempted: how often a slot was taken.
        gaps: seconds, and `gap` until then, about one sample a second.
    """

    makespan: float = 0.0
    full: float = 0.0
    in_full: int = 0
    decoded: int = 0
    prompt: int = 0
    cached: int = 0
    queued: list[list[float]] = field(default_factory=list)
    gap: float = 0.0
    wanted: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    longest_prompt: int = 0
    preempted: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)


class Gaps:
    """How far the services of two tenants move apart while both wait."""

    def __init__(self, tenants: int) -> None:
        self._low = np.full((tenants, tenants), np.inf)
        self._high = np.full((tenants, tenants), -np.inf)
        self.most = 0.0

    def observe(self, service: NDArray[np.float64], waits: list[int]) -> None:
        """Look at all pairs. A pair of which one does not wait starts again."""
        waiting = np.asarray(waits, dtype=bool)
        both = waiting[:, None] & waiting
        apart = service[:, None] - service
        self._low = np.where(both, np.minimum(self._low, apart), np.inf)
        self._high = np.where(both, np.maximum(self._high, apart), -np.inf)
        self.most = max(self.most, float((self._high - self._low).max()))


class Server:
    """Serves a workload in one order, step by step."""

    def __init__(self, workload: Workload, order: Order, costs: Costs) -> None:
        self._workload = workload
        self._order = order
        self._costs = costs
        self._cache = PrefixCache(costs.cache)
        self._running: list[Job] = []
        self._leased: dict[str, list[Segment]] = {}
        self._coming = [(c.start, c.name, c, 0, [c.system]) for c in workload.conversations]
        heapq.heapify(self._coming)
        self._waiting = [0] * workload.tenants
        self._service = np.zeros(workload.tenants)
        self._gaps = Gaps(workload.tenants)
        self._now = 0.0
        self._starts = 0
        self.outcome = Outcome(
            queued=[[] for _ in range(workload.tenants)],
            wanted=[0] * workload.tenants,
            given=[0] * workload.tenants,
        )

    def run(self) -> Outcome:
        """Serve all of it."""
        while self._coming or self._running or any(self._waiting):
            if not self._running and not any(self._waiting):
                self._now = max(self._now, self._coming[0][0])
            self._arrive()
            before = self.outcome.prompt + self.outcome.decoded, self._now
            self._fill()
            full = any(self._waiting)
            self._step()
            if full:
                self.outcome.in_full += self.outcome.prompt + self.outcome.decoded - before[0]
                self.outcome.full += self._now - before[1]
            self._gaps.observe(self._service, self._waiting)
            self._sample()
        self.outcome.makespan = self._now
        self.outcome.gap = self._gaps.most
        return self.outcome

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            arrived, _, conversation, turn, path = heapq.heappop(self._coming)
            message = conversation.turns[turn].message
            key = (conversation.name, turn)
            job = Job(conversation, turn, [*path, Segment(key, message)], arrived)
            if arrived < self._workload.seconds:
                self.outcome.wanted[job.tenant] += job.answer
            self._wait(job)

    def _wait(self, job: Job) -> None:
        self._waiting[job.tenant] += 1
        self._order.put(job)

    def _fill(self) -> None:
        """Start jobs while there are slots; then see whether one must be given up."""
        while any(self._waiting):
            if len(self._running) == self._costs.slots and not self._preempt():
                return
            job = self._order.choose(lambda job: self._cache.cached(job.path))
            if job is None:
                return
            self._start(job)

    def _start(self, job: Job) -> None:
        there = self._cache.cached(job.path)
        cached = min(there, job.prompt - 1)
        job.left = job.prompt - cached
        job.started = self._starts
        self._starts += 1
        self._order.start(job, job.left)
        self._service[job.tenant] += job.left
        self._waiting[job.tenant] -= 1
        self._running.append(job)
        held = [s for s, end in zip(job.path, _ends(job.path), strict=True) if end <= there]
        self._cache.lease(held)
        self._leased[job.id] = held
        self.outcome.longest_prompt = max(self.outcome.longest_prompt, job.left)
        if job.queued is None:
            job.queued = self._now - job.arrived
            self.outcome.queued[job.tenant].append(job.queued)
            self.outcome.prompt += job.prompt
            self.outcome.cached += cached

    def _preempt(self) -> bool:
        job = self._order.preempt(self._running)
        if job is None:
            return False
        self._stop(job)
        self.outcome.preempted += 1
        self._waiting[job.tenant] += 1
        return True

    def _stop(self, job: Job) -> None:
        """Leave the batch; what was answered becomes part of the prompt."""
        self._running.remove(job)
        if job.answered > job.kept:
            key = (job.conversation.name, job.turn, job.answered)
            job.path = [*job.path, Segment(key, job.answered - job.kept)]
            self._lease(job)
            job.kept = job.answered
        self._cache.release(self._leased.pop(job.id))

    def _lease(self, job: Job) -> None:
        """Bring all of a path into the cache."""
        held = self._leased[job.id]
        self._cache.lease(job.path[len(held) :])
        self._leased[job.id] = job.path

    def _step(self) -> None:
        """Compute one chunk of a prompt, the shortest first, and a token of each answer."""
        decoding = [job for job in self._running if not job.left]
        prompts = [job for job in self._running if job.left]
        took = self._costs.step + self._costs.row * len(decoding)
        if prompts:
            first = min(prompts, key=lambda job: (job.left, job.started))
            chunk = min(first.left, self._costs.chunk)
            took += self._costs.token * chunk
            first.left -= chunk
            if not first.left:
                self._lease(first)
        self._now += took
        for job in decoding:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        job.answered += 1
        self.outcome.decoded += 1
        self._order.charge(job, self._costs.decoded)
        self._service[job.tenant] += self._costs.decoded
        if self._now < self._workload.seconds:
            self.outcome.given[job.tenant] += 1
        if job.answered == job.answer:
            self._end(job)

    def _end(self, job: Job) -> None:
        turn = job.conversation.turns[job.turn]
        self._order.end(job)
        self._stop(job)
        if job.turn + 1 < len(job.conversation.turns):
            after = (self._now + turn.think, job.conversation.name)
            heapq.heappush(self._coming, (*after, job.conversation, job.turn + 1, job.path))

    def _sample(self) -> None:
        """Note the gap about once a second."""
        taken = self.outcome.gaps
        if not taken or self._now - taken[-1][0] >= 1:
            taken.append((self._now, self._gaps.most))


def _ends(path: list[Segment]) -> Iterator[int]:
    end = 0
    for segment in path:
        end += segment.tokens
        yield end
