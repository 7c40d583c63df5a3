"""Which step memory allows: plans, prices and reserves it; the engine's side of the pool."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from ..cachestore.ledger import Kind, Size
from ..cachestore.pool import MemoryPool
from ..cachestore.restoration import Known
from ..models.kv.sequence_cache import SequenceCache
from ..models.runner import ModelRunner
from ..models.step_plan import StepPlan
from .policy import NO_PRECEDENCE, Batch, ChunkSize, plan
from .sequence import Sequence
from .statistics import MemoryUse

_LEAST_CHUNK = 16  # tokens; chunks are not cut further, because what a chunk takes of its own stays
_GROWTH = 256  # tokens for which each running sequence must have room when another starts


class Affordable(NamedTuple):
    """A step for which memory is reserved: its calls, and the model's plan of them."""

    batch: Batch
    plan: StepPlan


class MemoryPlanner:
    """Prices what sequences and steps take, and asks the pool for it."""

    def __init__(self, pool: MemoryPool, runner: ModelRunner) -> None:
        self._pool = pool
        self._runner = runner
        self._held = pool.ledger.account(Kind.TAIL)
        self._transient = pool.ledger.account(Kind.TRANSIENT)
        # after a preemption: number of sequences that went on, and bytes that no lease retained
        self._full: tuple[int, int] | None = None

    @property
    def usable(self) -> int:
        """Bytes of the budget that may be held: some is kept for copies."""
        return self._pool.limit.nbytes

    def use(self) -> MemoryUse:
        """Describe the ledger."""
        ledger = self._pool.ledger
        held = {kind.value: size.nbytes for kind, size in ledger.by_kind().items()}
        return MemoryUse(budget=self._pool.budget.nbytes, buffers=ledger.total.buffers, **held)

    @property
    def others_busy(self) -> bool:
        """True if requests of another model are at work, which will give memory back."""
        return bool(self._pool.busy - {self})

    def record(self, caches: Collection[SequenceCache]) -> None:
        """Record in the ledger what running sequences have of their own by now."""
        (self._pool.busy.add if caches else self._pool.busy.discard)(self)
        self._held.set(Size(*self._runner.held_by(caches)))

    def admits(self, sequence: Sequence, known: Known, running: Items[Sequence]) -> bool:
        """Return True if a sequence can start beside those that run.

        They all must be able to go on until this one's first tokens are there. If none runs, it
        starts if its worst case fits, even if known state of it must be evicted first, which
        `make_room` does: a lease on that can take more than it spares. Beside as many as went on
        after a preemption none starts before there is more to spare: entering their batch takes
        more than this estimate, and a sequence that is preempted at once has cost time for nothing.
        """
        most, spare = self._full or (len(running) + 1, 0)
        if running and len(running) >= most and self._pool.spare <= spare:
            return False
        if self._pool.fits(self._beside(sequence, known, running)):
            return True
        return not running and self._pool.fits(self._worst_case(sequence))

    def make_room(self, sequence: Sequence, known: Known) -> bool:
        """Evict state if only the worst case of a sequence fits; True if less may be known."""
        if self._pool.fits(self._beside(sequence, known, ())):
            return False
        return self._pool.make_room(self._worst_case(sequence))

    def _beside(self, sequence: Sequence, known: Known, running: Items[Sequence]) -> Size:
        """Size of a sequence's start, and of the growth of those that run meanwhile."""
        total, profile = len(sequence.tokens), self._runner.profile
        need = Size(*profile.start(total - known.cached, total)) + known.idle
        for other in running:
            need += Size(profile.kept(other.num_left_to_prefill + _GROWTH))
        return need

    def note_preemption(self, running: Items[Sequence]) -> None:
        """Remember that only these sequences fit."""
        self._full = len(running), self._pool.spare

    def needed(self, sequence: Sequence) -> int:
        """Bytes that a sequence takes to start, alone and with nothing of it known."""
        return self._worst_case(sequence).nbytes

    def may_restart(self, sequence: Sequence) -> bool:
        """Return True if the last running sequence shall restart in a smaller batch.

        Its batch may have been made for many. One that did so and has not come further would do so
        for ever.
        """
        advanced = sequence.num_computed_tokens > sequence.prefill.furthest
        return advanced and self._worst_case(sequence).within(self._pool.limit)

    def afford(
        self,
        running: Items[Sequence],
        size: ChunkSize,
        caches: Mapping[Sequence, SequenceCache],
        precedence: Mapping[str, float] = NO_PRECEDENCE,
    ) -> Affordable | None:
        """Plan a step that fits, and reserve what it takes; see `plan`.

        Copies that the step can do without are left out first. Then the prefill chunk is cut as far
        as need be, and held. On a grid it is held at once.

        Returns:
            None if not even a decode fits: a sequence must be preempted.
        """
        batch = plan(running, size, precedence)
        while (planned := self._reserved(batch, caches)) is None:
            if batch.prefill is None:
                return None
            size = size._replace(most=size.most // 2)
            if size.grid > 1 or size.most < _LEAST_CHUNK:
                batch = Batch(batch.decode)  # prompts that are held do not come
                if not batch.calls:
                    return None
            else:
                batch = plan(running, size, precedence)
        return Affordable(batch, planned)

    def release(self) -> None:
        """Give back what was reserved; nothing computes any more."""
        self._transient.close()

    def close(self) -> None:
        """Give everything back: the model is unloaded."""
        self._held.close()
        self.release()
        self._pool.busy.discard(self)

    def _reserved(self, batch: Batch, caches: Mapping[Sequence, SequenceCache]) -> StepPlan | None:
        """Plan a batch's step, and reserve what it takes; None where that does not fit."""
        decode = [] if batch.decode is None else [caches[s] for s in batch.decode.sequences]
        chunk = batch.prefill
        prefill = None if chunk is None else (caches[chunk.sequences[0]], chunk.tokens)
        completes = chunk is not None and chunk.completes
        costs = []
        ways = [(batch.coming, True), (0, True), (0, False)]
        for coming, may_copy in dict.fromkeys(ways):
            step = self._runner.plan(
                decode, prefill, completes=completes, coming=coming, may_copy=may_copy
            )
            cost = self._runner.cost(step)
            if cost not in costs and self._pool.reserve(self._transient, Size(*cost)):
                return step
            costs.append(cost)
        return None

    def _worst_case(self, sequence: Sequence) -> Size:
        return Size(*self._runner.profile.worst_case(sequence.num_known_tokens))
