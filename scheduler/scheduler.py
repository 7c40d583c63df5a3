"""The sequences that wait, run or are preempted, and the next one to start or to yield.

Questions read what the cache, the disk and the memory have, and change nothing. The engine acts on
what was found: it starts a sequence, has state read from disk, or has a running sequence publish
its prompt early.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from ..cachestore.restoration import Known
from .kv_cache_manager import Awaited, KVCacheManager
from .memory import MemoryPlanner
from .order import Policy, Priority, rank
from .policy import PrefillShares, Slot, age, own_preemption, preemption
from .queue import ConversationQueue
from .request import entry_of
from .sequence import Sequence, SequenceStatus
from .times import Activity

READ_AHEAD = 8  # sequences that wait for the disk at once; those after them are not looked at yet
_LOOKS = 64  # sequences that are looked at in a step for one that can start
_WORTH_PASSING = 32  # tokens in the cache by which one request passes another
# tokens per weight by which tenants are apart before a slot changes hands; see `preemption`
_GAP = 2 * Policy().quantum


class Look(NamedTuple):
    """A look at one candidate."""

    sequence: Sequence  # the candidate
    waits_for: Activity | None  # `PREFIX`, `DISK` or `MEMORY`; None if it can start
    awaited: Awaited | None = None  # the beginning that it waits for, if that is `PREFIX`


class Selection(NamedTuple):
    """The answer of `select`."""

    start: Sequence | None = None  # the sequence that starts next, or None
    short: Sequence | None = None  # the sequence that lacks memory: none may overtake it
    waiting: tuple[Look, ...] = ()  # looks at the candidates before that one, or at all
    reserved_for: Sequence | None = None  # another one has yielded for it, and it still waits

    @property
    def waits(self) -> dict[Sequence, Activity]:
        """The activity of each candidate that cannot start."""
        return {each.sequence: each.waits_for for each in self.waiting if each.waits_for}

    @property
    def reads(self) -> bool:
        """True if a sequence waits for the disk."""
        return any(each.waits_for is Activity.DISK for each in self.waiting)


def select(looks: Iterable[Look]) -> Selection:
    """Choose the sequence that starts next: the first candidate that can.

    Those that wait for the disk or for another's prefill are passed over, and one that lacks
    memory is not. Candidates after the chosen one are not looked at.
    """
    waiting: list[Look] = []
    reading = 0
    for look in looks:
        if look.waits_for is None:
            return Selection(look.sequence, None, tuple(waiting))
        waiting.append(look)
        if look.waits_for is Activity.MEMORY:
            return Selection(None, look.sequence, tuple(waiting))
        reading += look.waits_for is Activity.DISK
        if reading == READ_AHEAD:
            break
    return Selection(None, None, tuple(waiting))


class Ranking:
    """The order of the sequences that wait, by the cache as it is when they are first looked up.

    Several start by one ranking: to look up the cached prefix of all that are left takes as long
    as all else that is done to start one. The queue is not locked meanwhile.
    """

    def __init__(self, waiting: ConversationQueue, kv_cache: KVCacheManager) -> None:
        self._waiting = waiting
        self._kv_cache = kv_cache
        self._worths: dict[Sequence, int] = {}

    def candidates(self, tenant: str | None = None) -> Iterator[Sequence]:
        """Yield those that may start, the first to start first: some of all, or a tenant's."""
        # The cache is asked about a window at a time: the next one is made of those that are left.
        passed: set[str] = set()
        while len(passed) < _LOOKS and (offers := self._waiting.offers(passed, tenant)):
            found = {candidate.entry.id: sequence for candidate, sequence in offers}
            window = [candidate for candidate, _ in offers]
            for entry in rank(window, lambda each: self._worth(found[each.id])):  # noqa: B023
                yield found[entry.id]
            passed.update(found)

    def _worth(self, sequence: Sequence) -> int:
        """How much is gained if a sequence goes first; one that has yielded is in its answer."""
        if sequence.status is SequenceStatus.PREEMPTED:
            return 1 << 62
        if sequence not in self._worths:
            cached = self._kv_cache.known(sequence).cached
            self._worths[sequence] = cached // _WORTH_PASSING
        return self._worths[sequence]


