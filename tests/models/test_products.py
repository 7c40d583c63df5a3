"""Products of attention that are cut into pieces, against the same products whole."""

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.models.attention import products
from umbel.models.attention.products import PIECED, PLAIN


def normal(*shape: int) -> mx.array:
    """Make an array of random numbers."""
    return mx.random.normal(shape)


@given(tokens=st.integers(1, 1500), count=st.integers(1, 20), rows=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_pieces_change_nothing(tokens: int, count: int, rows: int) -> None:
    """Scores are those of all keys at once but for rounding, in the order of the keys."""
    mx.random.seed(tokens)
    queries, keys = normal(rows, 2, count, 16), normal(rows, 2, tokens, 16)
    scores = PIECED.scores((queries,), (keys, keys))
    assert scores.shape == (rows, 2, count, tokens)
    assert mx.allclose(scores, PLAIN.scores((queries,), (keys, keys)), atol=1e-4)


def test_keys_that_lie_among_others_are_not_copied() -> None:
    """A span is a slice of what it lies in: heads are further apart than its tokens."""
    held, queries = normal(1, 4, 40_000, 64), normal(1, 4, 3, 64)
    mx.eval(held, queries)
    PIECED.scores((queries,), (held[:, :, 100:676],)).tolist()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    scores = PIECED.scores((queries,), (held[:, :, 100:676],))
    mx.eval(scores)
    assert mx.get_peak_memory() - before < 4 * 576 * 64 * held.itemsize
    assert mx.allclose(scores, PLAIN.scores((queries,), (held[:, :, 100:676],)), atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "count", "pieces"),
    [
        (400, 3, 1),  # one product is small enough
        (576, 3, 2),
        (1216, 3, 4),
        (577, 3, 1),  # a prime: pieces are equally long
        (2048, 3, 1),  # from here on both cores multiply
        (500, 18, 1),
        (320, 12, 4),
        (320, 20, 1),  # pieces would be too short
    ],
)
def test_pieces_are_small_products(tokens: int, count: int, pieces: int) -> None:
    """All are of one length, and as few as there can be."""
    assert products._pieces(tokens, count, 64) == pieces
    if pieces > 1:
        assert tokens // pieces * count <= 1200
        assert tokens % pieces == 0
