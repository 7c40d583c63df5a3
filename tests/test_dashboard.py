"""The Grafana dashboard asks only for what is exported, and in the way that suits its type."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from umbel.daemon.metrics import Metrics
from umbel.scheduler.statistics import EngineStatistics

PATH = Path(__file__).resolve().parent.parent / "docs/grafana/umbel.json"
DASHBOARD = json.loads(PATH.read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SOURCE = "${datasource}"

_SERIES = re.compile(r"([a-zA-Z_][\w:]*)(\{[^}]*\})(\[\$__rate_interval\])?")
_BY = re.compile(r"\bby \(([^)]*)\)")
_QUANTILE = re.compile(r"histogram_quantile\([\d.]+, sum by \(le\) \(rate\($")
_WORDS = {"avg", "by", "histogram_quantile", "rate", "sum"}
_OF_PROMETHEUS = {"instance", "job"}


class Exported(NamedTuple):
    """One series that `/metrics` has: its metric's type, and its labels."""

    kind: str
    labels: frozenset[str]


def _exported() -> dict[str, Exported]:
    """Ask a registry of a daemon with a disk tier that has refused somebody."""
    disk = SimpleNamespace(bytes_by_kind=lambda: {"kv": 1}, budget=1)
    metrics = Metrics(EngineStatistics, lambda: 0, cast("Any", disk))
    metrics.refuse("not_found")
    return {
        sample.name: Exported(family.type, frozenset(sample.labels))
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


EXPORTED = _exported()


def faults(expression: str, legend: str = "") -> Iterator[str]:
    """Say what is wrong with a query."""
    grouped = {label.strip() for by in _BY.findall(expression) for label in by.split(",")}
    for series in _SERIES.finditer(expression):
        name, selector, window = series.groups()
        exported = EXPORTED.get(name)
        if exported is None:
            yield f"{name} is not exported"
            continue
        before = expression[: series.start()]
        is_rate = before.endswith("rate(") and window is not None
        if is_rate != (exported.kind != "gauge"):
            yield f"{name} is a {exported.kind}"
        if bool(_QUANTILE.search(before)) != name.endswith("_bucket"):
            yield f"{name} and histogram_quantile do not go together"
        asked = set(re.findall(r"(\w+)\s*(?:=|!)", selector))
        if not asked >= _OF_PROMETHEUS:
            yield f"{name} is asked of all daemons"
        yield from (f"{name} has no {x}" for x in sorted((asked | grouped) - _labels(exported)))
    words = set(re.findall(r"[a-zA-Z_][\w:]*", _BY.sub("by", _SERIES.sub("", expression))))
    yield from (f"{word} is no function, or selects nothing" for word in sorted(words - _WORDS))
    named = set(re.findall(r"\{\{(\w+)\}\}", legend))
    yield from (f"the legend names {label}" for label in sorted(named ^ (grouped - {"le"})))


def _labels(exported: Exported) -> frozenset[str]:
    return exported.labels | _OF_PROMETHEUS


def _sources(part: Any) -> Iterator[Any]:
    """Find every data source that something of the dashboard names."""
    if isinstance(part, Mapping):
        if "datasource" in part:
            yield part["datasource"]
        part = list(part.values())
    if isinstance(part, list):
        for below in part:
            yield from _sources(below)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_panel(panel: dict[str, Any]) -> None:
    """It says what it shows, and its queries are of what there is."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert list(faults(target["expr"], target["legendFormat"])) == [], target["expr"]


QUEUE = "umbel_request_queue_seconds_bucket"
SELECTED = '{job=~"$job", instance=~"$instance"}'
OVER_TIME = f"{SELECTED}[$__rate_interval]"


@pytest.mark.parametrize(
    "expression",
    [
        f"sum(umbel_requests_running{SELECTED})",
        f"sum(rate(umbel_steps_total{OVER_TIME}))",
        f"histogram_quantile(0.5, sum by (le) (rate({QUEUE}{OVER_TIME})))",
        f"sum(rate(vllm:prompt_tokens_total{OVER_TIME}))",
    ],
)
def test_queries_that_suit_are_no_fault(expression: str) -> None:
    """What is exported may be asked for."""
    assert list(faults(expression)) == []


@pytest.mark.parametrize(
    ("expression", "legend"),
    [
        (f"sum(umbel_requests_walking{SELECTED})", ""),
        (f"sum(umbel_steps{SELECTED})", ""),
        (f"sum(umbel_steps_total{SELECTED})", ""),
        (f"sum(rate(umbel_steps_total{SELECTED}))", ""),
        (f"sum(rate(umbel_requests_running{OVER_TIME}))", ""),
        (f"sum(rate({QUEUE}{OVER_TIME}))", ""),
        (f"histogram_quantile(0.5, sum(rate({QUEUE}{OVER_TIME})))", ""),
        (f"histogram_quantile(0.5, sum by (le) (rate(umbel_steps_total{OVER_TIME})))", ""),
        (f"sum by (tier) (rate(umbel_requests_total{OVER_TIME}))", "{{tier}}"),
        (f"sum by (outcome) (rate(umbel_requests_total{OVER_TIME}))", ""),
        (f"sum(rate(umbel_requests_total{OVER_TIME}))", "{{outcome}}"),
        ('sum(umbel_cache_bytes{job="a", instance="b", colour="red"})', ""),
        ("sum(umbel_requests_running{})", ""),
        ("sum(umbel_requests_running)", ""),
        (f"median(umbel_requests_running{SELECTED})", ""),
    ],
)
def test_planted_faults_are_found(expression: str, legend: str) -> None:
    """Each of these would show nothing, or nonsense."""
    assert list(faults(expression, legend)) != []


def test_it_shows_what_an_operator_looks_for() -> None:
    """Load, latency, throughput, the cache, memory, paging, steps and refusals."""
    text = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    shown = {series[0].removeprefix("umbel_") for series in _SERIES.findall(text)}
    assert shown >= {
        *("requests_running", "requests_waiting", "requests_total", "refusals_total"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("request_queue_seconds_bucket", "generation_tokens_total", "prefill_tokens_total"),
        *("prompt_tokens_cached_total", "prompt_tokens_total"),
        *("cache_bytes", "cache_budget_bytes", "evictions_total", "page_ins_total"),
        *("step_seconds_total", "steps_total"),
    }
    for name in ("time_to_first_token", "inter_token_latency", "request_queue"):
        assert all(re.search(rf"quantile\({q}, [^,]*umbel_{name}_", text) for q in ("0.5", "0.99"))


def test_it_imports_anywhere() -> None:
    """Whoever imports it chooses the data source; nothing names one, or what is theirs."""
    first, *others = DASHBOARD["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert {variable["name"] for variable in others} == _OF_PROMETHEUS
    for variable in others:
        asked = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"])
        assert asked is not None
        assert asked[1] in EXPORTED
        assert asked[2] == variable["name"]
    found = list(_sources(DASHBOARD))
    queries = sum(len(panel["targets"]) for panel in PANELS)
    assert len(found) == len(PANELS) + queries + len(others)
    assert all(source == {"type": "prometheus", "uid": SOURCE} for source in found)
    assert "__inputs" not in DASHBOARD
    assert "id" not in DASHBOARD


def test_panels_have_places_of_their_own() -> None:
    """No two of them lie upon each other, and none has another's number."""
    places = [panel["gridPos"] for panel in PANELS]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
