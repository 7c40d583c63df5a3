"""What an engine tells of itself after each step."""

from collections import Counter
from collections.abc import Callable
from typing import Generic

from ..cachestore.tries import CacheStatistics
from .kv_cache_manager import KVCacheManager
from .memory import MemoryPlanner
from .runner import C, ModelRunner, O, P, T
from .scheduler import Scheduler
from .statistics import EngineStatistics, describe

_DESCRIBED_EVERY = 1.0
"""Seconds after which the cache is described anew; at the end of a request it always is."""


class EngineReport(Generic[C, P, O, T]):
    """Publishes statistics as a whole, so that any thread may read the latest.

    Attributes:
        totals: what is counted since the start; whoever does something adds to them.
        latest: what was published last.

    Args:
        runner: of the model.
        kv_cache: the cache of its state.
        memory: says what is held.
        scheduler: says who runs.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: ModelRunner[C, P, O, T],
        kv_cache: KVCacheManager[C],
        memory: MemoryPlanner[C, P],
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        self.totals = Counter[str]()
        self._runner = runner
        self._kv_cache = kv_cache
        self._memory = memory
        self._scheduler = scheduler
        self._clock = clock
        self._cache = CacheStatistics()
        self._describe_at = 0.0
        self._steps = 0
        self._step_seconds = 0.0
        self._last_step_at = clock()
        self.publish()

    def begin_work(self) -> None:
        """Note that the engine was idle until now, not stalled."""
        self._last_step_at = self._clock()

    def end_step(self) -> None:
        """Count a step, and publish what came of it."""
        now = self._clock()
        self._steps += 1
        self._step_seconds += now - self._last_step_at
        self._last_step_at = now
        self.publish()

    @property
    def is_cache_due(self) -> bool:
        """Whether the cache was described too long ago."""
        return self._clock() >= self._describe_at

    def describe_cache(self) -> None:
        """Describe the cache anew. It takes the longer the more tenants there are."""
        self._cache = self._kv_cache.statistics()
        self._describe_at = self._clock() + _DESCRIBED_EVERY

    def publish(self) -> None:
        """Replace the latest statistics by those of now."""
        scheduler = self._scheduler
        self.latest = EngineStatistics(
            **self.totals,
            batch_shapes=len(self._runner.shapes),
            page_ins=self._kv_cache.page_ins,
            cache=self._cache,
            memory=self._memory.use(),
            running=tuple(map(describe, (*scheduler.running, *scheduler.preempted))),
            steps=self._steps,
            step_seconds=self._step_seconds,
            last_step_at=self._last_step_at,
        )
