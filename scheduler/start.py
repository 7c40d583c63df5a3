"""Which waiting sequence starts next, what the others wait for, and which running one gives way.

Everything here reads what the cache, the disk and the memory have, and changes nothing. The engine
acts on what was found: it starts a sequence, has state read from disk, or has a running sequence
publish its prompt early.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
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
    """The beginning of a prompt that another sequence is computing."""

    publisher: Sequence  # the sequence that computes it
    tokens: int  # how many tokens both begin with


class PrefixLookup(Protocol):
    """Knows what is in the cache; `KVCacheManager` is the real one."""

    def awaited(self, sequence: Sequence, running: Iterable[Sequence], /) -> Awaited | None:
        """Return the beginning of a prompt that a running sequence is about to publish."""
        ...

    def is_on_disk(self, sequence: Sequence, /) -> bool:
        """Return True if a sequence shall wait for state that is read from disk."""
        ...

    def known(self, sequence: Sequence, /) -> Known:
        """Return how much of a sequence is in the cache."""
        ...


class Room(Protocol):
    """Knows what fits; `MemoryPlanner` is the real one."""

    def admits(self, sequence: Sequence, known: Known, running: list[Sequence], /) -> bool:
        """Return True if a sequence can start beside those that run."""
        ...


class Look(NamedTuple):
    """What a candidate waits for."""

    sequence: Sequence  # the candidate
    waits_for: Activity | None  # `PREFIX`, `DISK` or `MEMORY`; None if it can start
    awaited: Awaited | None = None  # the beginning that it waits for, if that is `PREFIX`


class Selection(NamedTuple):
    """The answer of `select`."""

    start: Sequence | None = None  # the sequence that starts next, or None
    # the sequence that lacks memory and that none may overtake, or None
    short: Sequence | None = None
    waiting: tuple[Look, ...] = ()  # looks at the candidates before that one, or at all
    # the sequence for which another one has yielded, if it still waits
    reserved_for: Sequence | None = None

    @property
    def waits(self) -> dict[Sequence, Activity]:
        """What the candidates wait for."""
        return {each.sequence: each.waits_for for each in self.waiting if each.waits_for}

    @property
    def reads(self) -> bool:
        """True if a sequence waits for the disk."""
        return any(each.waits_for is Activity.DISK for each in self.waiting)


def select(candidates: Iterable[Sequence], look: Callable[[Sequence], Look]) -> Selection:
    """Choose the sequence that starts next: the first candidate that can.

    Those that wait for the disk or for another's prefill are passed over, and one that lacks
    memory is not. Candidates after the chosen one are not looked at.
    """
    waiting: list[Look] = []
    reading = 0
    for sequence in candidates:
        found = look(sequence)
        if found.waits_for is None:
            return Selection(sequence, None, tuple(waiting))
        waiting.append(found)
        if found.waits_for is Activity.MEMORY:
            return Selection(None, sequence, tuple(waiting))
        reading += found.waits_for is Activity.DISK
        if reading == READ_AHEAD:
            break
    return Selection(None, None, tuple(waiting))


class Ranking:
    """The order of the sequences that wait, by the cache as it is when they are first looked up.

    Several start by one ranking: to look up the cached prefix of all that are left takes as long
    as all else that is done to start one. The queue is not locked meanwhile.
    """

    def __init__(self, waiting: ConversationQueue, kv_cache: PrefixLookup) -> None:
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._worths: dict[Sequence, int] = {}

    def candidates(self, tenant: str | None = None) -> Iterator[Sequence]:
        """Yield those that may start, the first to start first: some of all, or a tenant's.

        The cache is asked about a window at a time: the next one is made of those that are left.
        """
        passed: set[str] = set()
        while len(passed) < _LOOKS and (offers := self._waiting.offers(passed, tenant)):
            yield from self._in_order(offers)
            passed.update(candidate.entry.id for candidate, _ in offers)

    def _in_order(self, offers: list[tuple[Candidate, Sequence]]) -> list[Sequence]:
        found = {candidate.entry.id: sequence for candidate, sequence in offers}
        window = [candidate for candidate, _ in offers]
        ranked = rank(window, lambda entry: self._worth(found[entry.id]))
        return [found[entry.id] for entry in ranked]

    def _worth(self, sequence: Sequence) -> int:
        """How much is gained if a sequence goes first; one that has yielded is in its answer."""
        if sequence.status is SequenceStatus.PREEMPTED:
            return 1 << 62
        if sequence not in self._worths:
            cached = self._kv_cache.known(sequence).cached
            self._worths[sequence] = cached // _WORTH_PASSING
        return self._worths[sequence]


class Slot(NamedTuple):
    """A running sequence."""

    id: str  # of its request
    share: Share  # of its tenant
    decodes: bool  # its prompt is complete
    priority: Priority = Priority.INTERACTIVE  # of its request
    conversation: str = ""  # its unit, in which it would wait before what came later
    is_due: bool = False  # it started because others of its tenant had passed it over for long

    @property
    def gives_way(self) -> bool:
        """True if it yields to an interactive request of its own tenant.

        One that started as due does not: it would start in vain, and be passed over for ever.
        """
        return self.decodes and self.priority is Priority.BATCH and not self.is_due


class Yielding(NamedTuple):
    """Which running sequence gives its slot to which waiting one."""

    victim: Sequence | None = None  # the former, or None
    # the latter, for which the slot is reserved; None without a victim
    claimant: Sequence | None = None
    # looks at sequences that had a slot to take, and could not start
    waiting: tuple[Look, ...] = ()
    is_fair: bool = True  # no tenant had a slot to take


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
    less than a quantum ahead of the least served: with a gap of two quanta at least the claimant is
    served the difference before that.

    A sequence whose prompt is incomplete is preempted for the first reason only, and where no
    complete one can be: what was computed of it is in the cache when it starts again.
    """
    held = Counter(slot.share.tenant for slot in slots)
    weights = {slot.share.tenant: slot.share.weight for slot in slots}
    weights[claimant.tenant] = claimant.weight
    a_weight = len(slots) / sum(weights.values())
    own = held[claimant.tenant]
    lacks = own + 1 <= max(1.0, a_weight * claimant.weight)

    def gives(slot: Slot) -> bool:
        share, slots_held = slot.share, held[slot.share.tenant]
        if lacks and share.tenant != claimant.tenant and slots_held - 1 >= a_weight * share.weight:
            return True
        larger = slots_held * claimant.weight > own * share.weight
        return slot.decodes and larger and share.service - claimant.service > gap

    giving = [slot for slot in reversed(slots) if gives(slot)]
    return max(giving, key=lambda slot: (slot.decodes, slot.share.service), default=None)


def own_preemption(slots: Items[Slot], claimant: Share, conversation: str) -> Slot | None:
    """Choose the sequence that is preempted for an interactive request of its own tenant.

    It is the tenant's youngest one of priority `batch` that decodes. It starts again when no
    interactive request of its tenant could, or when so many have started before it that it is due;
    then it keeps its slot, so that none goes to and fro. One of the same conversation does not
    yield: it would wait before the request that it yielded to.
    """
    for slot in reversed(slots):
        own = slot.share.tenant == claimant.tenant and slot.conversation != conversation
        if own and slot.gives_way:
            return slot
    return None


def interactive(candidates: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield the interactive ones: a tenant's due request may be of a batch."""
    return (s for s in candidates if s.request.priority is Priority.INTERACTIVE)
