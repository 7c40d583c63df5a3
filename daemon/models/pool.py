"""The configured models: their names, and which of them are in memory.

A model is loaded at the start or for its first request, one at a time. If memory is short, the
least recently used model is unloaded: it takes no further requests, and goes when its last one has
ended. Requests for it wait for its next load, so that no model keeps others out.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import structlog

from ...models.errors import ModelError
from ...models.load.watch import Progress
from ...scheduler.errors import DeadlineExceededError, UnavailableError
from ...scheduler.limits import RETRY_AFTER, check_tokens, check_waiting
from ...scheduler.tenants import TenantUse
from ..config import DEFAULT_MODEL
from ..errors import StartError
from ..http.failures import APIError
from ..quoting import quote
from ..requests.arrivals import Wait
from ..requests.service import Service
from ..requests.workers import Workers
from .assembly import Phase
from .slot import ModelSlot, Resident

if TYPE_CHECKING:
    from ..lifecycle.service_manager import StartUp
    from .loader import ModelLoader

_UNKNOWN = 1 << 20  # tokens of the context of a model that was never loaded
_SWEEP = 0.5  # seconds between two searches for idle models
_RETRY = 10.0  # seconds until a failed load is tried again

log = structlog.get_logger()


def visible(
    slots: Sequence[ModelSlot], aliases: Mapping[str, str], allowed: Collection[str] | None
) -> tuple[Sequence[ModelSlot], Mapping[str, str]]:
    """Filter models, and their aliases, by what a tenant may use; the first is its default.

    Args:
        slots: the models, the default one first.
        aliases: further names, each of a model or of the default one.
        allowed: names or aliases of the tenant's models; None for all.
    """
    if allowed is None:
        return slots, aliases
    found = {DEFAULT_MODEL: slots[0], **names(slots, aliases)}
    named = [found.get(name) for name in allowed]
    left = [slot for slot in slots if slot in named]
    stay = {
        alias: target
        for alias, target in aliases.items()
        if left and (target == DEFAULT_MODEL or found[alias] in left)
    }
    return left, stay


def names(slots: Sequence[ModelSlot], aliases: Mapping[str, str]) -> dict[str, ModelSlot]:
    """Map all names to their models; a model's own name goes before its aliases."""
    found = {name: slot for slot in slots for name in slot.names}
    for alias, target in aliases.items():
        found.setdefault(alias, found.get(target, slots[0]))
    return found


def find(slots: Sequence[ModelSlot], aliases: Mapping[str, str], name: str | None) -> ModelSlot:
    """Find the model of a name; without one, the default.

    Raises:
        APIError: 404; it lists the models, and says how to serve more.
    """
    if not slots:
        message = f"there is no model {quote(name or DEFAULT_MODEL)}; this tenant may use none"
        raise APIError(404, message, code="model_not_found", param="model")
    if name in (None, "", DEFAULT_MODEL):
        return slots[0]
    found = names(slots, aliases)
    if name in found:
        return found[name]
    served = ", ".join(repr(slot.name) for slot in slots)
    one = "it" if len(slots) == 1 else "one of them"
    message = (
        f"there is no model {quote(name)}; this daemon serves {served}; to serve {one} by "
        "that name too, start it with --alias NAME or [models.aliases] in umbel.toml"
    )
    raise APIError(404, message, code="model_not_found", param="model")


