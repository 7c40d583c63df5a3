"""Who may wait where memory is short: for the disk tier, or for requests of another model."""

from collections.abc import Callable
from typing import Any

from .kv_cache_manager import KVCacheManager
from .memory import MemoryPlanner

_DISK_PATIENCE = 10.0
"""Seconds without a write for which a request waits for memory that holds what is being written."""


class Shortage:
    """Says whether what lacks memory waits for it. Belongs to the MLX thread.

    Args:
        kv_cache: whose state the disk tier writes.
        memory: knows of other models' requests.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager[Any],
        memory: MemoryPlanner[Any, Any],
        clock: Callable[[], float],
    ) -> None:
        self._kv_cache = kv_cache
        self._memory = memory
        self._clock = clock
        self._disk_since: float | None = None
        self._writes = 0  # when it began to wait for the disk, or that last answered
        self._others = False

    @property
    def waits(self) -> bool:
        """Whether something waits."""
        return self._disk_since is not None or self._others

    def begin_step(self) -> None:
        """Ask anew whether other models' requests are at work."""
        self._others = False

    def end(self) -> None:
        """There was memory for a step."""
        self._disk_since = None

    def awaits_others(self) -> bool:
        """Whether what lacks is held by requests of another model. Their ends are waited for."""
        self._others = self._memory.others_busy
        return self._others

    def awaits_disk(self) -> bool:
        """Whether what lacks is about to be given up by the disk tier, which writes it.

        A disk that does not answer is not waited for.
        """
        if not self._kv_cache.writing:
            return False
        now, writes = self._clock(), self._kv_cache.writes
        if self._disk_since is None or writes != self._writes:
            self._disk_since, self._writes = now, writes
        return now - self._disk_since < _DISK_PATIENCE
