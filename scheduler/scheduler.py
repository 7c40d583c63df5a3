"""Who waits, who runs, who is preempted, and who starts next."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from ..cachestore.restoration import Known
from .fairness.entry import Candidate, Policy, Priority
from .fairness.order import rank
from .fairness.slots import Slot, own_preemption, preemption
from .policy import age
from .precedence import Precedence
from .queue import ConversationQueue
from .selection import WAITS_FOR, Readiness, Selection, select
from .sequence import Sequence, SequenceStatus
from .times import Activity

_LOOKS = 64
"""Sequences that are looked at for one that can start; what comes after them waits till later."""

_WORTH_PASSING = 32
"""Tokens in the cache by which one request passes another; those with less keep their order."""

_DRIFT = 16
"""Steps after which it is asked again who has to yield, though nobody came or went."""

_GAP = 2 * Policy().quantum
"""Tokens per weight by which tenants are apart before a slot changes hands; see `preemption`."""


class PrefixLookup(Protocol):
    """Knows what is in the cache; `KVCacheManager` is the real one."""

    def shall_wait(self, sequence: Sequence, running: Iterable[Sequence], /) -> bool:
        """Whether another's prefill is about to bring much of a prompt into the cache."""
        ...

    def page_in(self, sequence: Sequence, /) -> bool:
        """Whether to wait until what is on disk of a sequence's tokens is read."""
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
        """Whether a sequence can start beside those that run."""
        ...


