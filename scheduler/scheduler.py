"""The sequences that wait, run or are preempted, and the next one to start."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING

from ..cachestore.restoration import Known
from .order import Policy
from .policy import age
from .precedence import Precedence
from .queue import ConversationQueue
from .request import entry_of
from .sequence import Sequence, SequenceStatus
from .start import (
    WAITS_FOR,
    Candidates,
    Look,
    PrefixLookup,
    Readiness,
    Room,
    Selection,
    Slot,
    own_preemption,
    preemption,
    select,
)
from .tenants import Share

if TYPE_CHECKING:
    from .times import Activity

_DRIFT = 16
"""Steps after which it is decided again which sequence yields, though no request came or went."""

_GAP = 2 * Policy().quantum
"""Tokens per weight by which tenants are apart before a slot changes hands; see `preemption`."""


class Scheduler:
    """Holds every sequence between its arrival and its end.

    Sequences that were preempted for want of memory start before those that wait, and the others in
    the queue's order. If one tenant has more than its part of the slots and a tenant that was not
    served more has less, a sequence of the former yields its slot and waits again. So does one of
    priority `batch` if an interactive one of its tenant could start.

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
        self._candidates = Candidates(waiting, kv_cache, memory)
        self._max_batch = max_batch
        self._last = Selection()
        self._found: dict[Sequence, Activity] = {}  # of those that did not start when looked at
        self._precedence = Precedence()
        self._fair_at: int | None = None  # the queue's changes when none had to yield
        self._fair_for = 0  # steps since
        self._starts = 0
        self._claimant: Sequence | None = None  # for whom one has yielded

    @property
    def idle(self) -> bool:
        """True if it holds no sequence."""
        return not (self.running or self.preempted or len(self.waiting))

    @property
    def short(self) -> bool:
        """True if a sequence waits for memory."""
        return bool(self.preempted) or self._last.short is not None

    @property
    def decoding(self) -> list[Sequence]:
        """Those that run and whose prompt is computed: they wait while others begin or end."""
        return [sequence for sequence in self.running if not sequence.num_left_to_prefill]

    @property
    def reading(self) -> bool:
        """True if a sequence waits for state from the disk."""
        return self._last.reading > 0

    @property
    def held(self) -> bool:
        """True if none that waits may start yet: their tenants have spent their tokens."""
        return len(self.waiting) > 0 and not self.waiting.offers()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.running or sequence in self.preempted

    def starting(self) -> AbstractContextManager[None]:
        """Rank all that start in the block by the cache as it is now; see `Candidates`."""
        return self._candidates.starting()

    def start_next(self) -> Sequence | None:
        """Let the next sequence run, if one may."""
        self._found = {}
        sequence = None
        if len(self.running) < self._max_batch:
            sequence = self._resume() if self.preempted else self._claim()
        if sequence is None:
            self.waiting.note(self._found)
        else:
            self.running.append(sequence)  # at once: what is nowhere would never end
        return sequence

    def take_stuck(self) -> Sequence | None:
        """Take the sequence that lacks memory though none runs out of the queue."""
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
        # Parts change with the queue; services drift apart slowly.
        if self._fair_at == self.waiting.changes and self._fair_for < _DRIFT:
            self._fair_for += 1
            return None
        self._fair_at, self._fair_for = self.waiting.changes, 0
        self._charge()
        slots = self._slots()
        for claimant in self.waiting.claimants():
            slot = preemption(slots, claimant, _GAP)
            if slot is not None and self._let_claim(self._candidates.ranked(claimant.tenant)):
                return self._in_slot(slot)
        for claimant in self.waiting.claimants({s.share.tenant for s in slots if s.gives_way}):
            to_own = partial(_to_own, slots, claimant)
            found = self._let_claim(filter(to_own, self._candidates.interactive(claimant.tenant)))
            slot = None if found is None else to_own(found)
            if slot is not None:
                return self._in_slot(slot)
        return None

    def weigh(self) -> None:
        """Note with prompts which tenants' are computed first."""
        tenants = {s.request.tenant for s in self.running if s.num_left_to_prefill}
        shares = self.waiting.shares(tenants) if tenants else {}  # which takes the queue's lock
        self._precedence.note(self.running, {key: each.weight for key, each in shares.items()})

    def prefilled(self, sequence: Sequence, tokens: int) -> None:
        """Note that a sequence's prompt advanced by so many tokens."""
        age(self.running, sequence, tokens)
        self._precedence.charge({sequence: tokens})

    def put_back(self, sequence: Sequence) -> None:
        """Move a running sequence back to its place in the queue. The cache has its state."""
        self._charge()
        self.running.remove(sequence)
        self.waiting.put_back(sequence)

    def at_work(self) -> list[Sequence]:
        """Take those that a step is for: without any, those that wait leave the queue."""
        return [*self.running, *self.preempted] or self.waiting.expired(math.inf)

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
            self._charge()
            begins = sequence.status in {SequenceStatus.WAITING, SequenceStatus.PREFILL}
            if begins and sequence in self:  # the rest of its prompt is not computed
                spared = min(sequence.num_left_to_prefill, sequence.num_charged_of_prompt)
                self.waiting.charge([(sequence, -spared)])

    def _slots(self) -> list[Slot]:
        shares = self.waiting.shares({each.request.tenant for each in self.running})
        return [
            Slot(
                s.request.id,
                shares[s.request.tenant],
                _decodes(s),
                s.request.priority,
                entry_of(s.request).conversation,
                s.is_due,
            )
            for s in sorted(self.running, key=lambda s: s.number)
        ]

    def _in_slot(self, slot: Slot) -> Sequence:
        return next(each for each in self.running if each.request.id == slot.id)

    def _let_claim(self, ranked: Iterable[Sequence]) -> Sequence | None:
        """Reserve a slot that is given up for the first that could start, if one could."""
        self._fair_at = None  # it may be able to start at the next step
        found = self._select(ranked)
        self._claimant = found.start or found.short
        return self._claimant

    def _resume(self) -> Sequence | None:
        found = self._select(self.preempted[:1])
        self._last = found._replace(start=None)  # it is not kept here
        if found.start is not None:
            self._prepare(found.start)
            self.preempted.remove(found.start)
        return found.start

    def _select(self, candidates: Iterable[Sequence]) -> Selection:
        """Choose the sequence that starts next, and see to what the others wait for."""
        found = select(candidates, self._look)
        for each in found.waiting:
            self._see_to(each)
        return found

    def _look(self, sequence: Sequence) -> Look:
        return self._candidates.look(sequence, self.running)

    def _see_to(self, look: Look) -> None:
        """Act on what a sequence waits for, and remember it."""
        sequence = look.sequence
        self._found[sequence] = WAITS_FOR[look.readiness]
        if look.awaited is not None:
            self._kv_cache.publish_early(look.awaited)
        elif look.readiness is Readiness.DISK:
            self._kv_cache.page_in(sequence)
        else:
            sequence.needs = self._memory.needed(sequence), self._memory.usable

    def _claim(self) -> Sequence | None:
        """Take the next sequence from the queue.

        To look at one reads the cache and starts the disk: the queue is not locked meanwhile,
        and the chosen one may have left it since.
        """
        claimant, self._claimant = self._claimant, None
        self._last = Selection()
        if not len(self.waiting):
            return None
        self._charge()
        if claimant is not None and (found := self._start_claimant(claimant)) is not None:
            return found.start
        ranked = self._candidates.ranked()
        while True:
            found = self._select(ranked)
            self._last = found._replace(start=None)
            if found.start is None or self._take(found.start):
                return found.start

    def _start_claimant(self, sequence: Sequence) -> Selection | None:
        """Start the one for whom another has yielded; None where that is off.

        While it still lacks memory, no other takes the slot.
        """
        if not self.waiting.waits(sequence):
            return None
        found = self._select([sequence])
        if found.start is not None and self._take(sequence):
            return found
        if found.short is None:
            return None
        self._claimant = sequence
        self._last = found
        return found

    def _take(self, sequence: Sequence) -> bool:
        """Claim a sequence, and charge it for the prompt that is to be computed."""
        known = self._prepare(sequence)
        started = sequence.status is SequenceStatus.PREEMPTED
        if not started:
            self._starts += 1
            sequence.number = self._starts
        left = len(sequence.tokens) - known.cached
        sequence.num_charged_of_prompt = 0 if started else max(0, left)
        return self.waiting.claim(sequence, sequence.num_charged_of_prompt)

    def _prepare(self, sequence: Sequence) -> Known:
        """Make room for a sequence that starts alone; returns what of it is in the cache then."""
        known = self._kv_cache.known(sequence)
        if not self.running and self._memory.make_room(sequence, known):
            known = self._kv_cache.known(sequence)
        return known

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


def _to_own(slots: list[Slot], claimant: Share, sequence: Sequence) -> Slot | None:
    """Choose who yields to an interactive sequence of its own tenant."""
    return own_preemption(slots, claimant, entry_of(sequence.request).conversation)


def _decodes(sequence: Sequence) -> bool:
    """Return True if its answer goes on: a replay after a preemption counts as a prompt."""
    left = sequence.num_known_tokens - sequence.num_computed_tokens
    return sequence.status is SequenceStatus.DECODE and left <= 1
