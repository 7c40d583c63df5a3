"""Parts of attention, merged, against one softmax over all keys in double precision."""

from dataclasses import dataclass, replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.attention.parts import Part, merge, part_of, scores_of
from umbel.models.backends import choose
from umbel.models.backends.base import METAL, Backend, Softmax

Floats = np.ndarray[Any, np.dtype[Any]]

HERE = choose()
DEVICES = (HERE, replace(METAL, compiles=False))
ROWS, KV_HEADS, KEY, VALUE = 3, 2, 8, 5

SPREADS = st.sampled_from([1e-30, 1e-4, 1.0, 30.0, 1e4])
"""How far scores lie apart."""
LEVELS = st.sampled_from([0.0, 1e4, -1e4])
"""Where their middle is."""
CUTS = st.lists(st.integers(1, 39), max_size=5, unique=True).map(sorted)


@dataclass
class Case:
    """Scores of rows, and the values they weigh, for all rows alike.

    Attributes:
        scores: `[ROWS, KV_HEADS, group, N]`.
        values: `[1, KV_HEADS, N, VALUE]`.
        sinks: `[KV_HEADS * group]`, or None.
        device: how it is computed.
    """

    scores: Floats
    values: Floats
    sinks: Floats | None
    device: Backend = HERE

    @property
    def expected(self) -> Floats:
        """One softmax over all; a sink takes weight and gives nothing."""
        scores = self.scores.astype(np.float64)
        values = self.values.astype(np.float64)
        if self.sinks is not None:
            sinks = self.sinks.astype(np.float64).reshape(1, KV_HEADS, -1, 1)
            sinks = np.broadcast_to(sinks, (*scores.shape[:3], 1))
            scores = np.concatenate([scores, sinks], axis=-1)
            values = np.concatenate([values, np.zeros_like(values[:, :, :1])], axis=2)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ values)

    def merged(self, parts: list[Part]) -> mx.array:
        """Merge parts, with the sinks."""
        return merge(parts, None if self.sinks is None else mx.array(self.sinks), self.device)

    def parts(self, cuts: list[int], inner: int = 100) -> list[Part]:
        """Compute a part for each piece between cuts, from segments of `inner` tokens."""
        ends = [0, *cuts, self.scores.shape[-1]]
        pieces = [slice(a, b) for a, b in itertools.pairwise(ends)]
        scores = [mx.array(np.ascontiguousarray(self.scores[..., piece])) for piece in pieces]
        return [
            part_of(softmax, self.segments(piece, inner))
            for softmax, piece in zip(self.device.softmaxes(scores), pieces, strict=True)
        ]

    def segments(self, piece: slice, inner: int) -> list[tuple[mx.array, ...]]:
        """The values of a piece, in segments; their keys are not read."""
        values = [
            mx.array(self.values[:, :, at : min(at + inner, piece.stop)])
            for at in range(piece.start, piece.stop, inner)
        ]
        return [(mx.zeros(0), value) for value in values]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Scores of 40 keys for groups of 1 to 4, of any size, with and without sinks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    group, level = draw(st.integers(1, 4)), draw(LEVELS)
    scores = rng.standard_normal((ROWS, KV_HEADS, group, 40)) * draw(SPREADS) + level
    values = rng.standard_normal((1, KV_HEADS, 40, VALUE))
    sinks = None
    if draw(st.booleans()):
        middle = draw(st.sampled_from([level, 1e4, -1e4]))
        sinks = (rng.standard_normal(KV_HEADS * group) * draw(SPREADS) + middle).astype(np.float32)
    device = draw(st.sampled_from(DEVICES))
    return Case(scores.astype(np.float32), values.astype(np.float32), sinks, device)


def check(result: mx.array, case: Case) -> None:
    """Hold a result to what was expected; a NaN is never near.

    The log of a sum is as exact as a number of its size in fp32, and no more.
    """
    expected = case.expected
    assert result.dtype == mx.float32
    assert result.shape == expected.shape
    sizes = [0.0, *np.abs(case.scores[np.isfinite(case.scores)])]
    tolerance = 1e-5 + 8 * np.spacing(np.float32(max(sizes)))
    difference = np.abs(np.array(result, np.float64) - expected).max()
    assert difference < tolerance, (difference, tolerance)


@given(case=cases(), cuts=CUTS, inner=st.integers(1, 40), order=st.randoms())
def test_any_partition(case: Case, cuts: list[int], inner: int, order: Any) -> None:
    """However keys are cut into parts, parts into segments, and in any order: one softmax."""
    parts = case.parts(cuts, inner)
    order.shuffle(parts)
    check(case.merged(parts), case)


@given(case=cases(), cuts=CUTS, data=st.data())
def test_rows_that_do_not_look(case: Case, cuts: list[int], data: st.DataObject) -> None:
    """A row that looks at some parts only gets the softmax over their keys."""
    parts = case.parts(cuts)
    looks = [
        data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)).filter(any))
        for _ in range(ROWS)
    ]
    ends = [0, *cuts, 40]
    for number, part in enumerate(parts):
        row_looks = mx.array([look[number] for look in looks])[:, None, None, None]
        lse = mx.where(row_looks, part.lse, -mx.inf)
        parts[number] = Part(mx.where(row_looks, part.output, 0.0), lse)
        for row in range(ROWS):
            if not looks[row][number]:
                case.scores[row, ..., ends[number] : ends[number + 1]] = -np.inf
    check(case.merged(parts), case)


