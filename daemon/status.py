"""`/status`: one frozen picture of the daemon, from what was last published."""

import time
from typing import Literal

import msgspec

from .. import __version__
from ..cachestore.disk.write_queue import DiskStatistics
from ..models.runtime import BLAS, backend, memory_statistics
from ..scheduler.statistics import EngineStatistics
from .assembly import Phase
from .pressure import PressureStatus
from .service import Service

State = Literal["loading", "ready", "stalled", "stopping"]

STALLED_AFTER = 120.0
"""Seconds in one step, or without a finished one while requests run: the engine is stalled then."""


class ModelStatus(msgspec.Struct):
    """The model that is served.

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


class Status(msgspec.Struct, kw_only=True):
    """What `/status` answers.

    Attributes:
        phase: what start-up does; None once the model is served.
        waiting: requests in the queue.
        step_age: seconds since the engine last finished a step.
        disk: the disk tier; None without one.
        pressure: what the system says of its memory.
    """

    version: str = __version__
    state: State
    phase: Phase | None = None
    backend: str
    blas: str
    model: ModelStatus | None = None
    memory: MemoryStatus
    waiting: int = 0
    step_age: float | None = None
    engine: EngineStatistics | None = None
    disk: DiskStatistics | None = None
    pressure: PressureStatus | None = None


def state_of(service: Service | None, *, stopping: bool, busy_for: float) -> State:
    """Say in a word how the daemon is. Asks MLX nothing, which may be what hangs.

    Args:
        service: None until the model is loaded.
        stopping: the daemon takes no further requests.
        busy_for: seconds since the MLX thread began what it does.
    """
    if stopping:
        return "stopping"
    if service is None:
        return "loading"
    engine = service.engine.statistics()
    without_step = time.monotonic() - engine.last_step_at if engine.running else 0.0
    return "stalled" if max(without_step, busy_for) > STALLED_AFTER else "ready"


def status(service: Service | None, state: State, phase: Phase | None) -> Status:
    """Take the picture. Waits for nothing, least of all for the MLX thread.

    Args:
        service: None until the model is loaded.
        state: see `state_of`.
        phase: of start-up.
    """
    memory = memory_statistics()
    picture = Status(
        state=state,
        phase=phase,
        backend=backend(),
        blas=BLAS.name,
        memory=MemoryStatus(memory.active, memory.cached, memory.peak),
    )
    if service is None:
        return picture
    engine = service.engine.statistics()
    picture.engine = engine
    picture.waiting = len(service.queue)
    picture.disk = None if service.disk is None else service.disk.statistics()
    picture.pressure = service.pressure.status
    picture.step_age = round(time.monotonic() - engine.last_step_at, 3)
    picture.model = ModelStatus(
        service.model_name,
        service.fingerprint,
        service.context_length,
        service.weight_bytes,
        service.batches,
        service.one_by_one,
        service.exact,
    )
    return picture
