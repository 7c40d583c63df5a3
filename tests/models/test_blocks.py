"""Blockwise attention against double precision, and against MLX's own."""

from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.models.backends import choose
from umbel.models.backends.cuda import CUDA
from umbel.models.backends.cuda.planned import shape_of

Floats = np.ndarray[Any, np.dtype[Any]]
Inputs = tuple[Floats, Floats, Floats]

HERE = choose()
SIZE, VALUE, SCALE = 16, 24, 0.3
COUNTS = (1, 2, 127, 128, 129, 256, 300)
"""Of queries: around one block and two."""
HEADS = ((4, 4), (6, 2), (8, 2), (3, 1))
TOLERANCE = 2e-5


def random_inputs(
    batch: int, heads: tuple[int, int], count: int, held: int, *, spread: float = 1.0
) -> Inputs:
    """Queries, keys and values; `spread` scales the scores."""
    rng = np.random.default_rng([batch, *heads, count, held])
    shapes = (
        (batch, heads[0], count, SIZE),
        (batch, heads[1], held, SIZE),
        (batch, heads[1], held, VALUE),
    )
    queries, keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return queries * np.float32(spread), keys, values


def reference(inputs: Inputs, mask: Any, sinks: Floats | None) -> Floats:
    """Compute attention in double precision, all at once."""
    queries, keys, values = (array.astype(np.float64) for array in inputs)
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(array, group, axis=1) for array in (keys, values))
    scores = queries @ keys.swapaxes(-1, -2) * SCALE
    count, held = scores.shape[-2:]
    if isinstance(mask, str):
        mask = np.tri(count, held, held - count, bool)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    if sinks is not None:
        extra = np.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = np.concatenate([scores, extra], axis=-1)
        values = np.concatenate([values, np.zeros_like(values[:, :, :1])], axis=2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ values)


def check(inputs: Inputs, mask: Any, *, sinks: Floats | None = None, fused: bool = True) -> None:
    """Hold `attend` to the reference and to MLX's own kernel, and its inputs to themselves."""
    queries, keys, values = arrays = [mx.array(array) for array in inputs]
    given_mask = mask if mask is None or isinstance(mask, str) else mx.array(mask)
    given_sinks = None if sinks is None else mx.array(sinks)
    result = HERE.attend(queries, keys, values, SCALE, given_mask, given_sinks)
    expected = reference(inputs, mask, sinks)
    assert result.dtype == mx.float32
    assert result.shape == expected.shape
    difference = np.abs(np.array(result, np.float64) - expected).max()
    assert difference < TOLERANCE, difference  # and no NaN
    if fused:
        own = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=SCALE, mask=given_mask, sinks=given_sinks
        )
        assert mx.allclose(result, own, rtol=0, atol=TOLERANCE)
    for array, before in zip(arrays, inputs, strict=True):
        assert np.array_equal(np.array(array), before), "an input was written to"
    if isinstance(given_mask, mx.array):
        assert np.array_equal(np.array(given_mask), mask), "the mask was written to"


def random_sinks(heads: int) -> Floats:
    """A logit for each head."""
    return np.random.default_rng(heads).standard_normal(heads).astype(np.float32)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("before", [0, 1, 130])
@pytest.mark.parametrize("count", COUNTS)
def test_causal(count: int, before: int, *, sinks: bool) -> None:
    """Queries after any number of known tokens see these and what came before themselves."""
    inputs = random_inputs(1, (4, 2), count, count + before)
    check(inputs, "causal", sinks=random_sinks(4) if sinks else None)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads: tuple[int, int], mask: str | None, *, sinks: bool) -> None:
    """Multi-head, grouped and multi-query attention of a batch, with values of another size."""
    inputs = random_inputs(2, heads, 129, 140)
    check(inputs, mask, sinks=random_sinks(heads[0]) if sinks else None)


MASKS = ("TN", "1TN", "11TN", "B1TN", "1HTN", "HTN", "BHTN", "B11N", "BH1N", "1N", "N")
"""Shapes, a letter an axis: batch, heads, queries T, keys N."""


def mask_shape(name: str, batch: int, heads: int, count: int, held: int) -> tuple[int, ...]:
    """Spell out one of MASKS."""
    sizes = {"1": 1, "B": batch, "H": heads, "T": count, "N": held}
    return tuple(sizes[letter] for letter in name)


