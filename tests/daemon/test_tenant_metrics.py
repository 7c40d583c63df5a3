"""Counters by tenant: what is counted, and that their labels are bounded."""

import os

from prometheus_client import CollectorRegistry, generate_latest

from umbel.daemon.observability.metrics import MOST_TENANTS, OTHERS, Metrics, TenantMetrics
from umbel.scheduler.statistics import EngineStatistics
from umbel.scheduler.times import Activity, Times

from .measured import page, samples
from .running import RunningDaemon


def _by_last(measured: dict[tuple[str, ...], float], name: str) -> dict[str, float]:
    """A metric's samples, by the value of its last label."""
    return {key[-1]: value for key, value in measured.items() if key[0] == name}


def test_the_labels_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry)
    for _ in range(2):
        for number in range(MOST_TENANTS + 36):
            metrics.count(f"t{number}", "stop", {"prompt": 3})
    measured = samples(generate_latest(registry).decode())
    requests = _by_last(measured, "umbel_tenant_requests_total")
    assert len(requests) == MOST_TENANTS + 1
    assert requests["t0"] == requests[f"t{MOST_TENANTS - 1}"] == 2
    assert requests[OTHERS] == 72
    tokens = [value for key, value in measured.items() if key[0] == "umbel_tenant_tokens_total"]
    assert sum(tokens) == 6 * (MOST_TENANTS + 36)


def test_waits_are_counted_and_work_is_not() -> None:
    """Each for its seconds."""
    registry = CollectorRegistry()
    times = Times(Activity.SLOT, 10.0)
    for activity, at in ((Activity.DISK, 12.0), (Activity.PREFILL, 15.0), (Activity.MEMORY, 16.0)):
        times.note(activity, at)
    assert times.longest_wait(20.0) == (Activity.MEMORY, 4.0)
    TenantMetrics(registry).add_waits("t", times, 20.0)
    measured = samples(generate_latest(registry).decode())
    assert {
        key[1]: value
        for key, value in measured.items()
        if key[0] == "umbel_tenant_wait_seconds_total"
    } == {"slot": 2.0, "disk": 3.0, "memory": 4.0}


def test_a_tenant_sees_its_own() -> None:
    """Nothing that is counted for all together; who sees all has that too."""
    metrics = Metrics(EngineStatistics, lambda: 0, None)
    for tenant in ("a", "b"):
        metrics.tenants.count(tenant, "stop", {"prompt": 3})
    everything, own = (samples(page({"model": metrics}, who)) for who in (None, "a"))
    assert set(_by_last(everything, "umbel_tenant_requests_total")) == {"a", "b"}
    assert set(_by_last(own, "umbel_tenant_requests_total")) == {"a"}
    assert "b" not in {label for key in own for label in key}
    told = {key[0] for key in own}
    assert told == {"umbel_tenant_requests_total", "umbel_tenant_tokens_total"}
    assert all(key[0].startswith("umbel_tenant_") for key in own)
    assert {"umbel_steps_total", "umbel_requests_running", *told} <= {key[0] for key in everything}
    assert "monitor = true" in page({"model": metrics}, "a"), "it says why so little is there"
    assert "monitor = true" not in page({"model": metrics})


def test_a_request_counts_for_its_tenant(tiny_daemon: RunningDaemon) -> None:
    """Its tokens, and how it ended."""
    question = {"role": "user", "content": "x"}
    # Greedy: an answer that is drawn may end at once.
    body = {"messages": [question], "max_tokens": 3, "temperature": 0}
    usage = tiny_daemon.post(body).json()["usage"]
    text = tiny_daemon.request("GET", "/metrics").body.decode()
    measured = samples(text)
    tenant = f"uid:{os.getuid()}"
    assert measured["umbel_tenant_requests_total", "length", tenant] >= 1
    tokens = measured["umbel_tenant_tokens_total", "generation", tenant]
    assert tokens >= usage["completion_tokens"] == 3
