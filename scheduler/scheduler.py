"""The sequences that wait, run or are preempted, and the next one to start or to yield."""

from contextlib import ExitStack

from ..cachestore.restoration import Known
from .order import Policy
from .policy import PrefillShares, age
from .queue import ConversationQueue
from .request import entry_of
from .sequence import Sequence, SequenceStatus
from .start import (
    Look,
    PrefixLookup,
    Ranking,
    Room,
    Selection,
    Slot,
    Yielding,
    interactive,
    own_preemption,
    preemption,
    select,
)
from .times import Activity

_GAP = 2 * Policy().quantum
"""Tokens per weight by which tenants are apart before a slot changes hands; see `preemption`."""


class Scheduler:
    """Holds every sequence between its arrival and its end.

    Sequences that were preempted for want of memory start before those that wait, and the others in
    the queue's order. If one tenant has more than its part of the slots and a tenant that was not
    served more has less, a sequence of the former yields its slot and waits again. So does one of
    priority `batch` if an interactive one of its tenant could start.

    `next_start` and `next_to_yield` are questions: they change nothing.

    Args:
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
        self.waiting = waiting  # not started yet, in order within each conversation
        self.running: list[Sequence] = []  # at work, oldest first
        # without state until there is memory for them, oldest first
        self.preempted: list[Sequence] = []
        self._kv_cache = kv_cache
        self._memory = memory
        self._max_batch = max_batch
        self._prefills = PrefillShares()

    # -- questions ---------------------------------------------------------------------

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
            found = select(self.preempted[:1], self._look)
            return found._replace(reserved_for=reserved_for)
        if reserved_for is not None and self.waiting.waits(reserved_for):
            found = select([reserved_for], self._look)
            if found.start is not None or found.short is not None:
                return found._replace(reserved_for=found.short)
        return select(ranking.candidates() if len(self.waiting) else (), self._look)

    def next_to_yield(self, ranking: Ranking) -> Yielding:
        """Choose the running sequence that yields to another one, which then starts next.

        That is another tenant's, or an interactive one of its own tenant: see `preemption` and
        `own_preemption`. The former goes first.
        """
        slots, looks, is_fair = self._slots(), list[Look](), True
        for claimant in self.waiting.claimants():
            slot = preemption(slots, claimant, _GAP)
            if slot is None:
                continue
            is_fair = False
            found = select(ranking.candidates(claimant.tenant), self._look)
            looks += found.waiting
            if (taker := found.start or found.short) is not None:
                return Yielding(self._in_slot(slot), taker, tuple(looks), is_fair)
        for claimant in self.waiting.claimants({s.share.tenant for s in slots if s.gives_way}):
            takers = {
                taker: slot
                for taker in interactive(ranking.candidates(claimant.tenant))
                if (slot := own_preemption(slots, claimant, entry_of(taker.request).conversation))
            }
            found = select(takers, self._look)
            looks += found.waiting
            is_fair = is_fair and not takers
            if (taker := found.start or found.short) is not None:
                return Yielding(self._in_slot(takers[taker]), taker, tuple(looks), is_fair)
        return Yielding(waiting=tuple(looks), is_fair=is_fair)

    def may_yield(self, selection: Selection) -> bool:
        """Return True if one may have to yield, as none can start for want of a slot or memory."""
        short = len(self.running) >= self._max_batch or selection.short is not None
        return short and bool(self.running and len(self.waiting)) and not self.preempted

    def victim(self) -> Sequence | None:
        """The running sequence that is preempted next: the youngest, but not the only one."""
        return self.running[-1] if len(self.running) > 1 else None

    def prompt_precedence(self) -> dict[str, float]:
        """Whose prompts come first; see `PrefillShares`."""
        return self._prefills.precedence(self.running, self._prompt_weights())

    # -- acts --------------------------------------------------------------------------

    def start(self, sequence: Sequence, known: Known) -> bool:
        """Let a chosen sequence run, and charge it for what is not known of its prompt.

        Returns False if it has left the queue since.
        """
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
        if self._kv_cache.is_on_disk(sequence):
            return Look(sequence, Activity.DISK)
        fits = self._memory.admits(sequence, self._kv_cache.known(sequence), self.running)
        return Look(sequence, None if fits else Activity.MEMORY)

    def _prompt_weights(self) -> dict[str, float]:
        tenants = {s.request.tenant for s in self.running if s.num_left_to_prefill}
        return {tenant: self.waiting.weight(tenant) for tenant in tenants}

    def _slots(self) -> list[Slot]:
        decoding = {s.request.id: _decodes(s) for s in self.running}
        return [
            Slot(entry.id, share, decoding[entry.id], entry.priority, entry.conversation, is_due)
            for entry, share, is_due in self.waiting.runs(decoding)
        ]

    def _in_slot(self, slot: Slot) -> Sequence:
        return next(each for each in self.running if each.request.id == slot.id)


def _decodes(sequence: Sequence) -> bool:
    """Return True if its answer goes on: a replay after a preemption counts as a prompt."""
    left = sequence.num_known_tokens - sequence.num_computed_tokens
    return sequence.status is SequenceStatus.DECODE and left <= 1
