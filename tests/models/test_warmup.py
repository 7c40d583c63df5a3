"""Warming up: all shapes that batches start with, and nothing left behind."""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.attention.cascade import Part, merge
from umbel.models.warmup import longest, warm_up

from .batch_fixture import NAMES, BatchFixture

_CONSTANTS = 64
"""Bytes: MLX itself keeps one of 4 or 8 now and then. The smallest state has thousands."""


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_rows(name: str) -> None:
    """Batches of every size were computed with, and what comes after is right."""
    fixture = BatchFixture(name)
    warm_up(fixture.runner, 5)
    assert {shape[0] for shape in fixture.runner.shapes} == {2, 3, 4, 6}
    for prompt in (20, 3, 30):
        fixture.come(prompt=prompt)
    fixture.decode(steps=3)
    fixture.check()


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


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(name: str) -> None:
    """Its sequences are gone with their memory, which was not more than it says."""
    fixture = BatchFixture(name)
    held, peaks = list[int](), list[int]()
    for _ in range(3):
        mx.reset_peak_memory()
        warm_up(fixture.runner, 5)
        peaks.append(mx.get_peak_memory())
        assert not fixture.placement.sequences
        held.append(at_rest(held[0] if held else 1 << 62))
    assert max(held) - held[0] <= _CONSTANTS
    most = fixture.runner.profile.worst_case(longest(fixture.runner)).nbytes
    assert max(peaks[1:]) - held[0] <= 5 * most


def test_one_by_one() -> None:
    """With a single row, or a model without batches, a single sequence decodes."""
    fixture = BatchFixture("llama")
    warm_up(fixture.runner, 1)
    assert not fixture.runner.shapes
    fixture.runner.batches = False
    fixture.runner.use(replace(fixture.runner.rules, batches=False))
    warm_up(fixture.runner, 8)
    assert not fixture.runner.shapes


def test_rows_are_merged_of_every_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two to five: own, shared by all and by some, side by side, and one by one."""
    seen = set[int]()

    def noted(parts: Sequence[Part], *more: Any) -> mx.array:
        seen.add(len(parts))
        return merge(parts, *more)

    monkeypatch.setattr("umbel.models.attention.batched.merge", noted)
    fixture = BatchFixture("llama", stacks=True)
    warm_up(fixture.runner, 8)
    assert seen == {2, 3, 4, 5}
    assert not fixture.batch.arrays()
