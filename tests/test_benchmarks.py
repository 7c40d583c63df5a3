"""Short forms of benchmarks: they run, their bars are reached, and their sums are right."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import attention_plans
import paging
import shapes
from fairness import LEAST_SPEEDUP, LEAST_THROUGHPUT, jain, main, max_min, measure
from fairness_decisions import Waiting
from fairness_orders import Fair
from fairness_server import Costs, PrefixCache, Server
from fairness_workload import Segment, hoarded, skewed

from umbel.models.backends import prepare as preparing
from umbel.scheduler.order import Policy, Priority
from umbel.scheduler.tenants import Terms

from .scheduler.costs import lines_run
from .shared import AS_GPU, TINY


def test_bars_are_reached() -> None:
    """One tenant floods a small server: nearly LPM's throughput, VTC's gap, and short waits."""
    shown = ("FCFS", "LPM", "VTC", "umbel")
    rows = measure("skewed", skewed(1, 40, 12.0, 0.4), Costs(slots=8), Policy(), shown)
    by = {row.order: row for row in rows}
    ours, longest, first, vtc = by["umbel"], by["LPM"], by["FCFS"], by["VTC"]
    assert ours.throughput >= LEAST_THROUGHPUT * longest.throughput
    assert ours.while_full >= LEAST_THROUGHPUT * longest.while_full
    assert vtc.bound is not None
    assert ours.gap <= vtc.bound < longest.gap
    assert first.light_p99 >= LEAST_SPEEDUP * ours.light_p99
    assert ours.jain > max(longest.jain, first.jain) + 0.2
    assert ours.hits > longest.hits - 0.01


def test_preemption_frees_slots_that_long_answers_hold() -> None:
    """Tenants stay closer together, light ones wait for less, and nothing is lost by it."""
    workload, costs, policy = hoarded(4, 10, 2.0, 2.0), Costs(slots=4), Policy(quantum=512)
    never, outcome = (
        Server(workload, Fair(policy, gap), costs).run() for gap in (None, 2 * policy.quantum)
    )
    assert never.preempted == 0 < outcome.preempted
    assert outcome.gap < never.gap
    waits, longer = (
        sum(seconds for queued in each.queued[1:] for seconds in queued)
        for each in (outcome, never)
    )
    assert waits < longer
    turns = [turn for each in workload.conversations for turn in each.turns]
    for each in (outcome, never):
        assert sum(len(queued) for queued in each.queued) == len(turns)
        assert each.decoded == sum(turn.answer for turn in turns)


def test_the_same_seed_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All figures are written, and a second run writes them again."""
    found = []
    for seed in ("7", "7", "8"):
        out = tmp_path / "found.json"
        options = ["--seconds", "10", "--seed", seed, "--json", str(out)]
        options += ["--workload", "skewed", "--workload", "crowded"]
        monkeypatch.setattr(sys, "argv", ["fairness.py", *options])
        main()
        found.append(json.loads(out.read_text()))
    assert found[0] == found[1] != found[2]
    assert {row["workload"] for row in found[0]["rows"]} == {"skewed", "crowded"}
    assert "| skewed | LPM |" in capsys.readouterr().out


def test_the_cache_evicts_the_deepest_that_was_used_longest_ago() -> None:
    """Leased state stays; a path is never there without its beginning."""
    cache = PrefixCache(30)
    root, one, two = Segment(("r",), 10), Segment((1,), 10), Segment((2,), 15)
    cache.lease([root, one])
    cache.release([root, one])
    assert cache.cached([root, one]) == 20
    cache.lease([root, two])
    assert cache.cached([root, one]) == 20
    cache.release([root, two])
    assert cache.cached([root, one]) == cache.cached([root]) == 10
    assert cache.cached([root, two]) == 25


