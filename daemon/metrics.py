"""What the daemon measures, for Prometheus."""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..cachestore.ledger import Kind
from ..cachestore.paging.pager import Pager
from ..scheduler.request import FinishReason
from ..scheduler.statistics import EngineStatistics
from .tenant_metrics import OfTenant, TenantMetrics
from .vllm_names import WithVLLMNames

REFUSED = "refused"
"""The outcome of a request that never got into the queue."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_LONG = (*_SECONDS, 250, 500, 1000, 1800, 3600)  # the last is what a request may take, unless set


class Stage(enum.StrEnum):
    """Where a request is between its arrival and the end of its computation, in this order."""

    QUEUE = "queue"
    """From its arrival until the engine starts it."""
    PREFILL = "prefill"
    """Until its first token."""
    DECODE = "decode"
    """Until the engine is done with it."""


_STAGES = {
    Stage.QUEUE: "From arrival to the start of the work.",
    Stage.PREFILL: "From the start of the work to the first token.",
    Stage.DECODE: "From the first token to the end of the work.",
}


class Metrics:
    """All metrics. Reading them waits for nothing and disturbs nobody.

    Attributes:
        requests: that ended, by outcome.
        refusals: requests that were refused, by the reason that their answers give.
        stage_seconds: how long requests were in each stage.
        e2e_seconds: how long they took in all.
        tenants: what is counted by tenant.

    Args:
        engine: returns the engine's last published statistics.
        waiting: returns how many requests wait.
        disk: the disk tier, if there is one.
    """

    def __init__(
        self,
        engine: Callable[[], EngineStatistics],
        waiting: Callable[[], int],
        disk: Pager | None,
    ) -> None:
        self._measured = CollectorRegistry()
        self.requests = self._counter("umbel_requests", "Requests ended, by how.", "outcome")
        for outcome in (*FinishReason, REFUSED):
            self.requests.labels(outcome)  # so that a first one is an increase
        self.refusals = self._counter("umbel_refusals", "Requests refused, by why.", "reason")
        self.time_to_first_token = self._histogram(
            "umbel_time_to_first_token_seconds", "From arrival to the first token.", _LONG
        )
        self.inter_token_latency = self._histogram(
            "umbel_inter_token_latency_seconds", "Between two tokens of one answer.", _SECONDS
        )
        self.stage_seconds = {
            stage: self._histogram(f"umbel_request_{stage}_seconds", text, _LONG)
            for stage, text in _STAGES.items()
        }
        self.e2e_seconds = self._histogram(
            "umbel_e2e_request_latency_seconds", "From arrival until the answer is sent.", _LONG
        )
        self.tenants = TenantMetrics(self._measured)
        self.attach(engine, waiting, disk)
        self._measured.register(_EngineCollector(self))
        self._measured.register(_MemoryCollector(self))
        self._exported = CollectorRegistry()
        self._exported.register(WithVLLMNames(self._measured))

    def attach(
        self,
        engine: Callable[[], EngineStatistics],
        waiting: Callable[[], int],
        disk: Pager | None,
    ) -> None:
        """Read another engine from now on: the model was loaded anew, or is not loaded."""
        self.engine, self.waiting, self.disk = engine, waiting, disk

    def collect(self) -> Iterator[Metric]:
        """Read all metrics, also under vLLM's names."""
        yield from self._exported.collect()

    def render(self, tenant: str | None = None) -> bytes:
        """Write all metrics in Prometheus's text format.

        Args:
            tenant: only what is counted for it alone; None for all.
        """
        return _written(self._exported, tenant)

    def refuse(self, reason: str) -> None:
        """Count a request that was refused.

        Args:
            reason: one of few: the error's code, never what a client wrote.
        """
        self.requests.labels(REFUSED).inc()
        self.refusals.labels(reason).inc()

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, [label], registry=self._measured)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._measured)


class ByModel(Collector):
    """The metrics of several models, each sample with the model's name."""

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        """Read all of them; a family of several models is one."""
        families: dict[str, Metric] = {}
        for name, metrics in self._models.items():
            for family in metrics.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "model": name})
                    for sample in family.samples
                ]
        yield from families.values()

    def render(self, tenant: str | None = None) -> bytes:
        """Write all of them, as `Metrics.render` does."""
        registry = CollectorRegistry()
        registry.register(self)
        return _written(registry, tenant)


def _written(registry: CollectorRegistry, tenant: str | None) -> bytes:
    if tenant is None:
        return generate_latest(registry)
    of_tenant = CollectorRegistry()
    of_tenant.register(OfTenant(list(registry.collect()), tenant))
    return generate_latest(of_tenant)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for, not when they change."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        now = self._metrics.engine()
        yield _gauge("umbel_requests_running", "Requests at work.", len(now.running))
        yield _gauge("umbel_requests_waiting", "Requests in the queue.", self._metrics.waiting())
        for name, text, value in (
            ("umbel_prompt_tokens", "Prompt tokens of started requests.", now.prompt_tokens),
            ("umbel_prompt_tokens_cached", "Of these, restored.", now.prompt_tokens_cached),
            ("umbel_prefill_tokens", "Prompt tokens really computed.", now.prefill_tokens),
            ("umbel_batch_shapes", "New shapes of batches.", now.batch_shapes),
            ("umbel_generation_tokens", "Tokens of answers.", now.generation_tokens),
            ("umbel_steps", "Steps of the engine.", now.steps),
            ("umbel_step_seconds", "Time that steps took.", now.step_seconds),
            ("umbel_evictions", "States forgotten for room.", now.cache.evictions),
            ("umbel_page_outs", "States left to the disk for room.", now.cache.page_outs),
            ("umbel_page_ins", "States read back from disk.", now.page_ins),
            ("umbel_preemptions", "Running requests preempted for room.", now.preemptions),
            ("umbel_yields", "Running requests that gave their slots to others.", now.yields),
        ):
            family = CounterMetricFamily(name, text)
            family.add_metric([], value)
            yield family


class _MemoryCollector(Collector):
    """Reads the ledger as the engine last published it, and the disk tier's counters."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        now, disk = self._metrics.engine(), self._metrics.disk
        memory = now.memory
        held = GaugeMetricFamily(
            "umbel_cache_bytes", "Model state, by where it is.", labels=["tier", "kind"]
        )
        for kind in Kind:
            held.add_metric(["memory", kind], getattr(memory, kind))
        budget = GaugeMetricFamily("umbel_cache_budget_bytes", "What it may take.", labels=["tier"])
        budget.add_metric(["memory"], memory.budget)
        if disk is not None:
            for stored, nbytes in disk.bytes_by_kind().items():
                held.add_metric(["disk", stored], nbytes)
            budget.add_metric(["disk"], disk.budget)
        yield held
        yield budget
        yield _gauge("umbel_cache_usage_ratio", "Of the budget in memory, in use.", _usage(now))
        yield _gauge("umbel_cache_buffers", "Allocations of model state.", memory.buffers)


def _usage(now: EngineStatistics) -> float:
    """How much of its budget state takes that somebody uses, from 0 to 1.

    What is idle counts as free, as vLLM counts it: routers avoid servers by this figure. More than
    the budget is held while it shrinks.
    """
    memory = now.memory
    used = now.cache.held_bytes + memory.tail + memory.paging + memory.transient
    return min(1.0, used / memory.budget) if memory.budget else 0.0


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