class Scheduler:
    """Holds every sequence between its arrival and its end.

    Sequences that were preempted for want of memory start before those that wait, and those that
    wait in the queue's order. Where one tenant has more than its part of the slots and another,
    with credit, less, a sequence yields its slot and waits again. So does one of priority `batch`
    where an interactive one of its tenant could start.

    Attributes:
        waiting: not started yet, in order within each conversation.
        running: at work, oldest first.
        preempted: without state until there is memory for them, oldest first.

    Args:
        waiting: the queue.
        kv_cache: knows what is in the cache.
        memory: knows what fits.
        max_batch: the most sequences that run at once.
        token_bytes: those that the model reads for a decoded token, its weights: what is restored
            is charged by its bytes, so many as a token.
    """

    def __init__(
        self,
        waiting: ConversationQueue,
        kv_cache: PrefixLookup,
        memory: Room,
        max_batch: int,
        token_bytes: int = 1 << 30,
    ) -> None:
        self._token_bytes = token_bytes
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self._kv_cache = kv_cache
        self._memory = memory
        self._max_batch = max_batch
        self._last = Selection(None, None, 0)
        self._precedence = Precedence()
        self._fair_at: int | None = None  # the queue's changes when nobody had to yield
        self._fair_for = 0  # steps since
        self._starts = 0
        self._claimant: Sequence | None = None  # for whom one has yielded
        self._found: dict[Sequence, Activity] = {}  # of those that did not start when looked at

    @property
    def idle(self) -> bool:
        """Whether it holds no sequence."""
        return not (self.running or self.preempted or len(self.waiting))

    @property
    def reading(self) -> bool:
        """Whether a sequence waits for state from the disk."""
        return self._last.reading > 0

    @property
    def held(self) -> bool:
        """Whether all that wait must not start yet: their tenants have spent their tokens."""
        return len(self.waiting) > 0 and not self.waiting.offers()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.running or sequence in self.preempted

    def start_next(self) -> Sequence | None:
        """Let the next sequence run, if one may."""
        if len(self.running) >= self._max_batch:
            self._note(Activity.SLOT)
            return None
        self._found = {}
        sequence = self._resume() if self.preempted else self._claim()
        self._note()
        if sequence is not None:
            self.running.append(sequence)
        return sequence

    def stuck(self) -> Sequence | None:
        """The sequence that lacks memory though none runs; it no longer waits."""
        short = self._last.short
        if self.running or short is None:
            return None
        if short in self.preempted:
            return short
        if not self._take(short):
            return None
        self.preempted.append(short)
        return short

    def victim(self) -> Sequence | None:
        """The running sequence that is preempted next: the youngest, but not the only one."""
        return self.running[-1] if len(self.running) > 1 else None

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the preempted ones; the oldest there resumes first."""
        self.running.remove(sequence)
        self.preempted.insert(0, sequence)

    def yielding(self) -> Sequence | None:
        """The running sequence that yields to another one, which then starts next.

        That is another tenant's, or an interactive one of its own tenant: see `preemption` and
        `own_preemption`. The former goes first.

        It is asked for once a step, where none can start for want of a slot or of memory.
        """
        short = len(self.running) >= self._max_batch or self._last.short is not None
        if self.preempted or not (short and self.running and len(self.waiting)):
            return None
        # Who has which part changes with the queue; services drift apart slowly.
        if self._fair_at == self.waiting.changes and self._fair_for < _DRIFT:
            self._fair_for += 1
            return None
        self._fair_at, self._fair_for = self.waiting.changes, 0
        self._charge()
        slots = self._slots()
        for claimant in self.waiting.claimants():
            slot = preemption(slots, claimant, _GAP)
            if slot is not None and self._let_claim(self._ranked(claimant.tenant)):
                return self._in_slot(slot)
        for claimant in self.waiting.claimants({s.share.tenant for s in slots if s.gives_way}):
            slot = own_preemption(slots, claimant)
            if slot is not None and self._let_claim(self._interactive(claimant.tenant)):
                return self._in_slot(slot)
        return None

    def _slots(self) -> list[Slot]:
        shares = self.waiting.shares({each.request.tenant for each in self.running})
        return [
            Slot(s.request.id, shares[s.request.tenant], _decodes(s), s.request.priority)
            for s in sorted(self.running, key=lambda s: s.number)
        ]

    def _in_slot(self, slot: Slot) -> Sequence:
        return next(each for each in self.running if each.request.id == slot.id)

    def _let_claim(self, ranked: Iterable[Sequence]) -> bool:
        """Have the first that could start have what is given up; False where none could."""
        self._fair_at = None  # it may be able to start at the next step
        found = select(ranked, self._readiness)
        self._claimant = found.start or found.short
        return self._claimant is not None

    def _interactive(self, tenant: str) -> Iterator[Sequence]:
        """Yield a tenant's interactive sequences that may start: what is due may be of a batch."""
        for sequence in self._ranked(tenant):
            if sequence.request.priority is Priority.INTERACTIVE:
                yield sequence

    def weigh(self) -> None:
        """Note with prompts which tenants' are computed first."""
        tenants = {s.request.tenant for s in self.running if s.num_left_to_prefill}
        shares = self.waiting.shares(tenants) if tenants else {}  # which takes the queue's lock
        self._precedence.note(self.running, {key: each.weight for key, each in shares.items()})

    def prefilled(self, chosen: Mapping[Sequence, int]) -> None:
        """Note whose prompts advanced, and by how many tokens."""
        age(self.running, chosen)
        self._precedence.charge(chosen)

    def put_back(self, sequence: Sequence) -> None:
        """Have a running sequence wait again, in its place. Its state is the cache's by now."""
        self._charge()
        self.running.remove(sequence)
        self.waiting.put_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, and let its conversation go on."""
        self._charge()
        begins = sequence.status in {SequenceStatus.WAITING, SequenceStatus.PREFILL}
        if begins and sequence in self:  # the rest of its prompt is not computed
            spared = min(sequence.num_left_to_prefill, sequence.num_charged_of_prompt)
            self.waiting.charge([(sequence, -spared)])
        for among in (self.running, self.preempted):
            if sequence in among:
                among.remove(sequence)
        self.waiting.release(sequence)

    def _resume(self) -> Sequence | None:
        self._last = select(self.preempted[:1], self._readiness)
        if self._last.start is not None:
            self.preempted.remove(self._last.start)
        return self._last.start

    def _claim(self) -> Sequence | None:
        """Take the next sequence from the queue.

        To look at one reads the cache and starts the disk: the queue is not locked meanwhile,
        and the chosen one may have left it since.
        """
        claimant, self._claimant = self._claimant, None
        self._last = Selection(None, None, 0)
        if not len(self.waiting):
            return None
        self._charge()
        if claimant is not None and (found := self._start_claimant(claimant)) is not None:
            return found.start
        ranked = self._ranked()
        while True:
            self._last = select(ranked, self._readiness)
            chosen = self._last.start
            if chosen is None or self._take(chosen):
                return chosen

    def _start_claimant(self, sequence: Sequence) -> Selection | None:
        """Start the one for whom another has yielded; None where that is off.

        While it lacks memory still, nobody else takes what was given up for it.
        """
        readiness = self._readiness(sequence) if self.waiting.waits(sequence) else None
        if readiness is Readiness.READY and self._take(sequence):
            return Selection(sequence, None, 0)
        if readiness is not Readiness.MEMORY:
            return None
        self._claimant = sequence
        self._last = Selection(None, sequence, 0)
        return self._last

    def _ranked(self, tenant: str | None = None) -> Iterator[Sequence]:
        """Yield those that may start, the first to start first: some of all, or a tenant's.

        What is cached is asked of a window at a time: the next one is made of those that are left.
        """
        passed: set[str] = set()
        while len(passed) < _LOOKS and (offers := self.waiting.offers(passed, tenant)):
            yield from self._in_order(offers)
            passed.update(candidate.entry.id for candidate, _ in offers)

    def _in_order(self, offers: list[tuple[Candidate, Sequence]]) -> list[Sequence]:
        found = {candidate.entry.id: sequence for candidate, sequence in offers}
        window = [candidate for candidate, _ in offers]
        ranked = rank(window, lambda entry: self._worth(found[entry.id]))
        return [found[entry.id] for entry in ranked]

    def _take(self, sequence: Sequence) -> bool:
        """Claim a sequence, and charge it for the prompt that is to be computed."""
        started = sequence.status is SequenceStatus.PREEMPTED
        if not started:
            self._starts += 1
            sequence.number = self._starts
        left = len(sequence.tokens) - 1 - self._cached(sequence)
        sequence.num_charged_of_prompt = 0 if started else max(0, left)
        return self.waiting.claim(sequence, sequence.num_charged_of_prompt)

    def _charge(self) -> None:
        """Charge for what was decoded and restored. For the next decision is soon enough."""
        costs = []
        for sequence in (*self.running, *self.preempted):
            decoded = len(sequence.output) - sequence.num_charged
            restored = sequence.num_restored_bytes / self._token_bytes
            if decoded or restored:
                costs.append((sequence, decoded + restored))
                sequence.num_charged += decoded
                sequence.num_restored_bytes = 0
        if costs:
            self.waiting.charge(costs)

    def _worth(self, sequence: Sequence) -> int:
        """How much is gained if a sequence goes first; one that has yielded is in its answer."""
        if sequence.status is SequenceStatus.PREEMPTED:
            return 1 << 62
        return self._cached(sequence) // _WORTH_PASSING

    def _cached(self, sequence: Sequence) -> int:
        return self._kv_cache.known(sequence).cached

    def _note(self, activity: Activity | None = None) -> None:
        """Note what those wait for that were looked at last: what was found then, or this."""
        if self._found:
            found = self._found.items()
            self.waiting.note([(s, activity or seen) for s, seen in found])
        if activity is not None:
            self._found = {}

    def _readiness(self, sequence: Sequence) -> Readiness:
        readiness = self._look(sequence)
        if readiness in WAITS_FOR:
            self._found[sequence] = WAITS_FOR[readiness]
        if readiness is Readiness.MEMORY:
            sequence.needs = self._memory.needed(sequence), self._memory.usable
        return readiness

    def _look(self, sequence: Sequence) -> Readiness:
        if self._kv_cache.shall_wait(sequence, self.running):
            return Readiness.PREFIX
        if self._kv_cache.page_in(sequence):
            return Readiness.DISK
        if self._memory.admits(sequence, self._kv_cache.known(sequence), self.running):
            return Readiness.READY
        return Readiness.MEMORY


def _decodes(sequence: Sequence) -> bool:
    """Whether its answer goes on: what is decoded again, after a preemption, is as a prompt."""
    left = sequence.num_known_tokens - sequence.num_computed_tokens
    return sequence.status is SequenceStatus.DECODE and left <= 1
