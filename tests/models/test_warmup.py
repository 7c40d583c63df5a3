"""Warming up: all shapes that batches start with, and nothing left behind."""

import gc
import itertools
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from structlog.testing import capture_logs

from umbel.models.attention import planned
from umbel.models.attention.cascade import Part, merge
from umbel.models.attention.planned import Kind, Shape
from umbel.models.kv.buckets import prompt_tokens
from umbel.models.load.device import DevicePolicy
from umbel.models.planned_for import Rules
from umbel.models.runner import ModelRunner
from umbel.models.runtime import resident_bytes
from umbel.models.warmup import (
    FULL_CONTEXT,
    FULL_SECONDS,
    QUICK_CONTEXT,
    QUICK_SECONDS,
    longest,
    warm_up,
)
from umbel.models.warmup.running import ScenarioRunner
from umbel.models.warmup.scenarios import Prompts, Start, padded_prompts, quick
from umbel.scheduler import policy

from ..scenario.memory_tools import zoo_model
from ..shared import AS_GPU, measured_once, padding
from .batch_fixture import NAMES, BatchFixture

CHUNK = 32  # tokens of a prompt that a warm-up computes at once
UNPADDED = replace(AS_GPU, prompt_multiple=1)  # without steps that plan nothing
PLANNING = replace(UNPADDED, plans_attention=True)
SHORT = 1024  # queries of what a turn adds, padding included
_CONSTANTS = 64
"""Bytes: MLX itself keeps one of 4 or 8 now and then. The smallest state has thousands."""


SIMILAR = {"llama_kv8", "deepseek_v3"}
"""Models whose warm-up has the steps of others here."""


@pytest.mark.parametrize(
    ("most", "rows"),
    [(1, set()), (5, {2, 3, 4, 5}), (32, {2, 3, 4, 6, 8, 12, 16, 24, 32})],
)
def test_rows_that_start_together(most: int, rows: set[int]) -> None:
    """Each number of rows that a batch may have is one scenario, up to the most that run."""
    names = {scenario.name for scenario in quick(most, Rules(), CHUNK)}
    assert {name for name in names if name.endswith(" rows")} - {"more rows", "fewer rows"} == {
        f"{count} rows" for count in rows
    }


@pytest.mark.parametrize("most", [5, 32])
def test_lengths_of_calls_that_are_padded(most: int) -> None:
    """Whatever a call of up to eight prompts is padded to was met, after long beginnings."""
    multiple, context = 16, 8192
    met, rows = set(), 0
    for event in padded_prompts(most, 2048, multiple, context).events:
        if isinstance(event, Start):
            rows = event.sequences if event.beginning == context // 2 else 0
        elif isinstance(event, Prompts):
            met.add((rows, prompt_tokens(event.tokens, rows, multiple)))
    for count in range(2, min(most, 8) + 1):
        for tokens in range(1, policy._TOGETHER // count + 1):
            assert (count, prompt_tokens(tokens, count, multiple)) in met


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_lengths_of_calls_are_met_where_there_are_such(name: str) -> None:
    """Not where each prompt is computed by itself: that would take a start's time for nothing."""
    fixture = BatchFixture(name, device=padding(16))
    run: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScenarioRunner, "run", lambda _, scenario: run.append(scenario.name))
        warm_up(fixture.runner, 3, chunk=CHUNK, context=256)
    assert ("padded prompts" in run) == (name == "llama")
    assert run[-1] == ("padded prompts" if name == "llama" else "turns")  # nothing waits for it


def at_rest(before: int) -> int:
    """Read what is active, once MLX's thread has let go of what the last operations computed.

    On a busy machine it does so later. What is really left is left for good.
    """
    gc.collect()
    for _ in range(100):
        mx.synchronize()
        if mx.get_active_memory() <= before + _CONSTANTS:
            break
        time.sleep(0.02)
    return mx.get_active_memory()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SIMILAR else n for n in NAMES],
)
def test_every_number_of_rows(name: str) -> None:
    """Batches of every size were computed with, and what comes after is right.

    The warm-up's own sequences are gone with their memory, which was not more than it says.
    """
    fixture = BatchFixture(name)
    held, peaks = list[int](), list[int]()
    for _ in range(2):
        mx.reset_peak_memory()
        warm_up(fixture.runner, 5, chunk=CHUNK)
        peaks.append(mx.get_peak_memory())
        assert not fixture.placement.sequences
        held.append(at_rest(held[0] if held else 1 << 62))
    assert held[1] - held[0] <= _CONSTANTS
    most = fixture.runner.profile.worst_case(longest(fixture.runner)).nbytes
    assert peaks[1] - held[0] <= 5 * most
    assert {shape[0] for shape in fixture.runner.shapes} == {2, 3, 4, 8}
    for prompt in (20, 3, 30):
        fixture.come(prompt=prompt)
    fixture.decode(steps=3)
    fixture.check()


