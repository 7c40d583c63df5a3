"""Prefill steps: chunks of prompts, several in one call where that is no slower."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from typing import Generic

import structlog

from .kv_cache_manager import KVCacheManager
from .lifecycle import Lifecycle
from .policy import ChunkSize, Joins, PrefillChunk
from .runner import C, ModelRunner, O, P, T
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .stall_bound import StallBound
from .times import Activity

log = structlog.get_logger()

_ENDS = 4
"""Steps one after the other in which somebody ended that may put off a call."""


class Prefiller(Generic[C, P, O, T]):
    """Advances prompts, and learns how long that takes.

    Args:
        runner: of the model.
        kv_cache: has the sequences' state.
        scheduler: holds them.
        lifecycle: ends them.
        totals: of the engine; what is computed is counted there.
        most: prompt tokens that one call computes.
        max_stall: the longest that a call may keep others from their next token, in seconds.
        exact: chunks are never cut, so that they are the same whatever else runs.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: ModelRunner[C, P, O, T],
        kv_cache: KVCacheManager[C],
        scheduler: Scheduler,
        lifecycle: Lifecycle[C],
        totals: Counter[str],
        *,
        most: int,
        max_stall: float,
        exact: bool,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._totals = totals
        self._most = most
        self._stall = StallBound(max_stall)
        self._exact = exact
        self._clock = clock
        self._waited = 0  # so many steps have put off the call that they planned

    @property
    def joins(self) -> Joins | None:
        """Which prompts share a call; None where each has calls of its own."""
        if not self._runner.prefills_together:
            return None
        return partial(self._stall.joins, bounded=self._bounded)

    def chunk_size(self) -> ChunkSize:
        """How much the next call computes: less while others decode."""
        if self._exact:
            return ChunkSize(self._most, grid=self._most)
        if not self._bounded:
            return ChunkSize(self._most)
        return self._stall.chunk_size(self._most)

    @property
    def _bounded(self) -> bool:
        return bool(self._scheduler.decoding) and not self._exact

    def decoded(self, seconds: float, entered: int, rows: int, *, ended: bool) -> None:
        """Hear how long it took until a decode's tokens were there, and how many entered its batch.

        Args:
            seconds: since the step began: others may start in it, and end.
            entered: prompts whose sequences did.
            rows: of the batch.
            ended: somebody did.
        """
        self._stall.observe_decode(seconds, entered, rows, ended=ended)

    def fitting(
        self, chunks: tuple[PrefillChunk, ...], spent: float, rows: int, *, ended: bool
    ) -> tuple[PrefillChunk, ...]:
        """Leave out chunks that streams cannot wait for any more; the next step plans them anew.

        A call behind somebody who ended took up to twice as long as others on a slow machine: the
        device packs what is left, and the front end has answers and next questions to see to. Where
        the decode took long already, for that or since the device met its kind for the first time,
        the call waits for the next step. Answers that began together end in two to four steps one
        after the other, so it may wait four times where somebody ended, and once elsewhere.

        Args:
            chunks: of one call.
            spent: seconds since the step began, whose decode is done.
            rows: of its batch.
            ended: somebody did.
        """
        if not chunks or not self._bounded:
            self._waited = 0
            return chunks
        tokens = [chunk.tokens for chunk in chunks]
        allowed = _ENDS if ended else 1
        if self._waited < allowed and self._stall.should_wait(tokens[0], spent, rows, ended=ended):
            self._waited += 1
            return ()
        self._waited = 0
        return chunks[: self._stall.fitting(tokens, spent, rows, ended=ended)]

    def share(self) -> bool:
        """Give the cache what others turn out to wait for, where it is computed already.

        Returns:
            Whether anything was given: one that waits may be able to start.
        """
        due = [s for s in self._scheduler.running if s.is_awaited and not s.num_left_to_share]
        for sequence in due:
            self._lifecycle.guard(sequence, self._kv_cache.prefilled)
        return any(not sequence.is_awaited for sequence in due)

    def run(self, chunks: Items[PrefillChunk], *, behind: bool) -> None:
        """Compute chunks in one call; a fault ends no prompt but one that is computed alone.

        Args:
            chunks: of the prompts.
            behind: somebody ended in the decode before it.
        """
        began = self._clock()
        try:
            self._runner.prefill(self.work(chunks))
        except BaseException as error:  # noqa: BLE001  (as in `Lifecycle.guard`)
            self.failed([sequence for sequence, _ in chunks], error)
            return
        tokens = self.advanced(chunks)
        self.store(chunks)
        # What is done for each prompt after the call keeps others waiting, too.
        self._stall.observe(tokens, self._clock() - began, len(chunks), behind=behind)

    def work(self, chunks: Items[PrefillChunk]) -> list[tuple[list[int], C]]:
        """The tokens of chunks, and the states that they advance."""
        return [
            (
                sequence.tokens[sequence.num_computed_tokens : end].tolist(),
                self._kv_cache.caches[sequence],
            )
            for sequence, end in chunks
        ]

    def advanced(self, chunks: Items[PrefillChunk]) -> int:
        """Count what was computed: a sequence whose last token was among it decodes from now on.

        Returns:
            The tokens of the call, padding included.
        """
        self._waited = 0
        tokens = len(chunks) * max(chunk.tokens for chunk in chunks)
        self._scheduler.prefilled({chunk.sequence: chunk.tokens for chunk in chunks})
        for sequence, end in chunks:
            self._totals.update(prefill_tokens=end - sequence.num_computed_tokens)
            sequence.num_computed_tokens = end
            if end == len(sequence.tokens):
                sequence.status = SequenceStatus.DECODE
                sequence.note(Activity.DECODE, self._clock())
        return tokens

    def store(self, chunks: Items[PrefillChunk]) -> None:
        """Give the cache what is due of prompts that advanced and have not ended."""
        for sequence, _ in chunks:
            if sequence.status is not SequenceStatus.FINISHED:
                self._lifecycle.guard(sequence, self._advanced)

    def _advanced(self, sequence: Sequence) -> None:
        self._kv_cache.advanced(sequence)
        self._kv_cache.prefilled(sequence)

    def failed(self, sequences: Items[Sequence], error: BaseException) -> None:
        """Fail one that was computed alone; have several that failed together be computed apart."""
        if len(sequences) == 1:
            self._lifecycle.fail(sequences[0], error)
            return
        log.warning("sequences that failed together are computed apart", exc_info=error)
        self._separate(sequences, error)

    def _separate(self, sequences: Items[Sequence], error: BaseException) -> None:
        """Have sequences that failed together start again, each in calls of its own.

        Who decodes does so in a batch, but no prompt is computed in its calls any more.

        Args:
            sequences: of which some may have ended since.
            error: that was raised.
        """
        error.__traceback__ = None  # its frames hold the state that is freed now
        for sequence in reversed(self._scheduler.running.copy()):  # the oldest resumes first
            if sequence in sequences:
                sequence.is_alone = True
                self._scheduler.preempt(sequence)
                self._lifecycle.keep(sequence, trusted=False)
                sequence.preempt(replay=self._exact)
