"""Which waiting sequence starts next, what the others wait for, and which running one gives way.

A look at a sequence reads what the cache, the disk and the memory have, and changes nothing. The
scheduler acts on what was found: it starts a sequence, has state read from disk, or has a running
sequence publish its prompt early.
"""

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from ..cachestore.restoration import Known
from .order import Candidate, Priority, rank
from .queue import ConversationQueue
from .sequence import Sequence, SequenceStatus
from .tenants import Share
from .times import Activity

READ_AHEAD = 8
"""Sequences that wait for the disk at once; those after them are not looked at yet."""

_LOOKS = 64
"""Sequences that are looked at for one that can start; those after them wait for the next step."""

_WORTH_PASSING = 32
"""Tokens in the cache by which one request passes another; those with less keep their order."""


class Awaited(NamedTuple):
    """The beginning of a prompt that another sequence is computing.

    Attributes:
        publisher: the sequence that computes it.
        tokens: how many tokens both begin with.
    """

    publisher: Sequence
    tokens: int


class PrefixLookup(Protocol):
    """Knows what is in the cache; `KVCacheManager` is the real one."""

    def awaited(self, sequence: Sequence, running: Iterable[Sequence], /) -> Awaited | None:
        """Return the beginning of a prompt that a running sequence is about to publish."""
        ...

    def is_on_disk(self, sequence: Sequence, /) -> bool:
        """Return True if a sequence shall wait for state that is read from disk."""
        ...

    def publish_early(self, awaited: Awaited, /) -> None:
        """Have a running sequence publish the beginning of its prompt."""
        ...

    def page_in(self, sequence: Sequence, /) -> bool:
        """Have state of a sequence's tokens read from disk."""
        ...

    def known(self, sequence: Sequence, /) -> Known:
        """How much of a sequence is in the cache."""
        ...


class Room(Protocol):
    """Knows what fits; `MemoryPlanner` is the real one."""

    @property
    def usable(self) -> int:
        """Bytes that may be held."""
        ...

    def needed(self, sequence: Sequence, /) -> int:
        """Bytes that a sequence takes to start alone."""
        ...

    def admits(self, sequence: Sequence, known: Known, running: list[Sequence], /) -> bool:
        """Return True if a sequence can start beside those that run."""
        ...

    def make_room(self, sequence: Sequence, known: Known, /) -> bool:
        """Evict known state of an admitted sequence if it cannot start otherwise. None may run."""
        ...


class Readiness(enum.Enum):
    """A candidate's answer: it can start, or what it waits for."""

    READY = enum.auto()
    PREFIX = enum.auto()
    """Another sequence is computing much of its prompt."""
    DISK = enum.auto()
    """Its state is on disk."""
    MEMORY = enum.auto()
    """There is no room for it beside those that run."""


WAITS_FOR = {
    Readiness.PREFIX: Activity.PREFIX,
    Readiness.DISK: Activity.DISK,
    Readiness.MEMORY: Activity.MEMORY,
}


class Look(NamedTuple):
    """The state of one candidate.

    Attributes:
        sequence: the candidate.
        readiness: of it.
        awaited: the beginning that it waits for, if its readiness is `PREFIX`.
    """

    sequence: Sequence
    readiness: Readiness
    awaited: Awaited | None = None


class Selection(NamedTuple):
    """The answer of `select`.

    Attributes:
        start: the sequence that starts next, or None.
        short: the sequence that lacks memory and that none may overtake, or None.
        waiting: what was found of the candidates before that one, or of all.
    """

    start: Sequence | None = None
    short: Sequence | None = None
    waiting: tuple[Look, ...] = ()

    @property
    def reading(self) -> int:
        """Number of sequences that wait for the disk."""
        return sum(each.readiness is Readiness.DISK for each in self.waiting)


