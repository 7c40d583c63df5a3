"""Metrics and their names."""

import re
from functools import partial
from typing import Any

import pytest

from umbel.cachestore.tries import CacheStatistics
from umbel.daemon.config import Settings
from umbel.daemon.observability.daemon_metrics import DaemonMetrics
from umbel.daemon.observability.metrics import Metrics, render
from umbel.scheduler.request import FinishReason
from umbel.scheduler.statistics import EngineStatistics, MemoryUse

from .measured import disk_of, measured_by, page, samples, slot_of, view_of

LONG = {
    "umbel_time_to_first_token_seconds",
    "umbel_request_queue_seconds",
    "umbel_request_prefill_seconds",
    "umbel_request_decode_seconds",
    "umbel_e2e_request_latency_seconds",
}
"""Histograms of times that may be as long as a request."""


def test_outcomes_under_vllms_names() -> None:
    metrics = Metrics(EngineStatistics, lambda: 0, None)
    metrics.requests.labels(FinishReason.CANCELLED).inc()
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
    cache = CacheStatistics(held_bytes=held)
    statistics = EngineStatistics(memory=memory, cache=cache)
    measured = measured_by(Metrics(lambda: statistics, lambda: 0, None))
    assert measured["umbel_cache_usage_ratio",] == usage
    assert measured["vllm:kv_cache_usage_perc",] == usage


THREE = ("one", "two", "three")


def _three() -> dict[str, Metrics]:
    """Three loaded models, whose engines have published the one ledger at different times."""
    return {
        name: Metrics(
            partial(
                EngineStatistics,
                last_step_at=float(at),
                memory=MemoryUse(budget=1000, kv=100 * at, tail=50, buffers=at),
                cache=CacheStatistics(held_bytes=10),
            ),
            lambda: 1,
            disk_of(kv=7, checkpoint=2),
        )
        for at, name in enumerate(THREE, 1)
    }


def test_the_ledger_is_there_once() -> None:
    """As the engine has published it that stepped last; files of all models are summed."""
    measured = samples(page(_three(), vllm=True))
    cache = {key[1:]: n for key, n in measured.items() if key[0] == "umbel_cache_bytes"}
    assert {kind: n for (kind, tier), n in cache.items() if tier == "memory"} == {
        "kv": 300,
        "checkpoint": 0,
        "tail": 50,
        "paging": 0,
        "transient": 0,
    }
    disk = {kind: n for (kind, tier), n in cache.items() if tier == "disk"}
    assert disk == {"kv": 21, "checkpoint": 6, "unloaded": 5}
    assert measured["umbel_cache_budget_bytes", "memory"] == 1000
    assert measured["umbel_cache_budget_bytes", "disk"] == 1000
    assert measured["umbel_cache_usage_ratio",] == pytest.approx(0.08)
    assert measured["vllm:kv_cache_usage_perc",] == pytest.approx(0.08)
    assert measured["umbel_cache_buffers",] == 3


def test_what_is_of_a_model_names_it() -> None:
    """Requests and steps, but neither refusals nor the ledger."""
    measured = samples(page(_three()))
    assert {key[1] for key in measured if key[0] == "umbel_requests_waiting"} == set(THREE)
    assert measured["umbel_refusals_total", "not_found"] == 1
    assert not any(key[0].startswith("vllm:") or key[0].endswith("_created") for key in measured)


def test_states_are_one_of_several() -> None:
    """Exactly one is 1, of the daemon, of the disk tier, and of each model."""
    slots = [slot_of(name, metrics) for name, metrics in _three().items()]
    slots[2].failure = RuntimeError("no such file"), 0.0
    changes: dict[str, Any] = {"state": "stalled", "pressure_share": 0.5}

    def states(**more: Any) -> dict[tuple[str, ...], float]:
        daemon = DaemonMetrics(lambda: view_of(slots, **changes, **more))
        return samples(render(_three(), daemon).decode())

    measured = states()
    found = {key for key, n in measured.items() if key[0].endswith("_state") and n == 1}
    assert found == {
        ("umbel_state", "stalled"),
        ("umbel_disk_state", "on"),
        ("umbel_model_state", "one", "unloaded"),
        ("umbel_model_state", "two", "unloaded"),
        ("umbel_model_state", "three", "failed"),
    }
    assert measured["umbel_pressure_share",] == 0.5
    assert measured["umbel_connections",] == 2
    assert measured["umbel_busy_seconds_total",] == 7.5
    assert states(folders=None)["umbel_disk_state", "off"] == 1
    assert not any(key[0] == "umbel_disk_state" for key in states(keeps_disk=False))


def test_help_is_a_whole_sentence() -> None:
    """In Prometheus it stands alone."""
    texts = re.findall(r"^# HELP (\S+) (.*)$", page(_three(), vllm=True), re.MULTILINE)
    assert len(texts) > 40
    for name, text in texts:
        assert re.fullmatch(r"[A-Z].*\.", text), name
        assert len(text.split()) >= 4, name
        assert not text.startswith(("Of ", "What ")), name


def test_histograms_reach_as_far_as_requests_last() -> None:
    """The last bound of all but the latency of tokens is the default of `request_timeout`."""
    bounds: dict[str, list[str]] = {}
    for key in measured_by(Metrics(EngineStatistics, lambda: 0, None)):
        if key[0].startswith("umbel_") and key[0].endswith("_bucket"):
            bounds.setdefault(key[0].removesuffix("_bucket"), []).append(key[1])
    assert bounds.keys() == LONG | {"umbel_inter_token_latency_seconds"}
    last = f"{float(Settings().request_timeout)}"
    assert all(bounds[name][-2:] == [last, "+Inf"] for name in LONG)
