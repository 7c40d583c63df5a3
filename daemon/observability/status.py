"""`/status`: one frozen picture of the daemon, from its last published figures."""

import time
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from ... import __version__
from ...cachestore.disk.model_folders import ModelFolders, StoredModel
from ...cachestore.disk.queue import DiskStatistics
from ...models.runtime import BLAS, device_name, memory_statistics
from ...scheduler.statistics import MemoryUse, RequestStatistics
from ..models.assembly import Phase
from ..models.pool import ModelPool
from ..models.pressure import PressureStatus, PressureWatch
from ..models.slot import ModelSlot, Residence
from ..requests.arrivals import Arrivals, ArrivalStatus
from ..requests.service import Service
from .daemon_metrics import ledger_of

Engine = dict[str, Any]
"""The fields of `EngineStatistics`, without the ledger, which is of all models."""

State = Literal["loading", "ready", "stalled", "stopping"]

STALLED_AFTER = 120.0
"""Seconds in one step, or without a finished one while requests run, of a stalled engine."""

LOADING_TAKES = 900.0
"""More seconds while a model is loaded: measuring and warming it up is one call."""

_MOST_REQUESTS = 1000


class SlotStatus(msgspec.Struct, kw_only=True):
    """One of the configured models. A tenant gets None for counts of all tenants together.

    Attributes:
        aliases: its further names.
        phase: of its load; None without one.
        pinned: it always stays loaded.
        context_length: None before its first load, as `weight_bytes`.
        budget_bytes: least bytes of state; None while it is not loaded.
        using: requests that use it.
        waiting: requests that wait until it is loaded.
        queued: requests in its queue.
        idle_seconds: since a request last used it.
        failure: of the last load; a tenant gets no reason.
        requests: running, then queued: the first 1,000 that the caller may see.
        engine: its figures; None while the model is not loaded.
        disk: its part of the disk tier; None without one.
    """

    name: str
    aliases: list[str]
    state: Residence
    phase: Phase | None
    pinned: bool
    context_length: int | None
    weight_bytes: int | None
    budget_bytes: int | None
    using: int | None = None
    waiting: int | None = None
    queued: int | None = None
    idle_seconds: float | None = None
    failure: str | None
    requests: list[RequestStatistics]
    engine: Engine | None = None
    disk: DiskStatistics | None = None


class ModelStatus(msgspec.Struct):
    """The default model, while it is loaded.

    Attributes:
        batches: sequences decode as rows of one batch, and not one by one.
        one_by_one: the reason if they decode one by one.
        exact: equal requests give equal tokens under all circumstances.
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
    """Progress of a model's download, in bytes."""

    done: int
    total: int


class StoredStatus(msgspec.Struct, frozen=True):
    """State on disk of a model that is not loaded.

    Attributes:
        model: its name when it was last served.
        fingerprint: of the model.
        bytes: of its files.
        idle_seconds: since its last use.
    """

    model: str
    fingerprint: str
    bytes: int
    idle_seconds: float


class Status(msgspec.Struct, kw_only=True):
    """The answer of `/status`. A tenant gets None for counts of all tenants together.

    Attributes:
        phase: of start-up; None once requests are served.
        download: progress of the download that start-up waits for.
        models: all configured models, the default one first.
        arriving: requests that are in no queue yet: the first 1,000 that the caller may see.
        memory: MLX's.
        ledger: of all models' state; None before a model is loaded.
        waiting: requests in the queue of the default model; the fields below are also of it.
        step_age: seconds since the engine last finished a step.
        disk: the disk tier; None without one.
        disk_budget: bound of all models' files, in bytes; None without a disk tier.
        stored: models that are not loaded and have state on disk, the last used first; None
            without a disk tier.
        pressure: of the system's memory.
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
    """Return the daemon's state. Asks MLX nothing: it may hang.

    Args:
        models: None at the start.
        stopping: the daemon takes no further requests.
        busy_for: seconds of the MLX thread's work under way.
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
    """Return the seconds since a model's last step while requests run."""
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
    """Take the picture. Waits for nothing, also not for the MLX thread.

    Args:
        models: None at the start.
        arrivals: requests that are in no queue yet.
        state: see `state_of`.
        pressure: of the system's memory; None at the start.
        folders: of state on disk, if any is kept.
        tenant: the caller, who sees only its own; None for an operator, who sees all.
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
    picture = SlotStatus(
        name=slot.name,
        aliases=slot.names[1:],
        state=slot.residence,
        phase=slot.phase,
        pinned=slot.settings.pinned,
        context_length=slot.context_length,
        weight_bytes=slot.weight_bytes,
        budget_bytes=None if resident is None else resident.assembly.least_budget,
        failure=None if slot.failure is None else "it cannot be loaded",
        requests=[] if service is None else service.queue.requests(_MOST_REQUESTS, tenant),
    )
    if tenant is None:
        picture.using, picture.waiting = slot.users, len(slot.waiters)
        picture.queued = 0 if service is None else len(service.queue)
        picture.idle_seconds = round(slot.idle_for, 3)
        if slot.failure is not None:
            picture.failure = str(slot.failure[0])
        if service is not None:
            picture.engine = msgspec.structs.asdict(service.engine.statistics())
            del picture.engine["memory"]
            picture.disk = None if service.disk is None else service.disk.tier.statistics()
    return picture


def _add_default(picture: Status, service: Service) -> None:
    slot = picture.models[0]  # read once, so that the answer agrees with itself
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