def test_max_min_and_jain() -> None:
    """A tenant that wants less than an equal part gets it; the rest is shared equally."""
    assert max_min([2, 10, 10], 12) == [2, 5, 5]
    assert max_min([1, 1], 12) == [1, 1]
    assert jain([3, 3, 3]) == 1
    assert jain([1, 0, 0, 0]) == 0.25


@pytest.mark.parametrize("tenants", [1, 27])
def test_what_waits_costs_a_step_nothing(tenants: int) -> None:
    """With ten times as many requests waiting, starts and steps of a full batch do no more."""
    started, stepped = [], []
    for requests in (1_000, 10_000):
        waiting = Waiting(tenants, requests)
        started.append(lines_run(waiting.start))
        waiting.fill()
        stepped.append(lines_run(waiting.step))
    assert started[1] <= 1.2 * started[0] + 100
    assert stepped[1] <= 1.2 * stepped[0] + 100
    assert max(started) < 20_000
    assert max(stepped) < 20_000


def test_what_waits_costs_nothing_beside_a_bound_or_a_spent_quota() -> None:
    """Neither a start of a tenant that may run no more then, nor one beside its running ones."""
    bounded, spent = [], []
    for requests in (100, 10_000):
        bounded.append(lines_run(Waiting(1, requests, terms=Terms(running=1)).start))
        waiting = Waiting(1, requests)
        waiting.spend()
        waiting.pass_by()
        spent.append(lines_run(waiting.pass_by))
    assert bounded[1] <= 1.2 * bounded[0] + 100
    assert spent[1] <= 1.2 * spent[0] + 100


def test_what_waits_costs_nothing_beside_a_slot_that_a_tenant_gives_to_itself() -> None:
    """However many batch requests wait for it to end."""
    lines = []
    for requests in (100, 10_000):
        waiting = Waiting(1, requests, priority=Priority.BATCH)
        waiting.fill()
        waiting.give_way()
        lines.append(lines_run(waiting.give_way))
    assert lines[1] <= 1.2 * lines[0] + 100
    assert lines[1] < 20_000


def test_attention_plans_measures_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, and run on the CPU: one way attends in fewer shapes than the other."""
    monkeypatch.setattr(shapes, "choose", lambda: AS_GPU)
    monkeypatch.setitem(shapes.SHAPES, "small", TINY)
    seen: list[set[tuple[int, int]]] = []
    real = mx.fast.scaled_dot_product_attention

    def prepare(model: Any, policy: Any) -> None:
        seen.append(set())
        preparing.prepare(model, policy)

    def attend(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        if seen:
            seen[-1].add((queries.shape[2], keys.shape[2]))
        return real(queries, keys, values, **more)

    monkeypatch.setattr(attention_plans, "prepare", prepare)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
    sizes = ["--conversations", "2", "--turns", "2", "--most", "300", "--chunk", "64"]
    out = tmp_path / "found.json"
    found = attention_plans.main(["--shape", "small", *sizes, "--out", str(out)])
    assert [one.few for one in found] == [True, False]
    assert 0 < len(seen[0]) < len(seen[1])
    for one in found:
        assert min(one.wall_s, one.chunk_ms, one.first_ms, one.last_ms) > 0
    assert [each["wall_s"] for each in json.loads(out.read_text())] == [o.wall_s for o in found]


def test_paging_measures_each_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one run, on a folder of its own that is gone afterwards."""
    sizes = ["--agents", "2", "--turns", "2", "--tokens", "300", "--layers", "2", "--heads", "2"]
    monkeypatch.setattr(sys, "argv", ["paging.py", *sizes, "--folder", str(tmp_path)])
    paging.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    ways = {line["way"]: line for line in map(json.loads, lines)}
    assert {"at once", "apart"} <= ways.keys()
    assert len({way["mib"] for way in ways.values()}) == 1
    for way in ways.values():
        assert way["paging_ms_per_gib"] >= way["thread_ms_per_gib"] * 0.9 > 0
        assert 0 < way["share_of_engine"] < 1
    assert list(tmp_path.iterdir()) == []
