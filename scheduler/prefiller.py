"""Prefill: a chunk of one prompt a step, as long as streams can wait for it."""

from collections import Counter
from collections.abc import Callable
from typing import Generic

from .kv_cache_manager import KVCacheManager
from .lifecycle import Lifecycle
from .pace import PrefillPace
from .policy import ChunkSize, PrefillChunk
from .runner import C, ModelRunner, O, P, T
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .times import Activity


class Prefiller(Generic[C, P, O, T]):
    """Advances prompts, and measures how long that takes.

    Args:
        runner: of the model.
        kv_cache: has the sequences' state.
        scheduler: holds them.
        lifecycle: ends them.
        totals: of the engine; computed tokens are counted there.
        most: prompt tokens that one call computes.
        max_stall: the longest that a call may keep streams from their next token, in seconds.
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
        self._pace = PrefillPace(max_stall, most)
        self._exact = exact
        self._clock = clock

    def chunk_size(self) -> ChunkSize:
        """How many tokens the next call computes: fewer while others decode."""
        completing = self._runner.max_completing
        if self._exact:
            return ChunkSize(self._most, self._most, completing)
        tokens = self._pace.prefill_tokens(len(self._scheduler.decoding))
        return ChunkSize(tokens, completing=completing)

    def share(self) -> bool:
        """Publish computed state that other requests wait for.

        Returns:
            True if state was published: a request that waits may be able to start.
        """
        due = [s for s in self._scheduler.running if s.is_awaited and not s.num_left_to_share]
        for sequence in due:
            self._lifecycle.guard(sequence, self._kv_cache.prefilled)
        return any(not sequence.is_awaited for sequence in due)

    def run(self, chunk: PrefillChunk) -> O | None:
        """Compute a chunk, and wait until that is done.

        The sequence decodes from now on if the chunk completes its prompt. If the call fails,
        the sequence ends.

        Returns:
            The logits that follow a prompt that is complete; else None.
        """
        began = self._clock()
        sequence, end = chunk
        cache = self._kv_cache.caches[sequence]
        tokens = sequence.tokens[sequence.num_computed_tokens : end].tolist()
        output: O | None = None
        try:
            if chunk.completes:
                output = self._runner.complete(tokens, cache)
            else:
                self._runner.prefill(tokens, cache)
        except BaseException as error:  # noqa: BLE001  (as in `Lifecycle.guard`)
            self._lifecycle.fail(sequence, error)
            return None
        self._scheduler.prefilled(sequence, len(tokens))
        self._totals.update(prefill_tokens=len(tokens))
        sequence.num_computed_tokens = end
        if chunk.completes:
            sequence.status = SequenceStatus.DECODE
            sequence.note(Activity.DECODE, self._clock())
        self._pace.observe(len(tokens), self._clock() - began)
        return output

    def store(self, sequence: Sequence) -> None:
        """Give the cache what is due of a prompt that advanced, unless its sequence has ended."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._lifecycle.guard(sequence, self._store)

    def _store(self, sequence: Sequence) -> None:
        self._kv_cache.capture_if_due(sequence)
        self._kv_cache.prefilled(sequence)