class ModelPool:
    """Loads models for requests, one at a time, and unloads them. Belongs to the event loop.

    Attributes:
        slots: the models, the default one first.
        aliases: further names, each of a model or of the default one.
        most_waiting: bound of requests that wait, for models and in their queues. It may change.
        timeout: seconds of a request, and of the last requests of a model that is to be unloaded.
            It may change.
        workers: read prompts and large bodies, of all models.
        started: requests are taken.

    Args:
        slots: see above.
        loader: of the models.
        workers: see above.
        start_up: reports phases until requests are taken.
        tenant_use: counts waiting requests, and has the tenants' bounds.
        most_waiting: see above.
        timeout: see above.
    """

    def __init__(
        self,
        slots: list[ModelSlot],
        loader: "ModelLoader",
        workers: Workers,
        start_up: "StartUp",
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
        self.started = False
        self._closed = False
        self._tenant_use = tenant_use
        self._places = tenant_use.join()
        self._loader = loader
        self._start_up = start_up
        self._lock = asyncio.Lock()  # held during a load or an unload

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
        """The parts of the loaded models."""
        return [slot.resident for slot in self.slots if slot.resident is not None]

    @property
    def longest_context(self) -> int:
        """Most tokens of a prompt of any model, as far as is known."""
        return max(slot.context_length or _UNKNOWN for slot in self.slots)

    def set_bounds(self, *, max_waiting: int, request_timeout: float) -> None:
        """Change the bounds of later requests."""
        self.most_waiting = self.workers.most_waiting = max_waiting
        self.timeout = self.workers.timeout = request_timeout
        self._loader.bound_tenants()
        for resident in self.residents:
            resident.service.set_bounds(max_waiting=max_waiting, request_timeout=request_timeout)

    def visible(self, allowed: Collection[str] | None) -> Sequence[ModelSlot]:
        """List the models that a tenant may use; see `visible`."""
        return visible(self.slots, self.aliases, allowed)[0]

    def names(self, allowed: Collection[str] | None = None) -> dict[str, ModelSlot]:
        """Map all names of models that a tenant may use; see `names`."""
        return names(*visible(self.slots, self.aliases, allowed))

    def find(self, name: str | None, allowed: Collection[str] | None = None) -> ModelSlot:
        """Find the model of a name among those that a tenant may use; see `find`."""
        return find(*visible(self.slots, self.aliases, allowed), name)

    async def use(
        self,
        slot: ModelSlot,
        tenant: str,
        held: ExitStack,
        wait: Wait,
        *,
        sees_why: bool = True,
    ) -> Service:
        """Wait until a model is loaded, and keep it loaded until `held` is closed.

        A request that has waited keeps its place until it is queued, or `held` is closed: later
        requests do not fill it.

        Args:
            slot: the model.
            tenant: of the request.
            held: see above.
            wait: bounds the time; has the place.
            sees_why: an error has the reason, which may name folders.

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
            await self._wait(slot, tenant, wait, sees_why=sees_why)
        held.callback(slot.leave)
        if slot.resident is None:
            raise RuntimeError(f"{slot.name} was loaded and is not")
        return slot.resident.service

    async def _wait(self, slot: ModelSlot, tenant: str, wait: Wait, *, sees_why: bool) -> None:
        now = time.monotonic()
        check_waiting(self._tenant_use, tenant, self.most_waiting, now)
        check_tokens(self._tenant_use, tenant, now)
        self._places.wait(tenant)
        wait.take_place(partial(self._places.leave, tenant))
        try:
            await slot.wait(partial(self._begin_load, slot), wait.left(self.timeout))
        except TimeoutError as error:
            raise DeadlineExceededError(f"{slot.name} was not loaded in time") from error
        except (ModelError, StartError) as error:
            if not sees_why:
                log.warning("model not loaded", model=slot.name, tenant=tenant, reason=str(error))
            why = f": {error}" if sees_why else "; the daemon's log says why"
            message = f"{slot.name} cannot be loaded{why}"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error

    async def load(self, slot: ModelSlot) -> None:
        """Load a model, unless it is loaded.

        Raises:
            ModelError: there is no such model, or it cannot be loaded.
            StartError: memory holds no request of it.
            UnavailableError: pinned models have the memory.
        """
        if slot.resident is None:
            await asyncio.shield(self._begin_load(slot))

    def _begin_load(self, slot: ModelSlot) -> asyncio.Task[None]:
        """Begin a load, or join the one under way. A load that failed just now fails again."""
        if slot.failure is not None and time.monotonic() - slot.failure[1] < _RETRY:
            raise slot.failure[0]
        if slot.loading is None:
            slot.loading = asyncio.create_task(self._load(slot))
            # Takes its error: all waiting requests may have ended.
            slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot.loading

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
        def downloaded(progress: Progress) -> None:
            slot.download = progress
            if not self.started:
                self._start_up.downloaded(progress)

        try:
            weights = await self._loader.open(slot, begin, downloaded)
            await self._make_room(slot, weights)
            return await self._loader.load(slot, begin)
        except Exception:
            await self._loader.drop(slot)
            raise

    async def _make_room(self, slot: ModelSlot, weights: int) -> None:
        """Unload the least recently used models until there is room for weights."""
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
        """Let a model's last requests end, and unload it. The caller holds the lock."""
        slot.leaving = True
        try:
            async with asyncio.timeout(self.timeout):
                await slot.wait_unused()
            await self._loader.unload(slot)
        finally:
            slot.leaving = False

    async def unload_idle(self) -> None:
        """Unload idle models until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP)
            for slot in [slot for slot in self.slots if slot.is_idle]:
                async with self._lock:
                    if not slot.is_idle:
                        continue
                    log.info("unloading an idle model", model=slot.name)
                    try:
                        await self._unload(slot)
                    except Exception:
                        log.exception("unloading idle model failed", model=slot.name)

    async def close(self) -> None:
        """Refuse waiting requests, and cancel loads."""
        self._closed = True
        for slot in self.slots:
            slot.refuse_waiters(_stopping())
        tasks = [slot.loading for slot in self.slots if slot.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stopping() -> UnavailableError:
    return UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