@given(case=cases(), hidden=st.lists(st.booleans(), min_size=39, max_size=39))
def test_masked_keys(case: Case, hidden: list[bool]) -> None:
    """A score of -inf is a key that is not there."""
    case.scores[..., :39][..., hidden] = -np.inf
    check(case.merged(case.parts([])), case)


@pytest.mark.parametrize("sinks", [None, -1e4, 0.0, 1e4])
def test_extremes(sinks: float | None) -> None:
    """Parts whose scores differ by 20,000, and sinks above and below, give no NaN."""
    rng = np.random.default_rng(0)
    scores = np.zeros((ROWS, KV_HEADS, 2, 40), np.float32)
    scores[0, ..., :20], scores[0, ..., 20:] = 1e4, -1e4
    scores[1, ..., 20:] = 1e4
    scores[2] = -1e4
    values = rng.standard_normal((1, KV_HEADS, 40, VALUE)).astype(np.float32)
    extra = None if sinks is None else np.full(KV_HEADS * 2, sinks, np.float32)
    case = Case(scores, values, extra)
    for cuts in ([], [20], [1, 20, 39]):
        check(case.merged(case.parts(cuts)), case)


@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 7], [1] * 6])
def test_scores_of(lengths: list[int]) -> None:
    """Scores with segments are those with their keys in one piece."""
    rng = np.random.default_rng(1)
    queries = rng.standard_normal((1, KV_HEADS, 4, KEY)).astype(np.float32)
    keys = rng.standard_normal((1, KV_HEADS, sum(lengths), KEY)).astype(np.float32)
    ends = np.cumsum([0, *lengths])
    segments = [(mx.array(keys[:, :, a:b]),) for a, b in itertools.pairwise(ends)]
    expected = queries.astype(np.float64) @ keys.astype(np.float64).swapaxes(-1, -2)
    result = scores_of((mx.array(queries),), segments)
    assert result.shape == expected.shape
    assert np.abs(np.array(result) - expected).max() < 1e-5


@given(case=cases(), cuts=CUTS)
def test_softmaxes(case: Case, cuts: list[int]) -> None:
    """Several arrays at once: each is a softmax by itself, and -inf comes to exactly nothing."""
    pieces = np.split(case.scores, cuts, axis=-1)
    for piece in pieces:
        piece[..., 1:2] = -np.inf
    softmaxed = case.device.softmaxes([mx.array(piece) for piece in pieces])
    for piece, (shares, lse) in zip(pieces, softmaxed, strict=True):
        exact = piece.astype(np.float64)
        top = exact.max(axis=-1, keepdims=True)
        sums = np.exp(exact - top).sum(axis=-1, keepdims=True)
        assert shares.dtype == lse.dtype == mx.float32
        assert np.allclose(np.array(shares), np.exp(exact - top) / sums, rtol=1e-5, atol=1e-30)
        assert np.allclose(np.array(lse), top + np.log(sums), rtol=3e-7, atol=1e-6)
        assert not np.array(shares)[..., 1:2].any()


@pytest.mark.parametrize(
    ("dtype", "device"), [(mx.float16, HERE), (mx.bfloat16, HERE), (mx.bfloat16, METAL)]
)
def test_halves(dtype: mx.Dtype, device: Backend) -> None:
    """Scores in half precision, as large as they may be: sums in fp32, output in their type."""
    scores = mx.array([[[[3e4, 3e4, -3e4, 0.0]]]]).astype(dtype)
    ((shares, lse),) = device.softmaxes([scores])
    assert (shares.dtype, lse.dtype) == (dtype, mx.float32)
    assert shares.tolist() == [[[[0.5, 0.5, 0, 0]]]]
    values = mx.array([[[[1.0], [2.0], [3.0], [4.0]]]]).astype(dtype)
    part = part_of(Softmax(shares, lse), [(values, values)])
    for parts in ([part], [part, part]):
        for sinks in (None, mx.array([-3e4])):
            output = merge(parts, sinks, device)
            assert output.dtype == dtype
            assert output.tolist() == [[[[1.5]]]]


def test_nothing_else_is_touched() -> None:
    """Queries, keys and values are as they were after a softmax in place."""
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal((1, 1, n, KEY)).astype(np.float32) for n in (1, 6, 6)]
    queries, keys, values = (mx.array(array) for array in arrays)
    # With a query of ones, the scores could be mistaken for a view of the keys.
    ones = scores_of((mx.ones((1, 1, 1, 1)),), [(keys[..., :1],)])
    first, _ = HERE.softmaxes([scores_of((queries,), [(keys,)]), ones])
    mx.eval(part_of(first, [(keys, values)]))
    for array, before in zip((queries, keys, values), arrays, strict=True):
        assert np.array_equal(np.array(array), before)


@pytest.mark.skipif(HERE.block is None, reason="elsewhere they are MLX's own kernels")
def test_softmax_is_in_place() -> None:
    """On the CPU the shares of large scores take no memory beside them."""
    scores = mx.random.normal((64, 8192))
    mx.eval(scores)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    (softmax,) = HERE.softmaxes([scores])
    mx.eval(softmax)
    assert mx.get_peak_memory() - before < scores.nbytes / 8
