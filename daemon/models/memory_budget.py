"""Division of memory between the weights of all models and their state."""

import time
from collections.abc import Iterable

from ...cachestore.ledger import Kind, Size
from ...cachestore.pool import MemoryPool
from ...models.backends.memory import DeviceMemory
from ..config import Settings
from ..errors import StartError
from .fit import state_budget, state_share, usable_bytes

_BUILD_SHARE = 4  # of the least state, one part in this many is for measuring and warm-up


def clock_of_uses() -> int:
    """Return milliseconds since 1970, for the recency of state: it outlives the process."""
    return time.time_ns() // 1_000_000


class MemoryBudget:
    """Divides memory between weights and state. Belongs to the MLX thread, except `fits`.

    State has what weights leave, and never less than its share: a model's context is measured by
    that, and so does not depend on other loaded models.

    Attributes:
        usable: bytes for weights and state of all models.
        pool: of all state.

    Args:
        settings: of the daemon.
        device: has the memory.
    """

    def __init__(self, settings: Settings, device: DeviceMemory) -> None:
        self.pool = MemoryPool(clock_of_uses)
        self._settings = settings
        self._device = device
        self._state = settings.cache_budget
        self._shared = bool(settings.models)
        self._bodies = settings.body_budget
        self.usable = usable_bytes(settings, device)
        self._building = self.pool.ledger.account(Kind.TRANSIENT)
        self._weights: dict[str, int] = {}
        self._least: dict[str, int] = {}

    def fits(self, weights: int, loaded: Iterable[int]) -> bool:
        """Return True if weights have room beside loaded ones and the share of state."""
        beside = sum(loaded)
        return not beside or beside + weights <= self.usable - state_share(
            self._settings, self.usable
        )

    @property
    def held(self) -> int:
        """Bytes of all models' weights and state."""
        return sum(self._weights.values()) + self.pool.ledger.total.nbytes

    def enter(self, name: str, weights: int) -> int:
        """Note a model whose weights are loaded.

        Returns:
            Least bytes of state while the model is loaded.

        Raises:
            StartError: its weights leave nothing.
        """
        least = state_budget(self._settings, self.usable, weights)
        if self._state is None and least <= 0:
            device = self._device
            raise StartError(
                f"the model's weights take {weights} bytes and body_bytes {self._bodies}, "
                f"and of the {device.total} bytes of {device.name} "
                f"{device.usable} may be used: "
                "serve a smaller model, or set cache_bytes to try all the same"
            )
        self._weights[name], self._least[name] = weights, least
        self._resize()
        return least

    def has_room(self) -> bool:
        """Evict state over the budget; return True if none is left over it.

        Beside other models, room is reserved for measuring a model and for its warm-up.
        """
        if not self._shared:
            return True
        self._building.set(Size(self.warm_up_bytes(min(self._least.values()))))
        self.pool.evict_excess()
        return self.pool.room.nbytes >= 0

    def warm_up_bytes(self, least: int) -> int:
        """Return the bytes for a model's measuring and warm-up, of the least bytes of state."""
        return least // _BUILD_SHARE if self._shared else least

    def built(self) -> None:
        """Release the room for measuring."""
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
