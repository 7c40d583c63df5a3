"""Metrics of each model and tenant, for Prometheus, and the text of `/metrics`."""

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
from prometheus_client.samples import Sample

from ...cachestore.paging.pager import Pager
from ...scheduler.request import FinishReason
from ...scheduler.statistics import EngineStatistics
from ...scheduler.times import Times

disable_created_metrics()  # type: ignore[no-untyped-call]  # they were a third of all samples, and the same as the start

MOST_TENANTS = 64
"""Tenants with labels of their own; later ones are counted together."""

OTHERS = "(others)"
"""The label of those; parentheses are in no tenant's name."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_LONG = (*_SECONDS, 250, 500, 1000, 1800, 3600)  # the last is the default of request_timeout


class Stage(enum.StrEnum):
    """Stages of a request, in order: until its start, its first token, and its end."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


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
"""Totals of `EngineStatistics` by name, and their descriptions."""
_BY_CACHE = ("evictions", "page_outs")

_VLLM_NAMES = {
    "umbel_requests_running": ("vllm:num_requests_running",),
    "umbel_requests_waiting": ("vllm:num_requests_waiting",),
    "umbel_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "umbel_prompt_tokens_cached": ("vllm:prefix_cache_hits",),
    "umbel_generation_tokens": ("vllm:generation_tokens",),
    "umbel_preemptions": ("vllm:num_preemptions",),
    "umbel_cache_usage_ratio": ("vllm:kv_cache_usage_perc",),
    "umbel_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "umbel_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "umbel_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "umbel_request_queue_seconds": ("vllm:request_queue_time_seconds",),
    "umbel_request_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "umbel_request_decode_seconds": ("vllm:request_decode_time_seconds",),
}
_VLLM_ENDED = ("umbel_requests", "vllm:request_success")
_VLLM_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""vLLM's `finished_reason` for each outcome; it does not count refused requests."""

_OWN_ONLY = b"""\
# Only your tenant's own samples are here; figures of the whole daemon are for its operator.
# To see them, ask over the Unix socket, or send the key of a tenant with monitor = true in
# umbel.toml: see docs/operate/monitoring.md.
"""


class Metrics(Collector):
    """The metrics of one model. Reading them waits for nothing and disturbs no request.

    Attributes:
        requests: that ended, by outcome.
        stage_seconds: seconds of requests in each stage.
        e2e_seconds: seconds of requests in all.
        tenants: counters by tenant.

    Args:
        engine: returns the engine's last published statistics.
        waiting: returns the number of waiting requests.
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

    def attach(
        self,
        engine: Callable[[], EngineStatistics],
        waiting: Callable[[], int],
        disk: Pager | None,
    ) -> None:
        """Read another engine from now on: the model was loaded again, or is not loaded."""
        self.engine, self.waiting, self.disk = engine, waiting, disk

    def collect(self) -> Iterator[Metric]:
        """Read all of them."""
        yield from self._measured.collect()
        now = self.engine()
        yield gauge("umbel_requests_running", "So many requests are at work.", len(now.running))
        waiting = self.waiting()
        yield gauge("umbel_requests_waiting", "So many requests wait in the queue.", waiting)
        for name, text in _COUNTED.items():
            family = CounterMetricFamily(f"umbel_{name}", text)
            family.add_metric([], getattr(now.cache if name in _BY_CACHE else now, name))
            yield family

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._measured)


class TenantMetrics:
    """Counters by tenant, with a bounded number of labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: dict[str, str] = {}
        self._requests = Counter(
            "umbel_tenant_requests",
            "Counts a tenant's requests that ended, by the way they ended.",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "umbel_tenant_tokens",
            "Counts the tokens of a tenant's requests that ended.",
            ["tenant", "kind"],
            registry=registry,
        )
        self._waits = Counter(
            "umbel_tenant_wait_seconds",
            "A tenant's requests waited for so many seconds, by what they waited for.",
            ["tenant", "reason"],
            registry=registry,
        )

    def count(self, tenant: str, outcome: str, tokens: dict[str, int]) -> None:
        """Count a request that ended, and its tokens by kind."""
        label = self._label(tenant)
        self._requests.labels(label, outcome).inc()
        for kind, count in tokens.items():
            self._tokens.labels(label, kind).inc(count)

    def add_waits(self, tenant: str, times: Times, ended_at: float) -> None:
        """Count the waits of a request that ended at a time of the engine's clock, in seconds."""
        for activity, seconds in times.seconds(ended_at).items():
            if activity.is_wait:
                self._waits.labels(self._label(tenant), activity).inc(max(0.0, seconds))

    def _label(self, tenant: str) -> str:
        if tenant not in self._labels and len(self._labels) < MOST_TENANTS:
            self._labels[tenant] = tenant
        return self._labels.get(tenant, OTHERS)


def render(
    models: Mapping[str, Metrics],
    daemon: Collector,
    tenant: str | None = None,
    *,
    vllm_names: bool = False,
) -> bytes:
    """Write metrics in Prometheus's text format.

    Args:
        models: the metrics of each model; with several, each sample has its model's label.
        daemon: the metrics that all models share.
        tenant: only its own samples; None for all.
        vllm_names: repeat some families under vLLM's names, for its dashboards and routers.
    """
    of_models = _by_model(models) if len(models) > 1 else next(iter(models.values())).collect()
    if tenant is not None:
        return _OWN_ONLY + _written(_of_tenant(of_models, tenant))
    families = [*of_models, *daemon.collect()]
    return _written(_with_vllm_names(families) if vllm_names else families)


def _by_model(models: Mapping[str, Metrics]) -> Iterable[Metric]:
    """Merge the families of several models, and label each sample with its model."""
    families: dict[str, Metric] = {}
    for name, metrics in models.items():
        for family in metrics.collect():
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, "model": name})
                for sample in family.samples
            ]
    return families.values()


def _of_tenant(families: Iterable[Metric], tenant: str) -> Iterator[Metric]:
    """Keep the samples that are labelled with a tenant; sums of all tenants are left out."""
    for family in families:
        kept = Metric(family.name, family.documentation, family.type)
        kept.samples = [s for s in family.samples if s.labels.get("tenant") == tenant]
        if kept.samples:
            yield kept


def _with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    ended, success = _VLLM_ENDED
    for family in families:
        yield family
        for name in _VLLM_NAMES.get(family.name, ()):
            yield _copied(family, name, family.samples)
        if family.name == ended:
            by_reason = [
                sample._replace(labels={"finished_reason": _VLLM_REASONS[outcome]})
                for sample in family.samples
                if (outcome := sample.labels["outcome"]) in _VLLM_REASONS
            ]
            yield _copied(family, success, by_reason)


def _copied(family: Metric, name: str, samples: list[Sample]) -> Metric:
    copy = Metric(name, family.documentation, family.type, family.unit)
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in samples
    ]
    return copy


class _Families(Collector):
    """Families that were read already, as a registry takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _written(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


def gauge(name: str, text: str, value: float) -> Metric:
    """Make a gauge without labels."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
