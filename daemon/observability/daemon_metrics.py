"""Metrics of the daemon itself, one for all models, for Prometheus."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ... import __version__
from ...cachestore.disk.queue import State as DiskState
from ...cachestore.ledger import Kind
from ...models.runtime import BLAS, device_name, memory_statistics
from ...scheduler.statistics import EngineStatistics, MemoryUse
from .metrics import gauge

if TYPE_CHECKING:
    from ...cachestore.disk.model_folders import ModelFolders
    from ..models.slot import ModelSlot

DAEMON_STATES = ("loading", "ready", "stalled", "stopping")
_MODEL_STATES = ("unloaded", "loading", "loaded", "unloading", "failed")


class DaemonView(NamedTuple):
    """The daemon at one moment.

    Attributes:
        state: as in `/status`.
        slots: the configured models.
        pressure_share: share of the budget that the system's memory pressure allows.
        keeps_disk: the settings ask for state on disk.
        folders: of that state; None if it cannot be kept.
        connections: open ones.
        busy_seconds: work of the MLX thread since the start.
    """

    state: str
    slots: Sequence["ModelSlot"]
    pressure_share: float
    keeps_disk: bool
    folders: "ModelFolders | None"
    connections: int
    busy_seconds: float


class DaemonMetrics(Collector):
    """Figures of the daemon, not of a model: the ledger, the disk, states, refusals."""

    def __init__(self, look: Callable[[], DaemonView]) -> None:
        self._look = look
        self._started_at = time.time()
        self._registry = CollectorRegistry()
        self._refusals = Counter(
            "umbel_refusals",
            "Counts requests that were refused before they were queued, by the error's code.",
            ["reason"],
            registry=self._registry,
        )

    def refuse(self, reason: str) -> None:
        """Count a refused request by its error's code, which no client can choose."""
        self._refusals.labels(reason).inc()

    def collect(self) -> Iterator[Metric]:
        """Read all of them."""
        view = self._look()
        yield from self._registry.collect()
        yield from self._itself(view)
        yield from _states(view)
        yield from _memory(view)
        yield from _cache(view)

    def _itself(self, view: DaemonView) -> Iterator[Metric]:
        labels = {"version": __version__, "backend": device_name(), "blas": BLAS.name}
        info = GaugeMetricFamily(
            "umbel_info", "The value is always 1; the labels describe the build.", labels=[*labels]
        )
        info.add_metric([*labels.values()], 1)
        yield info
        yield gauge(
            "umbel_start_time_seconds",
            "The daemon started at this time, in seconds since 1970.",
            self._started_at,
        )
        yield gauge("umbel_connections", "So many client connections are open.", view.connections)
        busy = CounterMetricFamily(
            "umbel_busy_seconds", "The thread that computes has worked for so many seconds."
        )
        busy.add_metric([], view.busy_seconds)
        yield busy


def _states(view: DaemonView) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "umbel_state", "The value is 1 for the state that the daemon is in.", labels=["state"]
    )
    for each in DAEMON_STATES:
        state.add_metric([each], each == view.state)
    yield state
    disk = GaugeMetricFamily(
        "umbel_disk_state",
        "The value is 1 for the state that the disk tier is in.",
        labels=["state"],
    )
    if view.keeps_disk:
        for name in get_args(DiskState):
            disk.add_metric([name], name == _disk_state(view))
    yield disk
    models = GaugeMetricFamily(
        "umbel_model_state",
        "The value is 1 for the state that a model is in.",
        labels=["model", "state"],
    )
    for slot in view.slots:
        failed = slot.failure is not None and slot.residence == "unloaded"
        for name in _MODEL_STATES:
            models.add_metric([slot.name, name], name == ("failed" if failed else slot.residence))
    yield models


def _disk_state(view: DaemonView) -> DiskState:
    """Return the worst state of all models' disk tiers."""
    if view.folders is None or any(slot.resident and not slot.metrics.disk for slot in view.slots):
        return "off"
    states = {slot.metrics.disk.tier.statistics().state for slot in view.slots if slot.metrics.disk}
    return next((state for state in ("off", "suspended") if state in states), "on")


def _memory(view: DaemonView) -> Iterator[Metric]:
    yield gauge(
        "umbel_pressure_share",
        "State may take this share of its budget; it is below 1 while the system lacks memory.",
        view.pressure_share,
    )
    used = GaugeMetricFamily(
        "umbel_mlx_bytes",
        "MLX holds so many bytes: active in arrays, cached for reuse, and peak since the start.",
        labels=["kind"],
    )
    now = memory_statistics()
    for kind, nbytes in (("active", now.active), ("cached", now.cached), ("peak", now.peak)):
        used.add_metric([kind], nbytes)
    yield used


def ledger_of(engines: Iterable[EngineStatistics]) -> MemoryUse | None:
    """Return the ledger of all models as last published; None without an engine."""
    published = [engine for engine in engines if engine.memory.budget]
    return max(published, key=lambda each: each.last_step_at).memory if published else None


def _cache(view: DaemonView) -> Iterator[Metric]:
    engines = [slot.metrics.engine() for slot in view.slots]
    memory = ledger_of(engines) or MemoryUse()
    held = GaugeMetricFamily(
        "umbel_cache_bytes",
        "State of all models takes so many bytes, by where it is and what it is.",
        labels=["tier", "kind"],
    )
    budget = GaugeMetricFamily(
        "umbel_cache_budget_bytes",
        "State of all models may take so many bytes at present.",
        labels=["tier"],
    )
    for kind in Kind:
        held.add_metric(["memory", kind], getattr(memory, kind))
    budget.add_metric(["memory"], memory.budget)
    if view.folders is not None:
        disks = [slot.metrics.disk.bytes_by_kind() for slot in view.slots if slot.metrics.disk]
        for stored in ("kv", "checkpoint"):
            held.add_metric(["disk", stored], sum(disk[stored] for disk in disks))
        held.add_metric(["disk", "unloaded"], view.folders.resting_bytes)
        budget.add_metric(["disk"], view.folders.budget)
    yield held
    yield budget
    yield gauge(
        "umbel_cache_usage_ratio",
        "Requests, pins and writes use this share of the memory budget, from 0 to 1.",
        _usage(memory, engines),
    )
    yield gauge(
        "umbel_cache_buffers", "State of all models takes so many allocations.", memory.buffers
    )


def _usage(memory: MemoryUse, engines: Iterable[EngineStatistics]) -> float:
    """Return the share of the budget that requests, pins and writes use, from 0 to 1.

    Idle state counts as free, as in vLLM: routers avoid servers by this figure. More than the
    budget is held while it shrinks.
    """
    held = sum(engine.cache.held_bytes for engine in engines)
    used = held + memory.tail + memory.paging + memory.transient
    return min(1.0, used / memory.budget) if memory.budget else 0.0
