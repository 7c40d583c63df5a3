"""What of a step the memory allows: the engine's side of the governor."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from ..cachestore.governor import Governor
from ..cachestore.ledger import Kind, Size
from ..cachestore.restoration import Known
from .forward import Forward
from .policy import Batch, plan
from .sequence import Sequence
from .statistics import MemoryUse

_LEAST_CHUNK = 16
"""Tokens; chunks are not cut further, because what a chunk takes of its own stays."""

_GROWTH = 256
"""Tokens of its answer for which each running sequence must have room when another starts."""


class MemoryPlanner:
    """Foretells what sequences and steps take, and asks the governor for it.

    Args:
        governor: of all model state.
        forward: the model.
        fixed_chunks: prefill chunks are never cut; they are held instead.
    """

    def __init__(self, governor: Governor, forward: Forward, *, fixed_chunks: bool) -> None:
        self._governor = governor
        self._forward = forward
        self._fixed_chunks = fixed_chunks
        self._tails = governor.ledger.account(Kind.TAIL)

    @property
    def budget(self) -> int:
        """Bytes that state may take at present."""
        return self._governor.budget.nbytes

    @property
    def usable(self) -> int:
        """Bytes of it that may be held: some is kept for copies."""
        return self._governor.limit.nbytes

    def use(self) -> MemoryUse:
        """Describe the ledger."""
        ledger = self._governor.ledger
        held = {kind.value: size.nbytes for kind, size in ledger.by_kind().items()}
        return MemoryUse(budget=self.budget, buffers=ledger.total.buffers, **held)

    def record(self, running: Iterable[Sequence]) -> None:
        """Record in the ledger what running sequences have of their own by now."""
        states = [sequence.states for sequence in running if sequence.states is not None]
        self._tails.set(_size(self._forward.held_by(states)))

    def admits(self, sequence: Sequence, known: Known, running: Items[Sequence]) -> bool:
        """Whether a sequence can start beside those that run.

        They all must be able to go on until this one's first tokens are there. Where nobody
        runs, one that was promised to be served is, even if what is known of it must go first:
        holding a lease on that can take more than it spares.

        Args:
            sequence: the newcomer.
            known: what of it is in memory already, and cannot be evicted under it.
            running: the others.
        """
        need = self._start(sequence, known.cached) + known.idle
        for other in running:
            need += self._growth(other)
        if self._governor.fits(need):
            return True
        return not running and self._governor.make_room(self._promise(sequence))

    def needed(self, sequence: Sequence) -> int:
        """Bytes that a sequence takes to start, alone and with nothing of it known."""
        return self._promise(sequence).nbytes

    def afford(self, running: Items[Sequence], chunk: int) -> Batch | None:
        """Plan a step that fits, and reserve what it takes.

        Prefill chunks are cut as far as need be, then held.

        Returns:
            None where not even a decode fits: a sequence must be preempted.
        """
        batch = plan(running, chunk)
        while not self._fits(batch):
            if batch.prefill is None:
                return None
            chunk //= 2
            if self._fixed_chunks or chunk < _LEAST_CHUNK:
                batch = Batch(None, 0, batch.decode)
                if batch.empty:
                    return None
            else:
                batch = plan(running, chunk)
        return batch

    def release(self) -> None:
        """Give back what was reserved; nothing computes any more."""
        self._governor.release()

    def _fits(self, batch: Batch) -> bool:
        need = Size()
        if batch.decode:
            need += _size(self._forward.step_need([s.states for s in batch.decode]))
        if batch.prefill is not None:
            tokens = batch.end - batch.prefill.num_computed_tokens
            need += _size(self._forward.chunk_need(tokens, batch.prefill.states))
        return self._governor.reserve(need)

    def _start(self, sequence: Sequence, known: int) -> Size:
        total = len(sequence.tokens)
        return _size(self._forward.start_need(total - known, total))

    def _promise(self, sequence: Sequence) -> Size:
        return _size(self._forward.promise(len(sequence.tokens)))

    def _growth(self, sequence: Sequence) -> Size:
        return Size(self._forward.kept_bytes(sequence.num_left_to_prefill + _GROWTH))


def _size(held: tuple[int, int]) -> Size:
    return Size(*held)
