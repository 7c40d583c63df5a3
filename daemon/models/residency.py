"""Which models are in memory: each is loaded alone, and others must go for it.

A model is loaded when it is first asked for, or at start, and one at a time. Where memory is short
the one that was used longest ago is unloaded: it takes no further requests, and goes when its last
one has ended. Who asks for it meanwhile waits for its next load, so that none keeps others out.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from ...models.errors import ModelError
from ...models.load.watch import Progress
from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER
from ..errors import StartError
from ..lifecycle.start_up import StartUp
from .assembly import Phase
from .slot import ModelSlot, Resident

_SWEEP = 0.5  # seconds between two looks at who is idle
_RETRY = 10.0  # seconds until a model that could not be loaded is tried again

log = structlog.get_logger()


class Loader(Protocol):
    """Loads and unloads models; `ModelLoader` is the real one."""

    async def open(
        self,
        slot: ModelSlot,
        begin: Callable[[Phase], object],
        downloaded: Callable[[Progress], object],
    ) -> int:
        """Find a model, download it if need be, and say what its weights take, in bytes."""
        ...

    def fits(self, weights: int, beside: list[int]) -> bool:
        """Whether weights have room beside those of others."""
        ...

    async def load(self, slot: ModelSlot, begin: Callable[[Phase], object]) -> Resident:
        """Load what was opened."""
        ...

    def bound_tenants(self) -> None:
        """Bound what tenants use, and what their state takes, as the settings say now."""
        ...

    async def drop(self, slot: ModelSlot) -> None:
        """Let go of what was opened, or of what is left of a load that failed."""
        ...

    async def unload(self, slot: ModelSlot) -> None:
        """Save a model's state, and give all its memory back."""
        ...


class Residency:
    """Loads models and unloads them, one at a time, for whoever asks. Belongs to the event loop.

    Attributes:
        timeout: seconds that the last requests of a model may take that is to go. It may change.
        started: whether the daemon has started.

    Args:
        slots: of all models.
        loader: loads them.
        start_up: told what is done next, until the daemon has started.
        timeout: as above.
    """

    def __init__(
        self, slots: list[ModelSlot], loader: Loader, start_up: StartUp, *, timeout: float
    ) -> None:
        self.timeout = timeout
        self.started = False
        self._slots = slots
        self._loader = loader
        self._start_up = start_up
        self._lock = asyncio.Lock()  # of whoever loads or unloads

    def begin_load(self, slot: ModelSlot) -> asyncio.Task[None]:
        """Have a model loaded, after what is loaded already; once, however many ask for it.

        Raises:
            ModelError: it could not be loaded just now; it is tried again a while later.
            StartError: as before, for want of memory.
        """
        if slot.failure is not None and time.monotonic() - slot.failure[1] < _RETRY:
            raise slot.failure[0]
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._load(slot))
            # Takes its error, though nobody may have waited for it to the end.
            slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot.loading

    async def load(self, slot: ModelSlot) -> None:
        """Load a model, unless it is loaded.

        Raises:
            ModelError: there is no such model, or it cannot be loaded.
            StartError: memory holds no request of it.
            UnavailableError: others that must stay have the memory.
        """
        if slot.resident is None:
            await asyncio.shield(self.begin_load(slot))

    async def _load(self, slot: ModelSlot) -> None:
        def begin(phase: Phase) -> None:
            slot.begin(phase)
            if not self.started:
                self._start_up.begin(phase)

        try:
            async with self._lock:
                if slot.resident is None:
                    slot.resident = await self._load_alone(slot, begin)
                    slot.failure = None
                    slot.touch()
                slot.admit_waiters()
        except Exception as error:
            if isinstance(error, ModelError | StartError):
                slot.failure = error, time.monotonic()
            slot.refuse_waiters(error)
            raise
        finally:
            slot.loading = None
            slot.begin(None)

    async def _load_alone(self, slot: ModelSlot, begin: Callable[[Phase], object]) -> Resident:
        try:
            weights = await self._loader.open(slot, begin, partial(self._downloaded, slot))
            await self._make_room(slot, weights)
            return await self._loader.load(slot, begin)
        except Exception:
            await self._loader.drop(slot)
            raise

    def _downloaded(self, slot: ModelSlot, progress: Progress) -> None:
        slot.download = progress
        if not self.started:
            self._start_up.downloaded(progress)

    async def _make_room(self, slot: ModelSlot, weights: int) -> None:
        """Unload what was used longest ago until there is room for weights."""
        while True:
            loaded = [each for each in self._slots if each.resident is not None]
            if self._loader.fits(weights, [each.weight_bytes or 0 for each in loaded]):
                return
            free = [each for each in loaded if not each.settings.pinned]
            if not free:
                raise UnavailableError(
                    f"{slot.name} needs {weights} bytes for its weights, and "
                    f"{', '.join(each.name for each in loaded)} stay loaded: they are pinned",
                    retry_after=RETRY_AFTER,
                )
            victim = max(free, key=lambda each: each.idle_for)
            log.info("making room for a model", model=slot.name, unloading=victim.name)
            await self._unload(victim)

    async def _unload(self, slot: ModelSlot) -> None:
        """Let a model's last requests end, and unload it. For who holds the lock."""
        slot.leaving = True
        try:
            async with asyncio.timeout(self.timeout):
                await slot.wait_unused()
            await self._loader.unload(slot)
        finally:
            slot.leaving = False

    async def run(self) -> None:
        """Unload what nobody has used for long, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            for slot in self._slots:
                if slot.is_idle:
                    await self._unload_idle(slot)

    async def _unload_idle(self, slot: ModelSlot) -> None:
        async with self._lock:
            if not slot.is_idle:
                return
            log.info("unloading an idle model", model=slot.name)
            try:
                await self._unload(slot)
            except Exception:
                log.exception("an idle model was not unloaded", model=slot.name)

    async def end_loads(self) -> None:
        """End loads that are under way."""
        tasks = [slot.loading for slot in self._slots if slot.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