def random_mask(kind: str, shape: tuple[int, ...]) -> Floats:
    """Hide about half of the keys, but never the last one."""
    rng = np.random.default_rng([*kind.encode(), *shape])
    seen = rng.random(shape) < 0.5
    seen[..., -1] = True
    if kind == "bool":
        return seen
    bias = rng.standard_normal(shape)
    hidden = -np.inf if kind == "infinite" else -1e9
    return np.where(seen, bias, hidden).astype(np.float32)


@pytest.mark.parametrize("kind", ["bool", "infinite", "finite"])
@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("count", [1, 128, 131])
def test_masks(count: int, shape: str, kind: str) -> None:
    """Masks of every shape that broadcasts, true and false or added, mean what they mean to MLX."""
    batch, heads, held = 2, 4, 150
    mask = random_mask(kind, mask_shape(shape, batch, heads, count, held))
    check(random_inputs(batch, (heads, 2), count, held), mask)


@pytest.mark.parametrize("shape", ["TN", "11TN", "B11N", "N"])
def test_masks_with_sinks(shape: str) -> None:
    """A sink takes its weight beside a mask."""
    mask = random_mask("bool", mask_shape(shape, 2, 6, 130, 140))
    check(random_inputs(2, (6, 3), 130, 140), mask, sinks=random_sinks(6))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_rows_with_own_masks(heads: tuple[int, int]) -> None:
    """One query of each of many rows, as a sliding window decodes: each sees its own part."""
    lengths = np.array([1, 5, 32, 17, 31])
    mask = (np.arange(32)[None] < lengths[:, None])[:, None, None, :]
    check(random_inputs(5, heads, 1, 32), mask, sinks=random_sinks(heads[0]))


@pytest.mark.parametrize("sink", [None, -1e4, 0.0, 1e4])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 10.0])
def test_extreme_scores(spread: float, sink: float | None) -> None:
    """All scores alike, or far apart, or far below and above a sink: no NaN, and the same."""
    inputs = random_inputs(1, (4, 2), 130, 135, spread=spread)
    check(inputs, "causal", sinks=None if sink is None else np.full(4, sink, np.float32))


@pytest.mark.parametrize("level", [1e4, -1e4])
def test_large_scores(level: float) -> None:
    """Scores around 10,000, exact in fp32, give the weights of their differences."""
    rng = np.random.default_rng(3)
    steps = rng.integers(-4, 5, (1, 2, 140, 1)).astype(np.float32)
    # In units of the scale, so that the product is the score.
    keys = np.concatenate([np.full_like(steps, level), steps], axis=-1)
    queries = np.ones((1, 4, 130, 2), np.float32)
    values = rng.standard_normal((1, 2, 140, VALUE)).astype(np.float32)
    given_queries, given_keys, given_values = map(mx.array, (queries, keys, values))
    for mask in (None, "causal"):
        result = np.array(
            HERE.attend(given_queries, given_keys, given_values, 1.0, mask, None), np.float64
        )
        shifted = (queries / np.float32(SCALE), np.concatenate([0 * steps, steps], -1), values)
        assert np.abs(result - reference(shifted, mask, None)).max() < TOLERANCE


@settings(deadline=None, max_examples=20)
@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from(HEADS),
    count=st.integers(1, 270),
    before=st.integers(0, 40),
    mask=st.sampled_from([None, "causal", *MASKS]),
    sinks=st.booleans(),
)
def test_anything(
    batch: int, heads: tuple[int, int], count: int, before: int, mask: str | None, *, sinks: bool
) -> None:
    """Any batch, heads, lengths, mask and sinks together."""
    held = count + before
    array: Any = mask
    if mask is not None and mask in MASKS:
        array = random_mask("bool", mask_shape(mask, batch, heads[0], count, held))
    inputs = random_inputs(batch, heads, count, held)
    check(inputs, array, sinks=random_sinks(heads[0]) if sinks else None)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_are_mlx_own(dtype: mx.Dtype) -> None:
    """Other types than fp32 go to MLX's kernel, bit by bit."""
    q, k, v = (mx.array(array).astype(dtype) for array in random_inputs(1, (4, 2), 130, 140))
    result = HERE.attend(q, k, v, SCALE, "causal", None)
    own = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask="causal")
    assert result.dtype == dtype
    assert mx.array_equal(result, own)


