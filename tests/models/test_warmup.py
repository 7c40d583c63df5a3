"""Warming up: all shapes that batches start with, and nothing left behind."""

import gc
from dataclasses import replace

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.warmup import TOKENS, warm_up

from .party import NAMES, Party


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_rows(name: str) -> None:
    """Batches of every size were computed with, and what comes after is right."""
    party = Party(name)
    warm_up(party.runner, 5)
    assert {shape[0] for shape in party.runner.shapes} == {2, 3, 4, 6}
    for prompt in (20, 3, 30):
        party.come(prompt=prompt)
    party.feed(steps=3)
    party.check()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left(name: str) -> None:
    """Its sequences are gone with their memory, which was not more than it says."""
    party = Party(name)
    held, peaks = [], []
    for _ in range(3):
        mx.reset_peak_memory()
        warm_up(party.runner, 5)
        peaks.append(mx.get_peak_memory())
        gc.collect()
        mx.synchronize()  # or its thread may still hold what the last operations computed
        assert not party.placement.sequences
        held.append(mx.get_active_memory())
    # MLX itself keeps a constant of 4 or 8 bytes now and then; what is left is left each time.
    assert held[1] == held[0] or held[2] == held[1]
    assert max(held) - held[0] <= 64
    assert max(peaks[1:]) - held[0] <= 5 * party.runner.profile.worst_case(TOKENS).nbytes


def test_one_by_one() -> None:
    """With a single row, or a model without batches, a lone sequence decodes."""
    party = Party("llama")
    warm_up(party.runner, 1)
    assert not party.runner.shapes
    party.runner.batches = False
    party.runner.use(replace(party.runner.rules, batches=False))
    warm_up(party.runner, 8)
    assert not party.runner.shapes
