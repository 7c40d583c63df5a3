"""Metrics of each model, for Prometheus, and how all are written."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...cachestore.paging.pager import Pager
from ...scheduler.request import FinishReason
from ...scheduler.statistics import EngineStatistics
from .tenant_metrics import OfTenant, TenantMetrics
from .vllm_names import WithVLLMNames

disable_created_metrics()  # type: ignore[no-untyped-call]  # they were a third of all samples, and the same as the start

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
    Stage.QUEUE: "Requests waited so many seconds from arrival until the engine started them.",
    Stage.PREFILL: "Requests took so many seconds from their start to the first token.",
    Stage.DECODE: "Requests took so many seconds from the first token to the end of the work.",
}


_COUNTED = {
    "prompt_tokens": "Counts the prompt tokens of requests that were started.",
    "prompt_tokens_cached": "Counts prompt tokens that were restored from the cache.",
    "prefill_tokens": "Counts prompt tokens that were really computed.",
    "batch_shapes": "Counts shapes of batches that were computed for the first time.",
    "generation_tokens": "Counts the tokens of answers.",
    "steps": "Counts the steps of the engine.",
    "step_seconds": "Steps took so many seconds, each from the end of the one before.",
    "evictions": "Counts states that were forgotten to make room.",
    "page_outs": "Counts states that left memory and stay on disk.",
    "page_ins": "Counts states that were read back from disk.",
    "preemptions": "Counts running requests that were preempted to make room.",
    "yields": "Counts running requests that gave their slots to others.",
}
"""Totals of `EngineStatistics` by name, and what each says."""

_BY_CACHE = ("evictions", "page_outs")


class Metrics(Collector):
    """The metrics of one model. Reading them waits for nothing and disturbs nobody.

    Attributes:
        requests: that ended, by outcome.
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
        self.requests = Counter(
            "umbel_requests",
            "Counts requests that ended, by the way they ended.",
            ["outcome"],
            registry=self._measured,
        )
        for outcome in FinishReason:
            self.requests.labels(outcome)  # so that a first one is an increase
        self.time_to_first_token = self._histogram(
            "umbel_time_to_first_token_seconds",
            "Requests took so many seconds from arrival to the first token.",
            _LONG,
        )
        self.inter_token_latency = self._histogram(
            "umbel_inter_token_latency_seconds",
            "So many seconds passed between two tokens of one answer.",
            _SECONDS,
        )
        self.stage_seconds = {
            stage: self._histogram(f"umbel_request_{stage}_seconds", text, _LONG)
            for stage, text in _STAGES.items()
        }
        self.e2e_seconds = self._histogram(
            "umbel_e2e_request_latency_seconds",
            "Requests took so many seconds from arrival until the answer was sent.",
            _LONG,
        )
        self.tenants = TenantMetrics(self._measured)
        self.attach(engine, waiting, disk)
        self._measured.register(_EngineCollector(self))

    def attach(
        self,
        engine: Callable[[], EngineStatistics],
        waiting: Callable[[], int],
        disk: Pager | None,
    ) -> None:
        """Read another engine from now on: the model was loaded anew, or is not loaded."""
        self.engine, self.waiting, self.disk = engine, waiting, disk

    def collect(self) -> Iterator[Metric]:
        """Read all of them."""
        yield from self._measured.collect()

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


_WITHHELD = b"""\
# Only your tenant's own samples are here; figures of the whole daemon are for its operator.
# To see them, ask over the Unix socket, or send the key of a tenant with monitor = true in
# umbel.toml: see docs/operate/monitoring.md.
"""


def render(
    models: Mapping[str, Metrics],
    daemon: Collector,
    tenant: str | None = None,
    *,
    vllm_names: bool = False,
) -> bytes:
    """Write metrics in Prometheus's text format.

    Args:
        models: the metrics of each model; those of several say which they are of.
        daemon: the metrics that all models share.
        tenant: only the samples that are counted for it alone; None for all.
        vllm_names: whether some are repeated under the names that vLLM gives them.
    """
    of_models = ByModel(models) if len(models) > 1 else next(iter(models.values()))
    if tenant is not None:
        return _WITHHELD + _written(OfTenant(list(of_models.collect()), tenant))
    families = [*of_models.collect(), *daemon.collect()]
    return _written(WithVLLMNames(families) if vllm_names else _Collected(families))


class _Collected(Collector):
    """Families that were read already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _written(collector: Collector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for, not when they change."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        now = self._metrics.engine()
        yield gauge("umbel_requests_running", "So many requests are at work.", len(now.running))
        waiting = self._metrics.waiting()
        yield gauge("umbel_requests_waiting", "So many requests wait in the queue.", waiting)
        for name, text in _COUNTED.items():
            value = getattr(now.cache if name in _BY_CACHE else now, name)
            family = CounterMetricFamily(f"umbel_{name}", text)
            family.add_metric([], value)
            yield family


def gauge(name: str, text: str, value: float) -> Metric:
    """Make a gauge without labels."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
