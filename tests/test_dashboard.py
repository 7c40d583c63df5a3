"""Queries of the dashboard, the alert rules and the docs suit the exported metrics."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from umbel.cachestore.tries import CacheStatistics
from umbel.daemon.observability.metrics import Metrics
from umbel.scheduler.statistics import EngineStatistics, MemoryUse
from umbel.scheduler.times import Activity, Times

from .daemon.measured import disk_of, page

DOCS = Path(__file__).resolve().parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "grafana/umbel.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DOCS / "prometheus-rules.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
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


LEDGER = MemoryUse(budget=1000, kv=300, checkpoint=20, tail=50, paging=3, transient=7)
MODELS = ("one", "two", "three")


def _models() -> dict[str, Metrics]:
    """Three loaded models that share a ledger and a disk; requests of each have waited."""
    models = {}
    for at, name in enumerate(MODELS, 1):
        told = EngineStatistics(
            steps=at, step_seconds=at, last_step_at=at, memory=LEDGER, cache=CacheStatistics()
        )
        models[name] = Metrics(partial(replace, told), lambda: 1, disk_of(kv=7, checkpoint=2))
        models[name].tenants.count("a", "stop", {"prompt": 3})
        models[name].tenants.add_waits("a", Times(Activity.SLOT, 1.0), 2.0)
    return models


FAMILIES = list(text_string_to_metric_families(page(_models())))


def _exported() -> dict[str, Exported]:
    """Return the series of a daemon with a disk tier, refusals and three loaded models."""
    return {
        sample.name: Exported(family.type, frozenset(sample.labels))
        for family in FAMILIES
        for sample in family.samples
    }


EXPORTED = _exported()


def faults(expression: str, legend: str = "") -> Iterator[str]:
    """Yield the faults of a query."""
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
    """Yield each data source that the dashboard names."""
    if isinstance(part, Mapping):
        if "datasource" in part:
            yield part["datasource"]
        part = list(part.values())
    if isinstance(part, list):
        for below in part:
            yield from _sources(below)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_panel(panel: dict[str, Any]) -> None:
    """It has a title, a description and queries of exported series."""
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
    ],
)
def test_suitable_query_is_no_fault(expression: str) -> None:
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
def test_planted_fault_of_a_query_is_found(expression: str, legend: str) -> None:
    """Each of these would show nothing, or nonsense."""
    assert list(faults(expression, legend)) != []


def test_dashboard_shows_load_latency_cache_and_states() -> None:
    """Load, latency, throughput, the cache, memory, paging, steps and refusals."""
    text = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    shown = {series[0].removeprefix("umbel_") for series in _SERIES.findall(text)}
    assert shown >= {
        *("requests_running", "requests_waiting", "requests_total", "refusals_total"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("request_queue_seconds_bucket", "generation_tokens_total", "prefill_tokens_total"),
        *("prompt_tokens_cached_total", "prompt_tokens_total"),
        *("cache_bytes", "cache_budget_bytes", "evictions_total", "page_ins_total"),
        *("step_seconds_total", "steps_total", "busy_seconds_total", "tenant_wait_seconds_total"),
        *("state", "model_state", "disk_state", "pressure_share", "mlx_bytes"),
    }
    for name in ("time_to_first_token", "inter_token_latency", "request_queue"):
        assert all(re.search(rf"quantile\({q}, [^,]*umbel_{name}_", text) for q in ("0.5", "0.99"))


def test_dashboard_imports_anywhere() -> None:
    """The user chooses the data source on import; the file names none."""
    first, *others = DASHBOARD["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == (
        "datasource",
        "datasource",
        "prometheus",
    )
    assert {variable["name"] for variable in others} == {*_OF_PROMETHEUS, "model"}
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


def test_panels_do_not_overlap() -> None:
    """Places and ids are distinct."""
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


def _summed(title: str) -> dict[tuple[str, ...], float]:
    """Compute a panel of plain sums as Prometheus does, with everything selected."""
    (panel,) = (each for each in PANELS if each["title"] == title)
    found: dict[tuple[str, ...], float] = {}
    for target in panel["targets"]:
        query = re.fullmatch(r"sum(?: by \((\w+)\))? \(?\(?(\w+)\{(.*)\}\)*", target["expr"])
        query = query or re.fullmatch(r"sum()\((\w+)\{(.*)\}\)", target["expr"])
        assert query, target["expr"]
        by, name, selector = query.groups()
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', selector))
        for sample in _samples(name):
            if wanted.items() <= sample.labels.items():
                key = (sample.labels[by],) if by else (target["legendFormat"],)
                found[key] = found.get(key, 0) + sample.value
    return found


def _samples(name: str) -> list[Sample]:
    return [s for family in FAMILIES for s in family.samples if s.name == name]


def test_memory_panels_show_the_ledger() -> None:
    """With three models, shared figures count once and the others are summed."""
    kinds = ("kv", "checkpoint", "tail", "paging", "transient")
    expected = {(kind,): getattr(LEDGER, kind) for kind in kinds}
    assert _summed("State in memory") == {**expected, ("budget",): LEDGER.budget}
    assert _summed("State on disk") == {
        ("kv",): 21,
        ("checkpoint",): 6,
        ("unloaded",): 5,
        ("budget",): 1000,
    }
    assert _summed("Requests running and waiting") == {("running",): 0, ("waiting",): 3}
    assert len(_samples("umbel_busy_seconds_total")) == 1, "one thread works for all of them"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_alert(rule: dict[str, Any]) -> None:
    """Its expression suits the exported series, and its text says what to do."""
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["description"].endswith(".")
    assert list(alert_faults(rule["expr"])) == []


_ALERT_SERIES = re.compile(r"\b((?:umbel_|vllm:|up\b)\w*)(\{[^}]*\})?(\[\d+[smh]\])?")


def alert_faults(expression: str) -> Iterator[str]:
    """Yield the faults of an alert's expression."""
    grouped = {label.strip() for by in _BY.findall(expression) for label in by.split(",")}
    if not re.search(r"(==|<|>) [\d.]+$", expression):
        yield "it compares nothing"
    found = False
    for series in _ALERT_SERIES.finditer(expression):
        name, selector, window = series.groups()
        found = True
        if name == "up":
            continue
        exported = EXPORTED.get(name)
        if exported is None:
            yield f"{name} is not exported"
            continue
        is_rate = expression[: series.start()].endswith("rate(") and window is not None
        if is_rate != (exported.kind != "gauge"):
            yield f"{name} is a {exported.kind}"
        if name.endswith("_bucket") != ("histogram_quantile(" in expression):
            yield f"{name} and histogram_quantile do not go together"
        chosen = dict(re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', selector or ""))
        yield from (f"{name} has no {x}" for x in (chosen.keys() | grouped) - _labels(exported))
        if name.endswith("_state") and chosen["state"] not in {
            sample.labels["state"] for sample in _samples(name)
        }:
            yield f"{name} is never {chosen['state']}"
    if not found:
        yield "it asks for nothing"


@pytest.mark.parametrize(
    "expression",
    [
        "umbel_requests_walking > 1",
        "umbel_steps_total > 1",
        "rate(umbel_pressure_share[5m]) < 1",
        'umbel_state{state="asleep"} == 1',
        'umbel_pressure_share{model="one"} < 1',
        "sum by (model) (rate(umbel_refusals_total[5m])) > 1",
        "histogram_quantile(0.9, sum by (le) (rate(umbel_steps_total[5m]))) > 1",
        "umbel_pressure_share",
        "1 > 0",
    ],
)
def test_planted_fault_of_an_alert_is_found(expression: str) -> None:
    """Each of these would never fire, or always."""
    assert list(alert_faults(expression)) != []


def test_alerts_watch_what_needs_a_person() -> None:
    """Daemon, engine, models, disk, memory, refusals and latency."""
    text = " ".join(rule["expr"] for rule in RULES)
    for watched in (
        *("up{", 'umbel_state{state="stalled"}', 'umbel_model_state{state="failed"}'),
        *("umbel_disk_state", "umbel_pressure_share", "umbel_refusals_total"),
        *('outcome="error"', "umbel_time_to_first_token_seconds_bucket"),
    ):
        assert watched in text


MONITORING = (DOCS / "operate/monitoring.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"^\| [^|]+ \| `([^`|]+umbel_[^`|]+|umbel_\w+)` \|$", MONITORING, re.MULTILINE)


@pytest.mark.parametrize("query", QUERIES)
def test_query_in_the_docs(query: str) -> None:
    """It asks for exported series, by labels that they have."""
    faults_of = list(alert_faults(f"{query} > 0"))
    assert faults_of == []


def test_docs_list_every_alert() -> None:
    assert len(QUERIES) > 8
    listed = re.findall(r"^\| `(Umbel\w+)` \| (\w+) \|", MONITORING, re.MULTILINE)
    assert listed == [(rule["alert"], rule["labels"]["severity"]) for rule in RULES]
