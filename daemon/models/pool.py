"""The configured models: what they are called, and who uses one or waits until it is loaded."""

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial

import structlog

from ...models.errors import ModelError
from ...scheduler.errors import DeadlineExceededError, UnavailableError
from ...scheduler.limits import RETRY_AFTER, check_tokens, check_waiting
from ...scheduler.tenants import TenantUse
from ..errors import StartError
from ..lifecycle.start_up import StartUp
from ..requests.arrivals import Wait
from ..requests.service import Service
from ..requests.workers import Workers
from .names import find, names, visible
from .residency import Loader, Residency
from .slot import ModelSlot, Resident

log = structlog.get_logger()

_UNKNOWN = 1 << 20  # tokens of the context of a model that was never loaded


class ModelPool:
    """Finds models, and lets requests use them once they are loaded. Belongs to the event loop.

    Attributes:
        slots: the models, the default one first.
        aliases: further names; each stands for a model's, or for the default one.
        most_waiting: requests that may wait, for models and in their queues. It may change.
        timeout: seconds that a request may take. It may change.
        workers: read prompts and large bodies, of all models.
        residency: which of them are in memory, and how that changes.

    Args:
        slots: as above.
        loader: loads them.
        workers: as above.
        start_up: told what is done next, until requests are taken.
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
        self.residency = Residency(slots, loader, start_up, timeout=timeout)
        self._closed = False
        self._tenant_use = tenant_use
        self._places = tenant_use.join()
        self._loader = loader

    @property
    def default(self) -> ModelSlot:
        """The model of requests that name none."""
        return self.slots[0]

    @property
    def started(self) -> bool:
        """Whether requests are taken."""
        return self.residency.started

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

    def take_requests(self) -> None:
        """Say that the daemon has started: requests are taken from now on."""
        self.residency.started = True

    def set_bounds(self, *, max_waiting: int, request_timeout: float) -> None:
        """Bound what comes from now on otherwise."""
        self.most_waiting = self.workers.most_waiting = max_waiting
        self.timeout = self.workers.timeout = self.residency.timeout = request_timeout
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

    async def use(
        self,
        slot: ModelSlot,
        tenant: str,
        held: ExitStack,
        wait: Wait,
        *,
        sees_why: bool = True,
    ) -> Service:
        """Wait until a model is loaded, and keep it so until `held` is closed.

        Who has waited keeps its place until it is queued, or `held` is closed: those who came
        meanwhile do not fill it.

        Args:
            slot: the model.
            tenant: whose request uses it.
            held: as above.
            wait: how long it may take; has its place.
            sees_why: an error says why it cannot be loaded, which may name folders.

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
        """Wait until this request may use a model."""
        now = time.monotonic()
        check_waiting(self._tenant_use, tenant, self.most_waiting, now)
        check_tokens(self._tenant_use, tenant, now)
        self._places.wait(tenant)
        wait.take_place(partial(self._places.leave, tenant))
        try:
            await slot.wait(partial(self.residency.begin_load, slot), wait.left(self.timeout))
        except TimeoutError as error:
            raise DeadlineExceededError(f"{slot.name} was not loaded in time") from error
        except (ModelError, StartError) as error:
            if not sees_why:
                log.warning("model not loaded", model=slot.name, tenant=tenant, reason=str(error))
            why = f": {error}" if sees_why else "; the daemon's log says why"
            message = f"{slot.name} cannot be loaded{why}"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error

    async def close(self) -> None:
        """End loads that are under way, and have nobody wait for one any more."""
        self._closed = True
        for slot in self.slots:
            slot.refuse_waiters(_stopping())
        await self.residency.end_loads()


def _stopping() -> UnavailableError:
    return UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
