"""One configured model: its settings, its residence, and the requests that use it."""

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


@dataclass(frozen=True)
class Resident:
    """The parts of a loaded model."""

    service: Service
    assembly: Assembly
    handoff: Handoff


class ModelSlot:
    """A model that may be loaded. Belongs to the event loop.

    Attributes:
        name: for clients.
        settings: its own.
        resident: its parts; None while it is not loaded.
        loading: its load under way, which may wait for another's.
        leaving: it is to be unloaded, and takes no further requests until its next load.
        phase: of its load; None without one.
        download: progress of its download; None without one.
        users: number of requests that use it.
        waiters: requests that wait for it, the oldest first.
        weight_bytes: of its weights; None before its first load.
        context_length: most tokens of prompt and answer; None before its first load.
        metrics: of its requests since the daemon's start.
        failure: error and time of its last load, if that failed.

    Args:
        name: for clients.
        settings: its own.
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
        self.waiters: dict[asyncio.Future[None], None] = {}
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
        """All its names, its own first."""
        return list(dict.fromkeys([self.name, *self.settings.aliases]))

    @property
    def source(self) -> str:
        """Repo, folder or name for `models.load`."""
        return self.settings.model or self.name

    def begin(self, phase: Phase | None) -> None:
        """Note the next phase of its load."""
        self.phase, self.download = phase, None

    def rest(self) -> None:
        """Drop its parts: it is unloaded."""
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
        """True if a request may use it at once."""
        return self.resident is not None and not self.leaving

    @property
    def idle_for(self) -> float:
        """Seconds since a request last used it; 0 while one does."""
        return 0.0 if self.users else self._clock() - self._used_at

    @property
    def is_idle(self) -> bool:
        """True if it has been idle for long enough to be unloaded."""
        after = None if self.settings.pinned else self.settings.unload_after
        return self.resident is not None and after is not None and self.idle_for > after

    def enter(self) -> None:
        """Count a request that uses it; it stays loaded until the last one has left."""
        self.users += 1
        self._unused.clear()

    def leave(self) -> None:
        """Count a request that has ended."""
        self.users -= 1
        self.touch()
        if not self.users:
            self._unused.set()

    async def wait(self, load: Callable[[], object], timeout: float) -> None:  # noqa: ASYNC109
        """Wait until it is loaded, and count a request that uses it.

        Args:
            load: begins its load.
            timeout: seconds.

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
                self.leave()  # it was admitted at the moment of its end

    def admit_waiters(self) -> None:
        """Count all waiting requests as users: it is not unloaded before they have used it."""
        for waiter in self._take_waiters():
            self.enter()
            waiter.set_result(None)

    def refuse_waiters(self, error: Exception) -> None:
        """Fail all waiting requests."""
        for waiter in self._take_waiters():
            waiter.set_exception(error)

    def _take_waiters(self) -> list[asyncio.Future[None]]:
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
