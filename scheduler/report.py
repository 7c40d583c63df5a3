"""Statistics of the engine after each step."""

from collections import Counter
from collections.abc import Callable, Iterable

from ..cachestore.tries import CacheStatistics
from ..models.runner import ModelRunner
from .kv_cache_manager import KVCacheManager
from .memory import MemoryPlanner
from .sequence import Sequence
from .statistics import EngineStatistics, describe

_DESCRIBED_EVERY = 1.0  # seconds; at the end of a request the cache always is


class EngineReport:
    """Publishes statistics as a whole, so that any thread may read the latest."""

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache: KVCacheManager,
        memory: MemoryPlanner,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._memory = memory
        self._clock = clock
        self._totals = Counter[str]()
        self._cache = CacheStatistics()
        self._described_at = float("-inf")
        self._steps = 0
        self._step_seconds = 0.0
        self._last_step_at = clock()
        self.latest = EngineStatistics()
        self.publish(())

    def begin_work(self) -> None:
        """Note that the engine was idle until now, not stalled."""
        self._last_step_at = self._clock()

    def end_step(
        self, at_work: Iterable[Sequence], counts: Counter[str], *, cache_changed: bool = False
    ) -> None:
        """Count a step, and publish.

        If the cache changed it is described again, which takes longer with more tenants.
        """
        now = self._clock()
        self._totals.update(counts)
        self._steps += 1
        self._step_seconds += now - self._last_step_at
        self._last_step_at = now
        if cache_changed or now >= self._described_at + _DESCRIBED_EVERY:
            self._cache = self._kv_cache.cache.tries.statistics()
            self._described_at = now
        self.publish(at_work)

    def publish(self, at_work: Iterable[Sequence]) -> None:
        """Replace the latest statistics by those of now."""
        self.latest = EngineStatistics(
            **self._totals,
            batch_shapes=len(self._runner.shapes),
            page_ins=self._kv_cache.paging.page_ins,
            cache=self._cache,
            memory=self._memory.use(),
            running=tuple(map(describe, at_work)),
            steps=self._steps,
            step_seconds=self._step_seconds,
            last_step_at=self._last_step_at,
        )
