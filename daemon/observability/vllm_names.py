"""Metrics under vLLM's names: what its dashboards and routers read."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_NAMES = {
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

_ENDED = "umbel_requests"
_ENDED_AS = "vllm:request_success"
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""vLLM's `finished_reason` for each outcome; it counts none that it refused."""


class WithVLLMNames(Collector):
    """Repeats some families under the names that vLLM gives them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Read them all: each family, and behind it what it is called elsewhere."""
        for family in self._families:
            yield family
            for name in _NAMES.get(family.name, ()):
                yield _copied(family, name, family.samples)
            if family.name == _ENDED:
                yield _copied(family, _ENDED_AS, _by_reason(family.samples))


def _by_reason(samples: list[Sample]) -> list[Sample]:
    """Count requests that ended by vLLM's words for how they did."""
    return [
        sample._replace(labels={"finished_reason": _REASONS[outcome]})
        for sample in samples
        if (outcome := sample.labels["outcome"]) in _REASONS
    ]


def _copied(family: Metric, name: str, samples: list[Sample]) -> Metric:
    copy = Metric(name, family.documentation, family.type, family.unit)
    copy.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name)) for sample in samples
    ]
    return copy
