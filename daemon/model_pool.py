"""The configured models: which are loaded, who waits for one, and which must go for another.

A model is loaded when it is first asked for, or at start, and one at a time. Where memory is short
the one that was used longest ago is unloaded: it takes no further requests, and goes when its last
one has ended. Who asks for it meanwhile waits for its next load, so that none keeps others out.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import structlog

from ..models.errors import ModelError
from ..models.load.watch import Progress
from ..scheduler.bounds import RETRY_AFTER, check_tokens, check_waiting
from ..scheduler.errors import DeadlineExceededError, UnavailableError
from ..scheduler.fairness.use import TenantUse
from .assembly import Phase
from .deadlines import Wait
from .errors import StartError
from .metrics import ByModel
from .model_names import find, names, visible
from .model_slot import ModelSlot, Resident
from .service import Service
from .start_up import StartUp
from .workers import Workers

_SWEEP = 0.5  # seconds between two looks at who is idle
_UNKNOWN = 1 << 20  # tokens of the context of a model that was never loaded
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


class ModelPool:
    """Loads models when they are asked for. Belongs to the event loop.

    Attributes:
        slots: the models, the default one first.
        aliases: further names; each stands for a model's, or for the default one.
        most_waiting: requests that may wait, for models and in their queues. It may change.
        timeout: seconds that a request may take. It may change.
        workers: read prompts and large bodies, of all models.
        started: whether requests are taken.
        start_up: told what is done next, until then.

    Args:
        slots: as above.
        loader: loads them.
        workers: as above.
        start_up: as above.
        tenant_use: what waits already, and what is agreed with tenants.
        most_waiting: as above.
        timeout: as above.
    """

    def __init__(
        self,
        slots: list[ModelSlot],
        loader: Loader,
        workers: Workers,
        start_up: StartUp,
        tenant_use: TenantUse,
        *,
        most_waiting: int,
        timeout: float,
    ) -> None:
        self.slots = slots
        self.aliases: dict[str, str] = {}
        self.most_waiting = most_waiting
        self.timeout = timeout
        self.workers = workers
        self.start_up = start_up
        self.started = False
        self._closed = False
        self._tenant_use = tenant_use
        self._places = tenant_use.join()
        self._loader = loader
        self._lock = asyncio.Lock()  # of whoever loads or unloads

    @property
    def default(self) -> ModelSlot:
        """The model of requests that name none."""
        return self.slots[0]

    @property
    def starting(self) -> ModelSlot | None:
        """The model that start-up loads now."""
        loading = (slot for slot in self.slots if slot.phase is not None)
        return None if self.started else next(loading, None)

    @property
    def residents(self) -> list[Resident]:
        """What the loaded models have."""
        return [slot.resident for slot in self.slots if slot.resident is not None]

    @property
    def longest_context(self) -> int:
        """Tokens that a prompt of any model may have, as far as is known."""
        return max(slot.context_length or _UNKNOWN for slot in self.slots)

    def render_metrics(self, tenant: str | None) -> bytes:
        """Write the metrics of all models; those of several say which."""
        if len(self.slots) == 1:
            return self.default.metrics.render(tenant)
        return ByModel({slot.name: slot.metrics for slot in self.slots}).render(tenant)

    def set_bounds(self, *, max_waiting: int, request_timeout: float) -> None:
        """Bound what comes from now on otherwise."""
        self.most_waiting = self.workers.most_waiting = max_waiting
        self.timeout = self.workers.timeout = request_timeout
        self._loader.bound_tenants()
        for resident in self.residents:
            resident.service.set_bounds(max_waiting=max_waiting, request_timeout=request_timeout)

    def visible(self, allowed: Collection[str] | None) -> Sequence[ModelSlot]:
        """The models that are left of all; see `model_names.visible`."""
        return visible(self.slots, self.aliases, allowed)[0]

    def names(self, allowed: Collection[str] | None = None) -> dict[str, ModelSlot]:
        """All names of models, each with its model; see `model_names.names` and `visible`."""
        return names(*visible(self.slots, self.aliases, allowed))

    def find(self, name: str | None, allowed: Collection[str] | None = None) -> ModelSlot:
        """Find the model of that name; see `model_names.find` and `visible`."""
        return find(*visible(self.slots, self.aliases, allowed), name)

    async def use(self, slot: ModelSlot, tenant: str, held: ExitStack, wait: Wait) -> Service:
        """Wait until a model is loaded, and keep it so until `held` is closed.

        Who has waited keeps its place until it is queued, or `held` is closed: those who came
        meanwhile do not fill it.

        Args:
            slot: the model.
            tenant: whose request uses it.
            held: as above.
            wait: how long it may take; has its place.

        Raises:
            QueueFullError: as many requests wait as may wait, of all or of the tenant.
            QuotaSpentError: the model is not loaded, and the tenant has no tokens left.
            DeadlineExceededError: it was not loaded in time.
            UnavailableError: it cannot be loaded, or the daemon stops.
        """
        if self._closed:
            raise _stopping()
        if slot.serves:
            slot.enter()
        else:
            held.callback(wait.give_place_back)
            await self._wait(slot, tenant, wait)
        held.callback(slot.leave)
        if slot.resident is None:
            raise RuntimeError(f"{slot.name} was loaded and is not")
        return slot.resident.service

    async def _wait(self, slot: ModelSlot, tenant: str, wait: Wait) -> None:
        """Wait until this request may use a model."""
        now = time.monotonic()
        check_waiting(self._tenant_use, tenant, self.most_waiting, now)
        check_tokens(self._tenant_use, tenant, now)
        self._places.wait(tenant)
        wait.take_place(partial(self._places.leave, tenant))
        try:
            await slot.wait(partial(self._start_loading, slot), wait.left(self.timeout))
        except TimeoutError as error:
            raise DeadlineExceededError(f"{slot.name} was not loaded in time") from error
        except (ModelError, StartError) as error:
            message = f"{slot.name} cannot be loaded: {error}"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error

    def _start_loading(self, slot: ModelSlot) -> asyncio.Task[None]:
        """Have a model loaded, after what is loaded already; once, however many ask for it."""
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
            await asyncio.shield(self._start_loading(slot))

    async def _load(self, slot: ModelSlot) -> None:
        def begin(phase: Phase) -> None:
            slot.begin(phase)
            if not self.started:
                self.start_up.begin(phase)

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
            self.start_up.downloaded(progress)

    async def _make_room(self, slot: ModelSlot, weights: int) -> None:
        """Unload what was used longest ago until there is room for weights."""
        while True:
            loaded = [each for each in self.slots if each.resident is not None]
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
            for slot in self.slots:
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

    async def close(self) -> None:
        """End loads that are under way, and have nobody wait for one any more."""
        self._closed = True
        for slot in self.slots:
            slot.refuse_waiters(_stopping())
        tasks = [slot.loading for slot in self.slots if slot.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stopping() -> UnavailableError:
    return UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
