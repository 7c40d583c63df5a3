"""Warming up: all shapes that batches start with, and nothing left behind."""

import gc

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.warm import TOKENS, warm

from .party import NAMES, Party


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_rows(name: str) -> None:
    """Batches of every size were computed with, and what comes after is right."""
    party = Party(name)
    warm(party.forward, 5)
    assert {shape[0] for shape in party.forward.shapes} == {2, 3, 4, 6}
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
        warm(party.forward, 5)
        peaks.append(mx.get_peak_memory())
        gc.collect()
        mx.synchronize()  # or its thread may still hold what the last operations computed
        assert len(party.rows) == 0
        held.append(mx.get_active_memory())
    # MLX itself keeps a constant of 4 or 8 bytes now and then; what is left is left each time.
    assert held[1] == held[0] or held[2] == held[1]
    assert max(held) - held[0] <= 64
    assert max(peaks[1:]) - held[0] <= 5 * party.forward.promise(TOKENS).nbytes


def test_one_by_one() -> None:
    """With a single row, or a model without batches, a lone sequence decodes."""
    party = Party("llama")
    warm(party.forward, 1)
    assert not party.forward.shapes
    party.forward.batches = False
    warm(party.forward, 8)
    assert not party.forward.shapes