def select(candidates: Iterable[Sequence], look: Callable[[Sequence], Look]) -> Selection:
    """Choose the sequence that starts next: the first candidate that is ready.

    Those that wait for the disk or for another's prefill are passed over, and one that lacks
    memory is not. Candidates after the chosen one are not looked at.

    Args:
        candidates: in their order.
        look: at one of them.
    """
    waiting: list[Look] = []
    reading = 0
    for sequence in candidates:
        found = look(sequence)
        if found.readiness is Readiness.READY:
            return Selection(sequence, None, tuple(waiting))
        waiting.append(found)
        if found.readiness is Readiness.MEMORY:
            return Selection(None, sequence, tuple(waiting))
        reading += found.readiness is Readiness.DISK
        if reading == READ_AHEAD:
            break
    return Selection(None, None, tuple(waiting))


class Candidates:
    """Ranks the sequences that wait, and looks at them. The queue is not locked meanwhile.

    Args:
        waiting: the queue.
        kv_cache: knows what is in the cache.
        memory: knows what fits.
    """

    def __init__(self, waiting: ConversationQueue, kv_cache: PrefixLookup, memory: Room) -> None:
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._memory = memory
        self._worths: dict[Sequence, int] | None = None  # as they were first, in `starting`

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Several start in the block: they are ranked by the cache as it is at first.

        For each that starts all those that are left are ranked, and to look up what is cached of
        them takes as long as all else that is done to start one.
        """
        self._worths = {}
        try:
            yield
        finally:
            self._worths = None

    def ranked(self, tenant: str | None = None) -> Iterator[Sequence]:
        """Yield those that may start, the first to start first: some of all, or a tenant's.

        The cache is asked about a window at a time: the next one is made of those that are left.
        """
        passed: set[str] = set()
        while len(passed) < _LOOKS and (offers := self._waiting.offers(passed, tenant)):
            yield from self._in_order(offers)
            passed.update(candidate.entry.id for candidate, _ in offers)

    def interactive(self, tenant: str) -> Iterator[Sequence]:
        """Yield a tenant's interactive sequences that may start: what is due may be of a batch."""
        for sequence in self.ranked(tenant):
            if sequence.request.priority is Priority.INTERACTIVE:
                yield sequence

    def look(self, sequence: Sequence, running: list[Sequence]) -> Look:
        """Look whether a sequence can start beside those that run."""
        if (awaited := self._kv_cache.awaited(sequence, running)) is not None:
            return Look(sequence, Readiness.PREFIX, awaited)
        if self._kv_cache.is_on_disk(sequence):
            return Look(sequence, Readiness.DISK)
        if self._memory.admits(sequence, self._kv_cache.known(sequence), running):
            return Look(sequence, Readiness.READY)
        return Look(sequence, Readiness.MEMORY)

    def _in_order(self, offers: list[tuple[Candidate, Sequence]]) -> list[Sequence]:
        for candidate, sequence in offers:
            sequence.is_due = candidate.due
        found = {candidate.entry.id: sequence for candidate, sequence in offers}
        window = [candidate for candidate, _ in offers]
        ranked = rank(window, lambda entry: self._worth(found[entry.id]))
        return [found[entry.id] for entry in ranked]

    def _worth(self, sequence: Sequence) -> int:
        """How much is gained if a sequence goes first; one that has yielded is in its answer."""
        if sequence.status is SequenceStatus.PREEMPTED:
            return 1 << 62
        known = {} if self._worths is None else self._worths
        if sequence not in known:
            known[sequence] = self._kv_cache.known(sequence).cached // _WORTH_PASSING
        return known[sequence]


class Slot(NamedTuple):
    """A running sequence.

    Attributes:
        id: of its request.
        share: its tenant's.
        decodes: whether its prompt is complete.
        priority: of its request.
        conversation: of its request, in which it would wait before what came later.
        is_due: it started because others of its tenant had passed it over for long.
    """

    id: str
    share: Share
    decodes: bool
    priority: Priority = Priority.INTERACTIVE
    conversation: str = ""
    is_due: bool = False

    @property
    def gives_way(self) -> bool:
        """True if it yields to an interactive request of its own tenant.

        One that started as due does not: it would start in vain, and be passed over for ever.
        """
        return self.decodes and self.priority is Priority.BATCH and not self.is_due


