"""Arrays that know what they were made of: what a model does with them is what MLX does."""

from collections.abc import Callable
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.step_arrays import Attended, Cut, Flat, flat, is_step

ROWS, HEADS, SIZE = 3, 4, 8


def product() -> mx.array:
    """What is cut: other columns before and behind."""
    mx.random.seed(1)
    return mx.random.normal((ROWS, HEADS * SIZE + 10))


def cut() -> Cut:
    """The columns of some heads."""
    whole = product()
    return Cut(whole[:, None, 4 : 4 + HEADS * SIZE], whole, 4)


def test_a_flat_array_is_known_without_its_token() -> None:
    """And one that is none is made so."""
    rows = mx.random.normal((ROWS, SIZE))
    known = Flat(rows)
    assert known.shape == (ROWS, 1, SIZE)
    assert flat(known) is rows
    assert mx.array_equal(flat(mx.array(known)), rows)
    assert is_step(known)
    assert not is_step(rows)
    assert not is_step(mx.zeros((ROWS, 2, SIZE)))


def test_heads_are_known_as_columns() -> None:
    """As models cut them: each axis by number or in one tuple, with one size left open."""
    for shape in ((ROWS, 1, HEADS, SIZE), (ROWS, 1, HEADS, -1)):
        for given in (shape, (shape,)):
            part = cut()
            heads: Any = part.reshape(*given)
            first = heads.transpose(0, 2, 1, 3)
            for each in (heads, first):
                assert isinstance(each, Cut)
                assert (each.product is part.product, each.begin) == (True, 4)
            assert mx.array_equal(first, mx.array(part).reshape(*shape).swapaxes(1, 2))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.reshape(ROWS * HEADS, SIZE),
        lambda x: x.reshape(1, ROWS, HEADS, SIZE),
        lambda x: x.reshape(ROWS, 1, 2, 2, -1),
        lambda x: x.transpose(1, 0, 2),
        lambda x: x.reshape(ROWS, 1, HEADS, SIZE).transpose(0, 1, 3, 2),
        lambda x: x.reshape(ROWS, 1, HEADS, SIZE).reshape(ROWS, 1, HEADS * SIZE),
        lambda x: x.reshape(ROWS, 1, HEADS, SIZE).transpose(0, 2, 1, 3).transpose(0, 2, 1, 3),
        lambda x: x + 1,
        lambda x: x[:, :, :8],
    ],
)
def test_what_else_is_made_of_columns_is_what_mlx_makes(made: Callable[[Any], Any]) -> None:
    """The numbers are right in any case; what is no heads of a token is not taken for such."""
    part = cut()
    found = made(part)
    assert mx.array_equal(found, made(mx.array(part)))
    assert not isinstance(found, Cut) or found.ndim == 4


def test_attention_is_flat_once_its_heads_are_side_by_side() -> None:
    """As models put them."""
    whole = mx.random.normal((ROWS, HEADS * SIZE))
    known: Any = Attended(whole.reshape(ROWS, HEADS, 1, SIZE), whole)
    for shape in ((ROWS, 1, HEADS * SIZE), (ROWS, 1, -1)):
        found = known.transpose(0, 2, 1, 3).reshape(*shape)
        assert isinstance(found, Flat)
        assert found.flat is whole
        assert mx.array_equal(found, whole[:, None])
    for other in (known.reshape(ROWS, HEADS, -1), known.transpose(0, 1, 3, 2), 2 * known):
        assert not isinstance(other, Flat | Attended)
    assert mx.array_equal(known.transpose(0, 1, 3, 2), mx.array(known).transpose(0, 1, 3, 2))


def test_what_is_changed_has_no_notes() -> None:
    """By an operator that changes in place, or by index."""
    whole = product()
    for known, note in (
        (Flat(whole), "flat"),
        (cut(), "product"),
        (Attended(whole.reshape(ROWS, 1, 1, -1), whole), "whole"),
    ):
        for change in ("__imul__", "__setitem__"):
            array: Any = type(known).__new__(type(known))
            mx.array.__init__(array, mx.array(known))
            vars(array).update(vars(known))
            expected = mx.array(known) * 1
            given = (2.0,) if change == "__imul__" else ((0, 0), 5.0)
            getattr(array, change)(*given)
            getattr(expected, change)(*given)
            assert getattr(array, note) is None
            assert mx.array_equal(array, expected)
            assert getattr(known, note) is not None


def test_queries_without_notes_are_cut_as_they_are() -> None:
    """A part that was changed makes heads that know nothing."""
    part: Any = cut()
    part += 1.0
    heads = part.reshape(ROWS, 1, HEADS, SIZE)
    assert heads.product is None
    assert mx.array_equal(heads, part.reshape(ROWS, 1, HEADS, SIZE))
