"""Attention's kernels, run on the CPU, against operations of MLX."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.attention.decode_kernel import Ring, attend, reads
from umbel.models.attention.softmax_kernel import softmax
from umbel.models.backends.cuda import CUDA
from umbel.models.backends.metal import METAL
from umbel.models.kv.alignment import aligned
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.spans import runs_of
from umbel.models.prefill import prefill

from .. import zoo
from ..shared import limited
from .cuda_emulator import EmulatedKernel, emulated
from .rings import Places, places

GPU_HERE = limited(replace(METAL, compiles=False), overlaps=False)
ALIGNED = CUDA.length_multiple
SMALL = 2e-6  # rounding of fp32 sums of a few hundred terms


@pytest.fixture(autouse=True)
def launched(kernel_folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Have CUDA kernels run on the CPU; gives those that are made."""
    with emulated(kernel_folder) as made:
        yield made


@pytest.mark.parametrize("shape", [(3, 5), (2, 40), (1, 2, 3, 301), (1, 1), (4, 2048)])
@pytest.mark.parametrize("masked", [0.0, 0.3, 0.9])
def test_softmax(shape: tuple[int, ...], masked: float, launched: list[EmulatedKernel]) -> None:
    """Shares and logs of sums, of lengths that are read in packs and others, some masked."""
    mx.random.seed(len(shape))
    scores = mx.random.normal(shape) * 20
    hidden = mx.random.uniform(shape=shape) < masked
    hidden[..., shape[-1] // 2] = False
    scores = mx.where(hidden, -mx.inf, scores)
    shares, lse = softmax(scores)
    assert (shares.shape, lse.shape) == (scores.shape, (*shape[:-1], 1))
    assert mx.abs(shares - mx.softmax(scores, axis=-1)).max() < SMALL
    assert mx.abs(lse - mx.logsumexp(scores, axis=-1, keepdims=True)).max() < 20 * SMALL
    assert [kernel.launches for kernel in launched] == [1]


class Shape(NamedTuple):
    """Of a step: rows, heads, those of keys, positions of the ring, and a key's size."""

    rows: int
    heads: int
    kv_heads: int
    positions: int
    size: int


SHAPES = [
    Shape(2, 4, 2, 20, 16),
    Shape(3, 8, 2, 70, 64),
    Shape(2, 8, 1, 150, 256),
    Shape(2, 2, 2, 9, 8),
    Shape(1, 6, 2, 40, 128),
]


class Seen(NamedTuple):
    """Keys and values that rows look at, `[rows, kv_heads, tokens, size]`, and where each may."""

    keys: mx.array
    values: mx.array
    mask: mx.array


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(
    ("parts", "sinks"),
    [("", False), ("", True), ("h", False), ("hr", True), ("rhhrhrrh", False)],
)
def test_attend(shape: Shape, parts: str, sinks: bool) -> None:  # noqa: FBT001
    """Rows' own keys anywhere in their ring, and parts in either order, with sinks."""
    mx.random.seed(sum(shape))
    rows, heads, kv_heads, positions, size = shape
    group, scale = heads // kv_heads, size**-0.5
    # As models give them: the axes of heads and tokens exchanged, and part of what is wider.
    queries = mx.random.normal((rows, 1, heads + 2, size))[:, :, 1:-1].swapaxes(1, 2)
    mx.eval(queries)
    grouped = (queries * scale).reshape(rows, kv_heads, group, size)
    held = places(rows, positions)
    seen = [ring(shape, held)]
    others = []
    for kind in parts:
        part = some(rows if kind == "r" else 1, kv_heads, 13, size)
        seen.append(part)
        output, lse = attended(grouped, [part], None)
        if kind == "h":  # in the order of the heads, as products of what all share come
            output, lse = (by_head(array) for array in (output, lse))
        others.append((output, lse))
    weights = mx.random.normal((heads,)) if sinks else None
    own = Ring(seen[0].keys, seen[0].values, held.spans)
    asked = queries.reshape(rows, kv_heads, group, size)
    expected, _ = attended(grouped, seen, weights)
    found = attend(asked, own, scale, weights, others=others)
    assert mx.abs(found - expected.reshape(queries.shape)).max() < SMALL


def ring(shape: Shape, held: Places) -> Seen:
    """Rows whose tokens lie somewhere in a ring, and NaN wherever they do not."""
    own = some(shape.rows, shape.kv_heads, shape.positions, shape.size)
    there = held.seen.swapaxes(-1, -2)
    keys, values = (mx.where(there, array, mx.nan) for array in own[:2])
    return Seen(keys, values, held.seen)


def some(rows: int, kv_heads: int, tokens: int, size: int) -> Seen:
    """Keys and values that all may look at."""
    keys, values = (mx.random.normal((rows, kv_heads, tokens, size)) for _ in range(2))
    return Seen(keys, values, mx.ones((1, 1, 1, tokens), mx.bool_))


def attended(
    grouped: mx.array, seen: Sequence[Seen], sinks: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Attention by operations of MLX, over all of it: the output and the log of the sum."""
    rows, kv_heads, group, _ = grouped.shape
    scores, values = [], []
    for part in seen:
        there = part.mask.swapaxes(-1, -2)
        keys, held = (mx.where(there, array, 0) for array in part[:2])
        scores.append(mx.where(part.mask, grouped @ keys.swapaxes(-1, -2), -mx.inf))
        values.append(mx.broadcast_to(held, (rows, *held.shape[1:])))
    if sinks is not None:
        shape = (rows, kv_heads, group, 1)
        scores.append(mx.broadcast_to(sinks.reshape(1, kv_heads, group, 1), shape))
        values.append(mx.zeros((rows, kv_heads, 1, grouped.shape[-1])))
    every = mx.concatenate(scores, axis=-1)
    output = mx.softmax(every, axis=-1) @ mx.concatenate(values, axis=2)
    return output, mx.logsumexp(every, axis=-1, keepdims=True)


def by_head(array: mx.array) -> mx.array:
    """From `[rows, kv_heads, group, n]` to `[1, kv_heads, rows * group, n]`."""
    # In one piece, as products are.
    return mx.contiguous(array.swapaxes(0, 1).reshape(1, array.shape[1], -1, array.shape[3]))


@pytest.mark.parametrize(
    ("size", "values", "heads", "dtype", "fits"),
    [
        (128, 128, 32, mx.bfloat16, True),
        (64, 64, 8, mx.float16, True),
        (256, 256, 64, mx.float32, True),
        (80, 80, 8, mx.float32, False),
        (12, 12, 8, mx.float32, False),
        (128, 64, 8, mx.float32, False),
        (128, 128, 72, mx.float32, False),
    ],
)
def test_what_the_kernel_reads(
    size: int, values: int, heads: int, dtype: mx.Dtype, *, fits: bool
) -> None:
    """Whole packs, whole warps, and few heads a key; values as long as keys."""
    queries = mx.zeros((2, 8, heads // 8, size), dtype)
    keys = mx.zeros((2, 8, 4, size), dtype)
    assert reads(queries, keys, mx.zeros((2, 8, 4, values), dtype)) == fits
    assert not reads(queries.astype(mx.int32), keys, keys)


def prompted(lengths: Sequence[int]) -> list[SequenceCache]:
    """Sequences that share what the first length says, and have of their own what follows."""
    model = zoo.make("llama")
    layout = CacheLayout(model)
    cache = layout.open()
    prefill(model, list(range(1, lengths[0] + 1)), cache)
    (span,) = cache.take_packed()
    return [layout.open(span.length, [span]) for _ in lengths]


@pytest.mark.parametrize(
    ("length", "stays", "rest"),
    [(5, [], [5]), (64, [64], []), (65, [64], [1]), (72, [72], []), (133, [128], [5])],
)
def test_runs_are_cut_where_products_are_fast(
    length: int, stays: Sequence[int], rest: Sequence[int]
) -> None:
    """The first part is a multiple, and no token is lost."""
    cache, _ = prompted([length, 0])
    (run,) = runs_of(cache.prefix)
    whole, rests = aligned([run], ALIGNED)
    assert [part.length for part in whole] == stays
    assert [part.length for part in rests] == rest
    assert aligned([run], 1) == ([run], [])
    keys = mx.concatenate([part.layer(1)[0] for part in [*whole, *rests]], axis=2)
    assert mx.array_equal(keys, run.layer(1)[0])