def preemption(slots: Items[Slot], claimant: Share, gap: float) -> Slot | None:
    """Choose the sequence that is preempted at a step's border for a tenant that waits.

    A tenant's part of the slots is as its weight among those that have slots or claim one. It is
    the youngest sequence of the most served tenant that has more slots than the claimant for its
    weight, where

    - the claimant has fewer slots than its part, and the tenant more than its own: who comes is
      served at once, however long others' answers are; or
    - the tenant was served more than the claimant by over `gap` tokens per weight.

    Neither goes to and fro. A slot that was taken for the first reason leaves both with their part
    at least, or at most. For the second, a preempted sequence starts again when its tenant is
    less than a quantum ahead of the least served: with `gap` well over the quantum
    the claimant is served the difference before the sequence comes back, and the tenant again
    before it is preempted again.

    A sequence whose prompt is incomplete is preempted for the first reason only, and where no
    complete one can be: what was computed of it is in the cache when it starts again.

    Args:
        slots: of the batch, the oldest first.
        claimant: a tenant that could start a request.
        gap: between services, in tokens per weight; at least two quanta.
    """
    parts = _Parts(slots, claimant)
    chosen: Slot | None = None
    for slot in slots:
        spread = parts.lets(slot.share)
        ahead = slot.share.service - claimant.service > gap and parts.larger(slot.share)
        if not (spread or (ahead and slot.decodes)):
            continue
        if chosen is None or _rank(slot) >= _rank(chosen):
            chosen = slot
    return chosen


def own_preemption(slots: Items[Slot], claimant: Share, conversation: str) -> Slot | None:
    """Choose the sequence that is preempted for an interactive request of its own tenant.

    It is the tenant's youngest one of priority `batch` that decodes: each start brings a request
    nearer to its end. How many slots tenants have stays as it is, so that nothing is asked of their
    services. The preempted sequence starts again when no interactive request of its tenant could,
    or when so many have started before it that it is due; then it keeps its slot, so that none goes
    to and fro. One of the same conversation does not yield: it would wait before the request that
    it yielded to.

    Args:
        slots: of the batch, the oldest first.
        claimant: a tenant that could start an interactive request if it had a slot more.
        conversation: of that request.
    """
    for slot in reversed(slots):
        own = slot.share.tenant == claimant.tenant and slot.conversation != conversation
        if own and slot.gives_way:
            return slot
    return None


def _rank(slot: Slot) -> tuple[bool, float]:
    return slot.decodes, slot.share.service


class _Parts:
    """How many slots each tenant has, and its part of them."""

    def __init__(self, slots: Items[Slot], claimant: Share) -> None:
        self._held = Counter(slot.share.tenant for slot in slots)
        self._claimant = claimant
        weights = {slot.share.tenant: slot.share.weight for slot in slots}
        weights[claimant.tenant] = claimant.weight
        self._a_weight = len(slots) / sum(weights.values())

    def lets(self, share: Share) -> bool:
        """Return True if a slot of a tenant is the claimant's by their weights."""
        claimed = self._held[self._claimant.tenant] + 1
        left = self._held[share.tenant] - 1
        return (
            share.tenant != self._claimant.tenant
            and claimed <= max(1.0, self._a_weight * self._claimant.weight)
            and left >= self._a_weight * share.weight
        )

    def larger(self, share: Share) -> bool:
        """Return True if a tenant has more slots than the claimant, for its weight."""
        claimant = self._claimant
        return (
            self._held[share.tenant] * claimant.weight > self._held[claimant.tenant] * share.weight
        )
