"""`/status`: one frozen picture of the daemon, from what was last published."""

import time
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import msgspec

from ... import __version__
from ...cachestore.disk.model_folders import ModelFolders, StoredModel
from ...cachestore.disk.queue import DiskStatistics
from ...models.runtime import BLAS, device_name, memory_statistics
from ...scheduler.statistics import EngineStatistics, MemoryUse, RequestStatistics
from ..models.assembly import Phase
from ..models.pool import ModelPool
from ..models.pressure import PressureStatus, PressureWatch
from ..models.slot import ModelSlot, Residence
from ..requests.arrivals import Arrivals, ArrivalStatus
from ..requests.service import Service
from .daemon_metrics import ledger_of

Engine = dict[str, Any]
"""The fields of `EngineStatistics`, but for the ledger."""

State = Literal["loading", "ready", "stalled", "stopping"]

STALLED_AFTER = 120.0
"""Seconds in one step, or without a finished one while requests run: the engine is stalled then."""

LOADING_TAKES = 900.0
"""Seconds more while a model is loaded: to measure it, and to warm it up, is one call."""


_MOST_REQUESTS = 1000


class SlotStatus(msgspec.Struct):
    """One of the configured models.

    Attributes:
        aliases: its further names.
        state: where it is.
        phase: what is done to load it; None else.
        pinned: whether it always stays.
        context_length: None before it was first loaded, as `weight_bytes`.
        budget_bytes: what state may take at least; None while it is not loaded, as `engine` and
            `disk`.
        using: requests that use it; None for a tenant, as `waiting`, `queued` and `idle_seconds`.
        waiting: requests that wait until it is loaded.
        queued: of those that use it, requests in its queue.
        idle_seconds: since a request last used it.
        failure: why it could not be loaded last; a tenant is told no more than that it failed.
        requests: that run, and then those that wait in its queue: the first 1,000 of them that
            the caller may know of.
        engine: what it does, and what its cache holds; None for a tenant.
        disk: its part of the disk tier; None without one, and for a tenant.
    """

    name: str
    aliases: list[str]
    state: Residence
    phase: Phase | None
    pinned: bool
    context_length: int | None
    weight_bytes: int | None
    budget_bytes: int | None
    using: int | None
    waiting: int | None
    queued: int | None
    idle_seconds: float | None
    failure: str | None
    requests: list[RequestStatistics]
    engine: Engine | None
    disk: DiskStatistics | None


class ModelStatus(msgspec.Struct):
    """The default model, while it is loaded.

    Attributes:
        batches: whether sequences decode as rows of one batch, or one by one.
        one_by_one: why they decode one by one; None if they decode in batches.
        exact: whether the same request gives the same tokens under all circumstances.
    """

    name: str
    fingerprint: str
    context_length: int
    weight_bytes: int
    batches: bool
    one_by_one: str | None
    exact: bool


class MemoryStatus(msgspec.Struct):
    """MLX's memory, in bytes."""

    active: int
    cached: int
    peak: int


class DownloadStatus(msgspec.Struct, frozen=True):
    """How far a model's download is, in bytes."""

    done: int
    total: int


class StoredStatus(msgspec.Struct, frozen=True):
    """State on disk of a model that is not loaded.

    Attributes:
        model: its name when it was last served.
        fingerprint: of the model.
        bytes: of its files.
        idle_seconds: since it was last used.
    """

    model: str
    fingerprint: str
    bytes: int
    idle_seconds: float


class Status(msgspec.Struct, kw_only=True):
    """What `/status` answers.

    A tenant is told of itself alone: what is counted for all tenants together is None.

    Attributes:
        phase: what start-up does; None once requests are served.
        download: how far a model's download is, while start-up waits for it.
        models: all that are configured, the default one first.
        arriving: requests that have come and are in no queue yet: the first 1,000 of them that
            the caller may know of.
        memory: MLX's.
        ledger: what state of all models takes; None before a model is loaded, and for a tenant.
        waiting: requests in the queue of the default model, as all that follows is of it.
        step_age: seconds since the engine last finished a step.
        disk: the disk tier; None without one.
        disk_budget: bytes that files of all models may take; None without a disk tier.
        stored: models that are not loaded and have state on disk, the last used first; None
            without a disk tier.
        pressure: what the system says of its memory.
    """

    version: str = __version__
    state: State
    phase: Phase | None = None
    download: DownloadStatus | None = None
    backend: str
    blas: str
    model: ModelStatus | None = None
    models: list[SlotStatus] = []
    arriving: list[ArrivalStatus] = []
    memory: MemoryStatus | None = None
    ledger: MemoryUse | None = None
    waiting: int | None = 0
    step_age: float | None = None
    engine: Engine | None = None
    disk: DiskStatistics | None = None
    disk_budget: int | None = None
    stored: list[StoredStatus] | None = None
    pressure: PressureStatus | None = None


