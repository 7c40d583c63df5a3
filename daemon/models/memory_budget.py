"""What weights and state of all models may take together, and what of it each has."""

import time
from collections.abc import Iterable

from ...cachestore.ledger import Kind, Size
from ...cachestore.pool import MemoryPool
from ...models.backends.memory import DeviceMemory
from ..config import Settings
from ..errors import StartError

_STATE_SHARE = 4  # where models share memory, one part in this many is never given to weights
_BUILD_SHARE = 4  # of that, one part in this many is for a model's measuring and warm-up


def clock_of_uses() -> int:
    """Milliseconds since 1970, for the recency of state: it outlives the process."""
    return time.time_ns() // 1_000_000


class MemoryBudget:
    """Divides memory between weights and state. Belongs to the MLX thread, but for `fits`.

    State has what weights leave, and never less than its share: what a model promises is measured
    by that, and so does not depend on which others are loaded.

    Attributes:
        usable: bytes for weights and state of all models.
        pool: what all state has.

    Args:
        settings: of the daemon.
        device: has the memory.
    """

    def __init__(self, settings: Settings, device: DeviceMemory) -> None:
        self.pool = MemoryPool(clock_of_uses)
        self._device = device
        self._state = settings.cache_budget
        self._shared = bool(settings.models)
        self._bodies = settings.body_budget
        left = device.budget(0, self._bodies)
        self.usable = left if settings.memory_budget is None else settings.memory_budget
        self._building = self.pool.ledger.account(Kind.TRANSIENT)
        self._weights: dict[str, int] = {}
        self._least: dict[str, int] = {}

    def fits(self, weights: int, loaded: Iterable[int]) -> bool:
        """Whether weights have room beside those of other models, with the share of state."""
        beside = sum(loaded)
        return not beside or beside + weights <= self.usable - self._share()

    def _share(self) -> int:
        return self.usable // _STATE_SHARE if self._state is None else self._state

    @property
    def held(self) -> int:
        """Bytes that weights and state of all models hold."""
        return sum(self._weights.values()) + self.pool.ledger.total.nbytes

    def enter(self, name: str, weights: int) -> int:
        """Note a model whose weights are loaded.

        Returns:
            Bytes that state may take at least for as long as the model is loaded.

        Raises:
            StartError: its weights leave nothing.
        """
        alone = self.usable - weights
        if self._state is None and alone <= 0:
            raise StartError(self._too_large(weights))
        if self._state is not None:
            least = self._state
        else:
            least = min(alone, self._share()) if self._shared else alone
        self._weights[name], self._least[name] = weights, least
        self._resize()
        return least

    def has_room(self) -> bool:
        """Whether state holds no more than it may; what it need not hold is evicted.

        Beside others, some more is kept for measuring a model and for its warm-up.
        """
        if not self._shared:
            return True
        self._building.set(Size(self.warm_up_bytes(min(self._least.values()))))
        self.pool.evict_excess()
        return self.pool.room.nbytes >= 0

    def warm_up_bytes(self, least: int) -> int:
        """What a model's measuring and warm-up may take, of the least that state has."""
        return least // _BUILD_SHARE if self._shared else least

    def built(self) -> None:
        """Give back what was kept for measuring."""
        self._building.close()

    def leave(self, name: str) -> None:
        """Forget a model that was unloaded, or could not be loaded."""
        self.built()
        self._weights.pop(name, None)
        self._least.pop(name, None)
        self._resize()

    def _resize(self) -> None:
        left = self.usable - sum(self._weights.values())
        budget = left if self._state is None else self._state
        self.pool.resize(Size(budget, self._device.buffers), max(self._least.values(), default=0))

    def _too_large(self, weights: int) -> str:
        device = self._device
        return (
            f"the model's weights take {weights} bytes and body_bytes {self._bodies}, "
            f"and of the {device.total} bytes of {device.name} "
            f"{device.usable} may be used: "
            "serve a smaller model, or set cache_bytes to try all the same"
        )
