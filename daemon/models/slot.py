"""One configured model: what it is, who uses it, and what serves it while it is loaded."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...models.load.loader import public_name
from ...scheduler.handoff import Handoff
from ...scheduler.statistics import EngineStatistics
from ..config import ModelSettings, Settings
from ..observability.metrics import Metrics
from ..requests.service import Service
from .assembly import Assembly, Phase

if TYPE_CHECKING:
    from ...models.load.watch import Progress

Residence = Literal["unloaded", "loading", "loaded", "unloading"]
"""Where a model is."""


@dataclass(frozen=True)
class Resident:
    """What a loaded model has in this process."""

    service: Service
    assembly: Assembly
    handoff: Handoff


class ModelSlot:
    """A model that may be loaded. Belongs to the event loop.

    Attributes:
        name: what clients call it.
        settings: its own.
        resident: what serves it; None while it is not loaded.
        loading: the load that is under way, or waits for another's.
        leaving: it is to be unloaded, and takes no further requests until it is loaded anew.
        phase: what is done to load it; None else.
        download: how far its download is, while there is one.
        users: requests that use it.
        waiters: requests that wait for it; each is told when it may use it.
        weight_bytes: what its weights take; None before it was first loaded.
        context_length: the most tokens of prompt and answer; None before it was first loaded.
        metrics: of its requests, from the daemon's start on.
        failure: why it could not be loaded last, and when.

    Args:
        name: as above.
        settings: as above.
        clock: seconds, monotonic.
    """

    def __init__(
        self, name: str, settings: ModelSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.settings = settings
        self.resident: Resident | None = None
        self.loading: asyncio.Task[None] | None = None
        self.leaving = False
        self.phase: Phase | None = None
        self.download: Progress | None = None
        self.users = 0
        self.waiters: dict[asyncio.Future[None], None] = {}  # the oldest first
        self.weight_bytes: int | None = None
        self.context_length: int | None = None
        self.metrics = Metrics(EngineStatistics, lambda: 0, None)
        self.failure: tuple[Exception, float] | None = None
        self._clock = clock
        self._used_at = clock()
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def names(self) -> list[str]:
        """All names that it answers to, its own first."""
        return list(dict.fromkeys([self.name, *self.settings.aliases]))

    @property
    def source(self) -> str:
        """Where it is: what `models.load` takes."""
        return self.settings.model or self.name

    def begin(self, phase: Phase | None) -> None:
        """Note what is done next."""
        self.phase, self.download = phase, None

    def rest(self) -> None:
        """Have nothing that serves it any more."""
        self.resident = None
        self.metrics.attach(EngineStatistics, lambda: 0, None)

    @property
    def residence(self) -> Residence:
        """Where it is at present."""
        if self.leaving:
            return "unloading"
        if self.resident is not None:
            return "loaded"
        return "unloaded" if self.loading is None else "loading"

    @property
    def serves(self) -> bool:
        """Whether a request may use it at once."""
        return self.resident is not None and not self.leaving

    @property
    def idle_for(self) -> float:
        """Seconds since a request last used it; 0 while one does."""
        return 0.0 if self.users else self._clock() - self._used_at

    @property
    def is_idle(self) -> bool:
        """Whether nobody has used it for so long that it is to be unloaded."""
        after = None if self.settings.pinned else self.settings.unload_after
        return self.resident is not None and after is not None and self.idle_for > after

    def enter(self) -> None:
        """Count a request that uses it; it stays loaded until the last one has left."""
        self.users += 1
        self._unused.clear()

    def leave(self) -> None:
        """Count it no more."""
        self.users -= 1
        self.touch()
        if not self.users:
            self._unused.set()

    async def wait(self, load: Callable[[], object], timeout: float) -> None:  # noqa: ASYNC109
        """Wait until it is loaded, and count a request that uses it.

        Args:
            load: has it loaded.
            timeout: seconds that this may take.

        Raises:
            TimeoutError: it takes longer.
            Exception: it cannot be loaded.
        """
        waiter, admitted = asyncio.get_running_loop().create_future(), False
        self.waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout):
                load()
                await waiter
            admitted = True
        finally:
            self.waiters.pop(waiter, None)
            if not admitted and _has_result(waiter):
                self.leave()  # it was admitted, and has left at that moment

    def admit_waiters(self) -> None:
        """Have all who wait use it: it is not unloaded before they have."""
        for waiter in self._take_waiters():
            self.enter()
            waiter.set_result(None)

    def refuse_waiters(self, error: Exception) -> None:
        """Tell all who wait that it cannot be loaded."""
        for waiter in self._take_waiters():
            waiter.set_exception(error)

    def _take_waiters(self) -> list[asyncio.Future[None]]:
        """Take all who wait, in the order in which they came."""
        waiters, self.waiters = self.waiters, {}
        return [waiter for waiter in waiters if not waiter.done()]

    def touch(self) -> None:
        """Count as just used."""
        self._used_at = self._clock()

    async def wait_unused(self) -> None:
        """Wait until no request uses it."""
        await self._unused.wait()


def _has_result(waiter: asyncio.Future[None]) -> bool:
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None


def slots_of(settings: Settings) -> list[ModelSlot]:
    """Make a slot for each configured model, the default one first."""
    models = dict(settings.models)
    named = settings.model if settings.model in models else public_name(settings.model)
    default = models.pop(settings.model, None) or ModelSettings(model=settings.model)
    return [ModelSlot(named, default), *(ModelSlot(*each) for each in models.items())]
