"""The warm-up: batches of 1, 2, 4 … rows, within limits of memory and time, nothing left behind."""

import gc
import itertools
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from structlog.testing import capture_logs

from umbel.models import warmup
from umbel.models.runtime import resident_bytes
from umbel.models.warmup import warm_up

from .batch_fixture import NAMES, BatchFixture

CHUNK = 32  # tokens of a prompt that a warm-up computes at once
_CONSTANTS = 64
"""Bytes: MLX itself keeps one of 4 or 8 now and then. The smallest state has thousands."""

SIMILAR = {"llama_kv8", "deepseek_v3"}
"""Models whose warm-up has the same steps as others here."""


def at_rest(before: int) -> int:
    """Active bytes, once MLX's thread has let go of the last operations' arrays.

    On a busy machine it does so later. Arrays that are really left stay for good.
    """
    gc.collect()
    for _ in range(100):
        mx.synchronize()
        if mx.get_active_memory() <= before + _CONSTANTS:
            break
        time.sleep(0.02)
    return mx.get_active_memory()


def stopped(lines: Sequence[MutableMapping[str, Any]]) -> list[tuple[str, int]]:
    """Reason and rows of each log line about an early stop."""
    named = [line for line in lines if line["event"] == "warm-up stopped early"]
    return [(line["reason"], line["rows"]) for line in named]


def check_usable(fixture: BatchFixture) -> None:
    """Sequences that start after the warm-up decode right."""
    assert not fixture.placement.sequences
    for prompt in (20, 3, 30):
        fixture.come(prompt=prompt)
    fixture.decode(steps=3)
    fixture.check()


@pytest.mark.parametrize(
    ("most", "rows"),
    [
        (1, [1]),
        (2, [1, 2]),
        (5, [1, 2, 4, 5]),
        (32, [1, 2, 4, 8, 16, 32]),
        (33, [1, 2, 4, 8, 16, 32, 33]),
    ],
)
def test_batch_sizes(most: int, rows: list[int]) -> None:
    """Powers of two, and the largest batch."""
    assert warmup._batch_sizes(most) == rows


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SIMILAR else n for n in NAMES],
)
def test_each_kind_of_model(name: str) -> None:
    """Every batch size is computed, memory stays within the price, and answers are right after."""
    fixture = BatchFixture(name)
    held, peaks = list[int](), list[int]()
    for _ in range(2):
        mx.reset_peak_memory()
        with capture_logs() as lines:
            warm_up(fixture.runner, 5, chunk=CHUNK)
        peaks.append(mx.get_peak_memory())
        held.append(at_rest(held[0] if held else 1 << 62))
        (line,) = [line for line in lines if line["event"] == "warmed up"]
        assert (line["rows"], line["steps"]) == (5, 3 + 3 * 4)
        assert not stopped(lines)
    assert held[1] - held[0] <= _CONSTANTS
    longest = CHUNK + 2 * warmup.TURN + 4 * 4
    assert peaks[1] - held[0] <= 6 * fixture.runner.profile.worst_case(longest).nbytes
    assert {shape[0] for shape in fixture.runner.shapes} >= {2, 4}
    check_usable(fixture)


def test_a_model_without_batches() -> None:
    """A single sequence decodes, and no batch is made."""
    fixture = BatchFixture("llama")
    warm_up(fixture.runner, 1, chunk=CHUNK)
    assert not fixture.runner.shapes
    fixture.runner.batches = False
    fixture.runner.use(replace(fixture.runner.rules, batches=False))
    with capture_logs() as lines:
        warm_up(fixture.runner, 8, chunk=CHUNK)
    assert [line["rows"] for line in lines if line["event"] == "warmed up"] == [1]
    assert not fixture.runner.shapes


@pytest.mark.parametrize("calls", [1, 5, 12])
def test_time_limit(calls: int) -> None:
    """No call begins after the limit; the log says how far the warm-up came."""
    fixture = BatchFixture("llama")
    ticks = itertools.chain([0.0] * (calls + 1), itertools.repeat(warmup.SECONDS))
    with capture_logs() as lines:
        warm_up(fixture.runner, 5, chunk=CHUNK, clock=lambda: next(ticks))
    ((reason, rows),) = stopped(lines)
    assert reason == "time"
    assert rows < 5
    (line,) = [line for line in lines if line["event"] == "warmed up"]
    assert line["rows"] == rows
    assert line["steps"] < calls
    check_usable(fixture)


@pytest.mark.parametrize("calls", [0, 1, 7, 15])
def test_start_that_is_ended(calls: int) -> None:
    """The warm-up ends with the exception that `go_on` raises, and frees its sequences."""
    fixture = BatchFixture("llama")
    left = iter(range(calls))

    def go_on() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up(fixture.runner, 5, chunk=CHUNK, go_on=go_on)
    check_usable(fixture)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
    ],
)
def test_memory_limit(name: str) -> None:
    """The peak stays within the limit, which the log names if it ended the warm-up."""
    fixture = BatchFixture(name)
    few = fixture.runner.profile.worst_case(80).nbytes
    rows = list[int]()
    for nbytes in (few // 4, few, 3 * few):
        before = resident_bytes()
        mx.reset_peak_memory()
        with capture_logs() as lines:
            warm_up(fixture.runner, 5, nbytes=nbytes, chunk=CHUNK)
        mx.synchronize()
        assert mx.get_peak_memory() - before <= nbytes
        assert {reason for reason, _ in stopped(lines)} <= {"memory"}
        rows += [line["rows"] for line in lines if line["event"] == "warmed up"]
    assert rows[0] == 0
    assert rows[0] < rows[1] < rows[2] == 5
