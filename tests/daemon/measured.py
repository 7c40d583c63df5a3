"""Figures of `/metrics`, as a mapping."""

from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from umbel.daemon.config import ModelSettings
from umbel.daemon.models.slot import ModelSlot
from umbel.daemon.observability.daemon_metrics import DaemonMetrics, DaemonView
from umbel.daemon.observability.metrics import Metrics, render

FOLDERS = cast("Any", SimpleNamespace(resting_bytes=5, budget=1000))
"""Folders of a disk tier, of which models that are not loaded have some."""


def disk_of(**nbytes: int) -> Any:
    """Make a disk tier that is on, with so many bytes of each kind."""
    statistics = SimpleNamespace(state="on")
    tier = SimpleNamespace(statistics=lambda: statistics)
    return SimpleNamespace(bytes_by_kind=lambda: nbytes, tier=tier)


def slot_of(name: str, metrics: Metrics) -> ModelSlot:
    """Make a model with these metrics."""
    slot = ModelSlot(name, ModelSettings())
    slot.metrics = metrics
    return slot


def view_of(slots: list[ModelSlot], **changes: Any) -> DaemonView:
    """Look at a daemon that serves, with a disk tier."""
    view = DaemonView("ready", slots, 1.0, True, FOLDERS, 2, 7.5)
    return view._replace(**changes)


def page(models: dict[str, Metrics], tenant: str | None = None, *, vllm: bool = False) -> str:
    """Write what a daemon with the metrics of these models would say."""
    slots = [slot_of(name, metrics) for name, metrics in models.items()]
    daemon = DaemonMetrics(lambda: view_of(slots))
    daemon.refuse("not_found")
    return render(models, daemon, tenant, vllm_names=vllm).decode()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Read all samples, by name and the values of the labels, in the order of their names."""
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *(s.labels[key] for key in sorted(s.labels))): s.value for s in found}


def measured_by(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Read what a daemon with these metrics would say, vLLM's names included."""
    return samples(page({"model": metrics}, vllm=True))