@pytest.mark.parametrize("heads", [1, 4])
def test_views_are_not_written_to(heads: int) -> None:
    """Keys that are a view of a longer cache stay, and so does what is beside them."""
    cache = mx.random.normal((1, heads, 256, SIZE))
    before = np.array(cache)
    keys = cache[:, :, :140]
    mx.eval(HERE.attend(keys[:, :, -1:], keys, keys, SCALE, None, None))
    mx.eval(HERE.attend(keys, keys, keys, SCALE, "causal", None))
    assert np.array_equal(np.array(cache), before)


@pytest.mark.skipif(HERE.block is None, reason="elsewhere it is MLX's kernel")
def test_scores_stay_small() -> None:
    """Blocks come one after the other: the scores of a long prompt are never all in memory."""
    q, k, v = (mx.array(array) for array in random_inputs(1, (4, 1), 2048, 2048))
    mx.eval(q, k, v)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(HERE.attend(q, k, v, SCALE, "causal", None))
    assert mx.get_peak_memory() - before < 4 * 2048 * 2048 * 4 / 4


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("count", "held"),
    [(1, 1), (2, 2), (3, 40), (71, 600), (130, 512), (512, 512), (300, 1500), (1024, 1024)],
)
def test_planned(heads: tuple[int, int], count: int, held: int, *, sinks: bool) -> None:
    """Padding changes nothing."""
    inputs = random_inputs(2, heads, count, held)
    logits = np.linspace(-1, 1, heads[0], dtype=np.float32) if sinks else None
    queries, keys, values = map(mx.array, inputs)
    known = None if logits is None else mx.array(logits)
    found = CUDA.attend(queries, keys, values, SCALE, "causal", known)
    np.testing.assert_allclose(found, reference(inputs, "causal", logits), atol=TOLERANCE)


def test_few_shapes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of any length is computed in the shapes of a few; no other mask is padded."""
    shapes = set()
    real = mx.fast.scaled_dot_product_attention

    def seen(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        assert keys.shape == values.shape
        shapes.add((queries.shape[2], keys.shape[2]))
        return real(queries, keys, values, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", seen)

    def attended(count: int, held: int, mask: Any) -> None:
        queries, keys = mx.zeros((1, 2, count, 8)), mx.zeros((1, 1, held, 8))
        mx.eval(CUDA.attend(queries, keys, keys, 1.0, mask, None))

    for held in range(1030, 1500, 13):
        attended(71, held, "causal")
    assert shapes == {(512, 1536), (1024, 1536)}
    shapes.clear()
    for count in range(2, 70, 4):
        attended(count, 70, "causal")
    assert shapes == {(128, 128)}
    shapes.clear()
    attended(71, 1030, None)
    attended(1, 1030, "causal")
    assert shapes == {(71, 1030), (1, 1030)}


def test_what_is_planned_lies_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is added, too: how it lies in memory is a part of what is planned for."""
    lie: list[tuple[int, ...]] = []
    real = mx.fast.scaled_dot_product_attention

    def seen(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        mx.eval(queries, keys, values)
        lie.extend(np.asarray(array).strides for array in (queries, keys, values))
        return real(queries, keys, values, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", seen)
    projected, room = mx.random.normal((1, 512, 6, 8)), mx.random.normal((1, 2, 768, 8))
    queries, keys = projected.transpose(0, 2, 1, 3)[:, :4], room[:, :, :512]
    found = CUDA.attend(queries, keys, keys, 1.0, "causal", None)
    held = np.zeros((1, 2, 512, 8), np.float32).strides
    assert lie == [np.zeros((1, 4, 512, 8), np.float32).strides, held, held]
    expected = real(queries, keys, keys, scale=1.0, mask="causal")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("longest", [300, 1600, 5000])
def test_shapes_of_prompts_are_few(longest: int) -> None:
    """A shape holds its tokens, wastes less than 512 of each, and is one of few."""
    met = set()
    for held in [*range(2, 70), *range(70, longest + 1, 37), longest]:
        for count in [*range(2, min(512, held), 41), min(512, held)]:
            shape = shape_of(count, held)
            behind = shape.keys - held
            assert 0 <= behind < min(512, held)
            assert 0 <= shape.queries - count - behind < 512
            met.add(shape)
    assert len(met) <= 10 + 2 * (longest // 512 + 1)
