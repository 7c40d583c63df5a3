"""Prometheus metrics: `umbel_…`, and `vllm:…` for the names that vLLM's tooling reads."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ..cachestore.paging.pager import Pager
from ..scheduler.statistics import EngineStatistics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)

_VLLM = {
    "umbel_requests_running": "vllm:num_requests_running",
    "umbel_requests_waiting": "vllm:num_requests_waiting",
    "umbel_prompt_tokens": "vllm:prompt_tokens",
    "umbel_generation_tokens": "vllm:generation_tokens",
    "umbel_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "umbel_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "umbel_request_queue_seconds": "vllm:request_queue_time_seconds",
}


class Metrics:
    """What the daemon measures. Reading it waits for nothing and disturbs nobody.

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
        self.requests = Counter(
            "umbel_requests",
            "Requests ended, by how.",
            ["outcome"],
            registry=self._measured,
        )
        self.time_to_first_token = self._histogram(
            "umbel_time_to_first_token_seconds", "From arrival to the first token."
        )
        self.inter_token_latency = self._histogram(
            "umbel_inter_token_latency_seconds", "Between two tokens of one answer."
        )
        self.queue_seconds = self._histogram(
            "umbel_request_queue_seconds", "From arrival to the start of the work."
        )
        self._measured.register(_EngineCollector(engine, waiting))
        self._measured.register(_MemoryCollector(engine, disk))
        self._exported = CollectorRegistry()
        self._exported.register(_WithAliases(self._measured))

    def render(self) -> bytes:
        """Write all metrics in Prometheus's text format."""
        return generate_latest(self._exported)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self._measured)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for, not when they change."""

    def __init__(self, engine: Callable[[], EngineStatistics], waiting: Callable[[], int]) -> None:
        self._engine = engine
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        now = self._engine()
        yield _gauge("umbel_requests_running", "Requests at work.", len(now.running))
        yield _gauge("umbel_requests_waiting", "Requests in the queue.", self._waiting())
        for name, text, value in (
            ("umbel_prompt_tokens", "Prompt tokens of started requests.", now.prompt_tokens),
            ("umbel_prompt_tokens_cached", "Of these, restored.", now.prompt_tokens_cached),
            ("umbel_prefill_tokens", "Prompt tokens really computed.", now.prefill_tokens),
            ("umbel_batch_shapes", "New shapes of batches.", now.batch_shapes),
            ("umbel_generation_tokens", "Tokens of answers.", now.generation_tokens),
            ("umbel_steps", "Steps of the engine.", now.steps),
            ("umbel_evictions", "States forgotten for room.", now.cache.evictions),
            ("umbel_page_outs", "States left to the disk for room.", now.cache.page_outs),
            ("umbel_page_ins", "States read back from disk.", now.page_ins),
            ("umbel_preemptions", "Running requests preempted for room.", now.preemptions),
        ):
            family = CounterMetricFamily(name, text)
            family.add_metric([], value)
            yield family


class _MemoryCollector(Collector):
    """Reads the ledger as the engine last published it, and the disk tier's counters."""

    def __init__(self, engine: Callable[[], EngineStatistics], disk: Pager | None) -> None:
        self._engine = engine
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        memory = self._engine().memory
        held = GaugeMetricFamily(
            "umbel_cache_bytes", "Model state, by where it is.", labels=["tier", "kind"]
        )
        for kind in ("kv", "checkpoint", "tail", "paging", "transient"):
            held.add_metric(["memory", kind], getattr(memory, kind))
        budget = GaugeMetricFamily("umbel_cache_budget_bytes", "What it may take.", labels=["tier"])
        budget.add_metric(["memory"], memory.budget)
        if self._disk is not None:
            for kind, nbytes in self._disk.bytes_by_kind().items():
                held.add_metric(["disk", kind], nbytes)
            budget.add_metric(["disk"], self._disk.budget)
        yield held
        yield budget
        yield _gauge("umbel_cache_buffers", "Allocations of model state.", memory.buffers)


class _WithAliases(Collector):
    """Repeats some families under the names that vLLM's dashboards query."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            if (alias := _VLLM.get(family.name)) is not None:
                yield _renamed(family, alias)


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type, family.unit)
    copy.samples = [
        Sample(name + s.name.removeprefix(family.name), s.labels, s.value, s.timestamp)
        for s in family.samples
    ]
    return copy


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