class Yielding(NamedTuple):
    """Which running sequence gives its slot to which waiting one."""

    victim: Sequence | None = None  # the former, or None
    claimant: Sequence | None = None  # the latter, for which the slot is reserved
    waiting: tuple[Look, ...] = ()  # looks at sequences that had a slot to take
    is_fair: bool = True  # no tenant had a slot to take


class Scheduler:
    """Holds every sequence between its arrival and its end.

    Sequences that were preempted for want of memory start before those that wait, and the others in
    the queue's order. If one tenant has more than its part of the slots and a tenant that was not
    served more has less, a sequence of the former yields its slot and waits again. So does one of
    priority `batch` if an interactive one of its tenant could start.

    Args:
        max_batch: the most sequences that run at once.
        token_bytes: weights that the model reads for a decoded token; restored bytes cost by it.
    """

    def __init__(
        self,
        waiting: ConversationQueue,
        kv_cache: KVCacheManager,
        memory: MemoryPlanner,
        max_batch: int,
        token_bytes: int = 1 << 30,
    ) -> None:
        self._token_bytes = token_bytes
        self.waiting = waiting  # not started yet, in order within each conversation
        self.running: list[Sequence] = []  # at work, oldest first
        self.preempted: list[Sequence] = []  # without state until there is memory, oldest first
        self._kv_cache = kv_cache
        self._memory = memory
        self._max_batch = max_batch
        self._prefills = PrefillShares()

    @property
    def idle(self) -> bool:
        """True if it holds no sequence."""
        return not (self.running or self.preempted or len(self.waiting))

    @property
    def at_work(self) -> list[Sequence]:
        """Sequences that run or are preempted."""
        return [*self.running, *self.preempted]

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences whose prompt is computed: they wait while others begin or end."""
        return [sequence for sequence in self.running if not sequence.num_left_to_prefill]

    @property
    def held(self) -> bool:
        """True if none that waits may start yet: their tenants have spent their tokens."""
        return len(self.waiting) > 0 and not self.waiting.offers()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.running or sequence in self.preempted

    def ranking(self) -> Ranking:
        """Rank those that wait by the cache as it is now."""
        return Ranking(self.waiting, self._kv_cache)

    def next_start(self, ranking: Ranking, reserved_for: Sequence | None) -> Selection:
        """Choose the sequence that starts next.

        While the one for which another has yielded lacks memory, no other one takes the slot.
        """
        if len(self.running) >= self._max_batch:
            return Selection(reserved_for=reserved_for)
        if self.preempted:
            found = select(map(self._look, self.preempted[:1]))
            return found._replace(reserved_for=reserved_for)
        if reserved_for is not None and self.waiting.waits(reserved_for):
            found = select(map(self._look, [reserved_for]))
            if found.start is not None or found.short is not None:
                return found._replace(reserved_for=found.short)
        return select(map(self._look, ranking.candidates() if len(self.waiting) else ()))

    def next_to_yield(self, ranking: Ranking) -> Yielding:
        """Choose the running sequence that yields to another one, which then starts next."""
        looks, is_fair = list[Look](), True
        for takers in self._takers(ranking):
            found = select(map(self._look, takers))
            looks += found.waiting
            is_fair = is_fair and not takers
            if (taker := found.start or found.short) is not None:
                victim = next(s for s in self.running if s.request.id == takers[taker].id)
                return Yielding(victim, taker, tuple(looks), is_fair=False)
        return Yielding(waiting=tuple(looks), is_fair=is_fair)

    def _takers(self, ranking: Ranking) -> Iterator[dict[Sequence, Slot]]:
        """Yield each claimant's sequences that could take a slot, and which one."""
        decoding = {s.request.id: _decodes(s) for s in self.running}
        slots = [
            Slot(entry.id, share, decoding[entry.id], entry.priority, entry.conversation, is_due)
            for entry, share, is_due in self.waiting.runs(decoding)
        ]
        for claimant in self.waiting.claimants():
            if (slot := preemption(slots, claimant, _GAP)) is not None:
                yield dict.fromkeys(ranking.candidates(claimant.tenant), slot)
        for claimant in self.waiting.claimants({s.share.tenant for s in slots if s.gives_way}):
            yield {
                taker: slot
                for taker in ranking.candidates(claimant.tenant)
                if taker.request.priority is Priority.INTERACTIVE
                if (slot := own_preemption(slots, claimant, entry_of(taker.request).conversation))
            }

    def may_yield(self, selection: Selection) -> bool:
        """Return True if one may have to yield, as none can start for want of a slot or memory."""
        short = len(self.running) >= self._max_batch or selection.short is not None
        return short and bool(self.running and len(self.waiting)) and not self.preempted

    def prompt_precedence(self) -> dict[str, float]:
        """Whose prompts come first; see `PrefillShares`."""
        return self._prefills.precedence(self.running, self._prompt_weights())

    def start(self, sequence: Sequence, known: Known) -> bool:
        """Let a chosen sequence run, charged for the rest of its prompt; False if it left."""
        if sequence in self.preempted:
            self.preempted.remove(sequence)
        elif not self._claim(sequence, known):
            return False
        self.running.append(sequence)
        return True

    def take_stuck(self, short: Sequence | None) -> Sequence | None:
        """Take the sequence that lacks memory though none runs out of the queue."""
        if self.running or short is None or short in self.preempted:
            return None if self.running else short
        if not self._claim(short, self._kv_cache.known(short)):
            return None
        self.preempted.append(short)
        return short

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the preempted ones; the oldest there resumes first."""
        self.running.remove(sequence)
        self.preempted.insert(0, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Move a running sequence back to its place in the queue. The cache has its state."""
        self.charge()
        self.running.remove(sequence)
        self.waiting.put_back(sequence)

    def advance_prompt(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens of a prompt that were computed."""
        weights = self._prompt_weights()
        age(self.running, sequence, tokens)
        self._prefills.charge(sequence.request.tenant, tokens, weights)
        sequence.num_computed_tokens += tokens

    def forget(self, sequence: Sequence) -> None:
        """Let no step be for a sequence any more."""
        for among in (self.running, self.preempted):
            if sequence in among:
                among.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, and let its conversation go on; a fault in its bill stops neither."""
        with ExitStack() as parts:  # the last one first, each whatever the others raise
            parts.callback(self.waiting.release, sequence)
            parts.callback(self.forget, sequence)
            self.charge()
            begins = sequence.status in {SequenceStatus.WAITING, SequenceStatus.PREFILL}
            if begins and sequence in self:  # the rest of its prompt is not computed
                spared = min(sequence.num_left_to_prefill, sequence.bill.prompt)
                self.waiting.charge([(sequence, -spared)])

    def charge(self) -> None:
        """Charge for what was decoded and restored. For the next decision is soon enough."""
        costs = []
        for sequence in self.at_work:
            bill = sequence.bill
            decoded = len(sequence.output) - bill.answer
            restored = bill.restored_bytes / self._token_bytes
            if decoded or restored:
                costs.append((sequence, decoded + restored))
                bill.answer += decoded
                bill.restored_bytes = 0
        if costs:
            self.waiting.charge(costs)

    def _claim(self, sequence: Sequence, known: Known) -> bool:
        started = sequence.status is SequenceStatus.PREEMPTED
        sequence.bill.prompt = 0 if started else max(0, len(sequence.tokens) - known.cached)
        return self.waiting.claim(sequence, sequence.bill.prompt)

    def _look(self, sequence: Sequence) -> Look:
        """Look whether a sequence can start beside those that run."""
        if (awaited := self._kv_cache.awaited(sequence, self.running)) is not None:
            return Look(sequence, Activity.PREFIX, awaited)
        if self._kv_cache.paging.is_on_disk(sequence):
            return Look(sequence, Activity.DISK)
        fits = self._memory.admits(sequence, self._kv_cache.known(sequence), self.running)
        return Look(sequence, None if fits else Activity.MEMORY)

    def _prompt_weights(self) -> dict[str, float]:
        tenants = {s.request.tenant for s in self.running if s.num_left_to_prefill}
        return {tenant: self.waiting.weight(tenant) for tenant in tenants}


def _decodes(sequence: Sequence) -> bool:
    """Return True if its answer goes on: a replay after a preemption counts as a prompt."""
    left = sequence.num_known_tokens - sequence.num_computed_tokens
    return sequence.status is SequenceStatus.DECODE and left <= 1