def runner_on(device: DevicePolicy) -> ModelRunner:
    """Make a runner of a model that another may have measured."""
    loaded = zoo_model("llama", device=device)
    with measured_once(loaded.model):
        return ModelRunner(loaded)


@pytest.fixture
def plans_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take attention of the tests' models, which cuDNN does not compute, for planned."""
    monkeypatch.setattr(planned, "TYPES", {mx.float32})


@pytest.mark.usefixtures("plans_fp32")
def test_attention_of_long_prompts_is_planned() -> None:
    """Where a kernel is planned for each shape, none is met for the first time while serving.

    Neither by the chunks of a prompt, nor by what a turn adds to whatever came before.
    """
    runner = runner_on(PLANNING)
    met = set[tuple[Any, ...]]()
    real = mx.fast.scaled_dot_product_attention

    def attended(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
        if queries.shape[2] > 1 and isinstance(options["mask"], str):
            mx.eval(queries, keys, values)
            lie = [np.asarray(array).strides for array in (queries, keys, values)]
            met.add((queries.shape, keys.shape, values.shape, *lie, options["sinks"] is None))
        return real(queries, keys, values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", attended)
        warm_up(runner, 3, chunk=512, context=1600)
        known = met.copy()
        for length in (1, 70, 300, 513, 900, 1200, 1390):
            cache = runner.open()
            for tokens in (*[min(512, length - at) for at in range(0, length, 512)], 71, 9, 130):
                runner.prefill([([1] * tokens, cache)])
    assert max(keys[2] for _, keys, *_ in known) == 2048
    assert met == known


@pytest.mark.usefixtures("plans_fp32")
@pytest.mark.parametrize(
    ("context", "most", "last"),
    [(1600, 2048, 1536), (1 << 20, FULL_CONTEXT, FULL_CONTEXT)],
)
def test_no_longer_attention_is_planned_than_is_served(
    context: int, most: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor longer than a start takes time for; and none where no kernel is planned.

    Over the longest contexts only what turns add is planned.
    """
    keys: list[int] = []
    rooms: list[int] = []

    def noted(_: Kind, shape: Shape) -> mx.array:
        keys.append(shape.keys)
        assert shape.keys <= QUICK_CONTEXT or shape.queries <= SHORT
        return mx.array(0)

    monkeypatch.setattr(Kind, "compute", noted)
    monkeypatch.setattr(Kind, "decode", lambda _, room: rooms.append(room))
    runner = runner_on(PLANNING)
    with capture_logs() as lines:
        warm_up(runner, 2, chunk=2 * SHORT, context=context)
    assert (max(keys), max(rooms)) == (most, last)
    (line,) = [line for line in lines if line["event"] == "warmed up"]
    assert line["plans"] == len(keys) + len(rooms)
    keys.clear()
    rooms.clear()
    warm_up(runner_on(UNPADDED), 2, chunk=CHUNK)
    assert not keys + rooms


def test_what_products_compute_is_not_planned() -> None:
    """Nor would there be memory for their scores: in fp32, or of larger heads."""
    kind = Kind(1, 4, 2, 128, 128, mx.bfloat16, None)
    assert kind.is_planned
    assert not kind._replace(dtype=mx.float32).is_planned
    assert not kind._replace(value_size=192).is_planned
    runner = runner_on(PLANNING)
    with capture_logs() as lines:
        warm_up(runner, 2, chunk=CHUNK)
    assert [line["plans"] for line in lines if line["event"] == "warmed up"] == [0]


@pytest.mark.usefixtures("plans_fp32")
def test_attention_that_is_not_planned_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes last, and the rest was run."""
    monkeypatch.setattr(Kind, "nbytes", lambda *_: 1 << 60)
    runner = runner_on(PLANNING)
    with capture_logs() as lines:
        warm_up(runner, 2, chunk=CHUNK, nbytes=1 << 40)
    names = ["attention of one alone", "attention of long prompts"]
    assert left_out(lines) == {"memory": names}


def test_one_by_one() -> None:
    """With a single row, or a model without batches, a single sequence decodes."""
    fixture = BatchFixture("llama")
    warm_up(fixture.runner, 1, chunk=CHUNK)
    assert not fixture.runner.shapes
    fixture.runner.batches = False
    fixture.runner.use(replace(fixture.runner.rules, batches=False))
    warm_up(fixture.runner, 8, chunk=CHUNK)
    assert not fixture.runner.shapes


def test_rows_are_merged_of_every_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two to five: own, shared by all and by some, side by side, and one by one."""
    seen = set[int]()

    def noted(parts: Sequence[Part], *more: Any) -> mx.array:
        seen.add(len(parts))
        return merge(parts, *more)

    monkeypatch.setattr("umbel.models.attention.full.merge", noted)
    fixture = BatchFixture("llama", stacks=True)
    warm_up(fixture.runner, 8, chunk=CHUNK)
    assert seen - {1} == {2, 3, 4, 5}
    assert not fixture.batch.arrays()


def left_out(lines: Sequence[MutableMapping[str, Any]]) -> dict[str, list[str]]:
    """What the log says was left out, by the bound."""
    lines = [line for line in lines if line["event"] == "not all was warmed up"]
    return {line["bound"]: line["left_out"] for line in lines}


@pytest.mark.parametrize(("every_shape", "bound"), [(False, QUICK_SECONDS), (True, FULL_SECONDS)])
def test_it_ends_in_time(*, every_shape: bool, bound: float) -> None:
    """No step begins after the bound; what was not run is named, and all is as it was."""
    fixture = BatchFixture("llama", limit=64)
    rules, times = fixture.runner.rules, itertools.count(0.0, bound / 50)
    with capture_logs() as lines:
        warm_up(fixture.runner, 5, every_shape=every_shape, chunk=CHUNK, clock=lambda: next(times))
    assert [line["steps"] for line in lines if line["event"] == "warmed up"] < [50]
    assert next(times) < bound * 2  # it was not asked again and again, nor never
    assert list(left_out(lines)) == ["time"]
    assert left_out(lines)["time"][-1] == (f"prompts of {CHUNK}" if every_shape else "turns")
    assert fixture.runner.rules == rules
    assert not fixture.placement.sequences
    fixture.come(prompt=20)
    fixture.come(prompt=9)
    fixture.decode(steps=2)
    fixture.check()


@pytest.mark.parametrize("steps", [0, 1, 7, 30])
def test_who_stops_need_not_wait_for_it(steps: int) -> None:
    """It ends with what it is told before a step, wherever that is, and all is as it was."""
    fixture = BatchFixture("llama", limit=64)
    rules, left = fixture.runner.rules, iter(range(steps))

    def go_on() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up(fixture.runner, 5, every_shape=True, chunk=CHUNK, go_on=go_on)
    assert fixture.runner.rules == rules
    assert not fixture.placement.sequences
    fixture.come(prompt=20)
    fixture.come(prompt=9)
    fixture.decode(steps=2)
    fixture.check()


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
    ],
)
def test_it_stays_within_its_memory(name: str) -> None:
    """What does not fit is left out and named; the rest takes no more than it may."""
    fixture = BatchFixture(name, limit=64, stacks=name != "gemma3_text", device=padding(16))
    few = fixture.runner.profile.worst_case(80).nbytes
    for nbytes in (few, 20 * few):
        before = resident_bytes()
        mx.reset_peak_memory()
        with capture_logs() as lines:
            warm_up(fixture.runner, 5, every_shape=True, nbytes=nbytes, chunk=CHUNK, context=256)
        mx.synchronize()
        assert mx.get_peak_memory() - before <= nbytes
        assert left_out(lines).keys() <= {"memory"}
        assert left_out(lines) or nbytes != few
    assert not left_out(lines)
