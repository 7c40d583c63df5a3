"""What is measured, and under which names."""

import pytest

from umbel.cachestore.statistics import CacheStatistics
from umbel.daemon.config import Settings
from umbel.daemon.metrics import Metrics
from umbel.scheduler.request import FinishReason
from umbel.scheduler.statistics import EngineStatistics, MemoryUse

from .measured import measured_by

LONG = {
    "umbel_time_to_first_token_seconds",
    "umbel_request_queue_seconds",
    "umbel_request_prefill_seconds",
    "umbel_request_decode_seconds",
    "umbel_e2e_request_latency_seconds",
}
"""Histograms of times that may be as long as a request."""


def test_outcomes_under_vllms_names() -> None:
    """Who was refused never ended there; each reason is there before the first request."""
    metrics = Metrics(EngineStatistics, lambda: 0, None)
    metrics.requests.labels(FinishReason.CANCELLED).inc()
    metrics.refuse("not_found")
    measured = measured_by(metrics)
    ended = {key[1]: n for key, n in measured.items() if key[0] == "vllm:request_success_total"}
    assert ended == {"stop": 0, "length": 0, "abort": 1, "error": 0}


def test_tokens_under_vllms_names() -> None:
    """Prompt tokens are queries of the prefix cache, and those that were restored its hits."""
    statistics = EngineStatistics(prompt_tokens=50, prompt_tokens_cached=30, preemptions=2)
    measured = measured_by(Metrics(lambda: statistics, lambda: 0, None))
    assert measured["vllm:prompt_tokens_total",] == 50
    assert measured["vllm:prefix_cache_queries_total",] == 50
    assert measured["vllm:prefix_cache_hits_total",] == 30
    assert measured["vllm:num_preemptions_total",] == 2


@pytest.mark.parametrize(
    ("memory", "held", "usage"),
    [
        (MemoryUse(), 0, 0),
        (MemoryUse(budget=100, buffers=7), 0, 0),
        (MemoryUse(budget=100, kv=90, checkpoint=10), 0, 0),  # a warm cache is no full one
        (MemoryUse(budget=100, kv=60, tail=5, paging=3, transient=2), 30, 0.4),
        (MemoryUse(budget=100, kv=130), 130, 1),  # the budget shrank, and what is leased stays
    ],
)
def test_usage_of_the_budget(memory: MemoryUse, held: int, usage: float) -> None:
    """What somebody uses counts, and it is from 0 to 1."""
    cache = CacheStatistics(held_bytes=held)
    statistics = EngineStatistics(memory=memory, cache=cache)
    measured = measured_by(Metrics(lambda: statistics, lambda: 0, None))
    assert measured["umbel_cache_usage_ratio",] == usage
    assert measured["vllm:kv_cache_usage_perc",] == usage


def test_histograms_reach_as_far_as_requests_last() -> None:
    """The last bound of all but the latency of tokens is the default of `request_timeout`."""
    bounds: dict[str, list[str]] = {}
    for key in measured_by(Metrics(EngineStatistics, lambda: 0, None)):
        if key[0].startswith("umbel_") and key[0].endswith("_bucket"):
            bounds.setdefault(key[0].removesuffix("_bucket"), []).append(key[1])
    assert bounds.keys() == LONG | {"umbel_inter_token_latency_seconds"}
    last = f"{float(Settings().request_timeout)}"
    assert all(bounds[name][-2:] == [last, "+Inf"] for name in LONG)