def state_of(models: ModelPool | None, *, stopping: bool, busy_for: float) -> State:
    """Say in a word how the daemon is. Asks MLX nothing, which may be what hangs.

    Args:
        models: None until the daemon has any.
        stopping: the daemon takes no further requests.
        busy_for: seconds since the MLX thread began what it does.
    """
    if stopping:
        return "stopping"
    if models is None or not models.started:
        return "loading"
    longest = max(busy_for, *map(_without_step, models.slots))
    loading = any(slot.phase is not None for slot in models.slots)
    most = STALLED_AFTER + (LOADING_TAKES if loading else 0.0)
    return "stalled" if longest > most else "ready"


def _without_step(slot: ModelSlot) -> float:
    """Seconds for which a model's engine has made no step though requests run."""
    if slot.resident is None:
        return 0.0
    engine = slot.resident.service.engine.statistics()
    return time.monotonic() - engine.last_step_at if engine.running else 0.0


def status(
    models: ModelPool | None,
    arrivals: Arrivals,
    state: State,
    pressure: PressureWatch | None,
    folders: ModelFolders | None = None,
    tenant: str | None = None,
    allowed: Collection[str] | None = None,
) -> Status:
    """Take the picture. Waits for nothing, least of all for the MLX thread.

    Args:
        models: None until the daemon has any.
        arrivals: requests that are in no queue yet.
        state: see `state_of`.
        pressure: of the system's memory; None until it is watched.
        folders: for state on disk, if some is kept.
        tenant: who is told of itself alone; None for who is told all.
        allowed: the models that it may use; None for all.
    """
    picture = Status(state=state, backend=device_name(), blas=BLAS.name)
    picture.arriving = arrivals.describe(_MOST_REQUESTS, tenant)
    if tenant is None:
        memory = memory_statistics()
        picture.memory = MemoryStatus(memory.active, memory.cached, memory.peak)
        picture.pressure = None if pressure is None else pressure.status
        if folders is not None:
            picture.disk_budget = folders.budget
            picture.stored = [_stored(model) for model in folders.resting]
    if models is None:
        return picture
    if (starting := models.starting) is not None:
        picture.phase = starting.phase
        if starting.download is not None:
            picture.download = DownloadStatus(*starting.download)
    if tenant is None:
        picture.ledger = ledger_of(slot.metrics.engine() for slot in models.slots)
    slots = models.visible(None if tenant is None else allowed)
    picture.models = [_of_slot(slot, tenant) for slot in slots]
    if models.started and slots and slots[0].resident is not None:
        _add_default(picture, slots[0].resident.service)
    return picture


def _stored(model: StoredModel) -> StoredStatus:
    idle = round(max(0.0, time.time() - model.used), 3)
    return StoredStatus(model.name, model.fingerprint, model.nbytes, idle)


def _of_slot(slot: ModelSlot, tenant: str | None) -> SlotStatus:
    resident = slot.resident
    service = None if resident is None else resident.service
    told = _of_all(slot, service) if tenant is None else _NOT_TOLD
    return SlotStatus(
        name=slot.name,
        aliases=slot.names[1:],
        state=slot.residence,
        phase=slot.phase,
        pinned=slot.settings.pinned,
        context_length=slot.context_length,
        weight_bytes=slot.weight_bytes,
        budget_bytes=None if resident is None else resident.assembly.least_budget,
        failure=_failure(slot, tenant),
        requests=[] if service is None else service.queue.requests(_MOST_REQUESTS, tenant),
        **told._asdict(),
    )


def _failure(slot: ModelSlot, tenant: str | None) -> str | None:
    if slot.failure is None:
        return None
    return str(slot.failure[0]) if tenant is None else "it cannot be loaded"


class _OfAll(NamedTuple):
    """What is counted for all tenants of a model together; see `SlotStatus`."""

    using: int | None = None
    waiting: int | None = None
    queued: int | None = None
    idle_seconds: float | None = None
    engine: Engine | None = None
    disk: DiskStatistics | None = None


_NOT_TOLD = _OfAll()


def _of_all(slot: ModelSlot, service: Service | None) -> _OfAll:
    queued, idle_seconds = 0 if service is None else len(service.queue), round(slot.idle_for, 3)
    counted = slot.users, len(slot.waiters), queued, idle_seconds
    if service is None:
        return _OfAll(*counted)
    disk = None if service.disk is None else service.disk.tier.statistics()
    return _OfAll(*counted, _engine(service.engine.statistics()), disk)


def _engine(statistics: EngineStatistics) -> Engine:
    told = msgspec.structs.asdict(statistics)
    del told["memory"]  # it is of all models
    return told


def _add_default(picture: Status, service: Service) -> None:
    slot = picture.models[0]  # one look at it, so that the answer agrees with itself
    picture.engine, picture.waiting, picture.disk = slot.engine, slot.queued, slot.disk
    if slot.engine is not None:
        picture.step_age = round(time.monotonic() - slot.engine["last_step_at"], 3)
    picture.model = ModelStatus(
        service.model_name,
        service.fingerprint,
        service.context_length,
        service.weight_bytes,
        service.batches,
        service.one_by_one,
        service.exact,
    )
