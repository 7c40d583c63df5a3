"""MLA's kernel of a decode step, run on the CPU, against operations of MLX."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.attention.decode_kernel import Ring
from umbel.models.attention.latent_kernel import attend, reads
from umbel.models.attention.products import Latent, Queries

from .cuda_emulator import EmulatedKernel, emulated
from .rings import Places, places

SMALL = 2e-6  # rounding of fp32 sums of a few hundred terms


@pytest.fixture(autouse=True)
def launched(kernel_folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Have CUDA kernels run on the CPU; gives those that are made."""
    with emulated(kernel_folder) as made:
        yield made


class Shape(NamedTuple):
    """Of a step: rows, heads, positions of the ring, a latent's size and the rotated part's."""

    rows: int
    heads: int
    positions: int
    size: int
    rotated: int


SHAPES = [
    Shape(2, 4, 20, 32, 16),
    Shape(3, 20, 70, 512, 64),
    Shape(1, 3, 150, 128, 32),
    Shape(2, 5, 9, 256, 40),
    Shape(4, 6, 3, 64, 33),
    Shape(2, 2, 30, 512, 1),
]


class Seen(NamedTuple):
    """Latents and rotated parts that rows look at, and where each row may."""

    latents: mx.array
    rotated: mx.array
    mask: mx.array


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("parts", ["", "n", "h", "hr", "rhnrhrnh"])
def test_attend(shape: Shape, parts: str, launched: list[EmulatedKernel]) -> None:
    """Rows' own latents anywhere in their ring, and parts in either order.

    Of parts that not all read, the first row reads nothing.
    """
    mx.random.seed(sum(shape))
    rows, scale = shape.rows, (shape.size + shape.rotated) ** -0.5
    queries = asked(shape, scale)
    held = places(rows, shape.positions)
    seen = [ring(shape, held)]
    others = []
    for kind in parts:
        part = some(shape, rows if kind == "r" else 1, 13)
        if kind == "n":
            read_by = mx.broadcast_to((mx.arange(rows) > 0)[:, None, None, None], (rows, 1, 1, 13))
            part = part._replace(mask=read_by)
        seen.append(part)
        output, lse = attended(queries, [part], scale)
        output = mx.where(mx.isinf(lse), 0, output)  # what comes of looking at nothing
        if kind == "h":  # as products of what all share come
            output, lse = (x.reshape(1, 1, -1, x.shape[3]) for x in (output, lse))
        others.append((output, lse))
    own = Ring(seen[0].latents, seen[0].rotated, held.spans)
    found = attend(queries, own, scale, others=others)
    expected, _ = attended(queries, seen, scale)
    assert found.shape == queries[0].shape
    assert mx.abs(found - expected.reshape(found.shape)).max() < SMALL
    assert [kernel.launches for kernel in launched] == [1]


def asked(shape: Shape, scale: float) -> Queries:
    """Queries as models give them: a part of what is wider, with axes exchanged."""
    wide = mx.random.normal((shape.rows, 1, shape.heads, shape.size + 8))[..., 8:].swapaxes(1, 2)
    rotated = mx.random.normal((shape.rows, shape.heads, 1, shape.rotated)) * scale
    mx.eval(wide, rotated)
    return wide, rotated


def ring(shape: Shape, held: Places) -> Seen:
    """Rows whose tokens lie somewhere in a ring, and NaN wherever they do not."""
    own = some(shape, shape.rows, shape.positions)
    there = held.seen.swapaxes(-1, -2)
    latents, rotated = (mx.where(there, array, mx.nan) for array in own[:2])
    return Seen(latents, rotated, held.seen)


def some(shape: Shape, rows: int, tokens: int) -> Seen:
    """Latents and rotated parts that all may look at."""
    latents, rotated = (mx.random.normal((rows, 1, tokens, n)) for n in (shape.size, shape.rotated))
    return Seen(latents, rotated, mx.ones((1, 1, 1, tokens), mx.bool_))


def attended(queries: Queries, seen: Sequence[Seen], scale: float) -> tuple[mx.array, mx.array]:
    """Attention by operations of MLX, over all of it: the output and the log of the sum."""
    grouped = tuple(each.swapaxes(1, 2) for each in queries)  # [rows, 1, heads, size]
    rows = grouped[0].shape[0]
    scores, values = [], []
    for part in seen:
        there = part.mask.swapaxes(-1, -2)
        tensors = tuple(mx.where(there, array, 0) for array in part[:2])
        products = Latent(scale).scores(grouped, tensors)
        scores.append(mx.where(part.mask, products, -mx.inf))
        values.append(mx.broadcast_to(tensors[0], (rows, *tensors[0].shape[1:])))
    every = mx.concatenate(scores, axis=-1)
    output = mx.softmax(every, axis=-1) @ mx.concatenate(values, axis=2)
    return output, mx.logsumexp(every, axis=-1, keepdims=True)


def test_scores_of_latents_are_those_of_both_parts_in_a_row() -> None:
    """A product of wide keys, scaled, of which the model has scaled the rotated part."""
    shape, scale = Shape(2, 3, 0, 32, 16), 0.3
    grouped = tuple(each.swapaxes(1, 2) for each in asked(shape, scale))
    latents, rotated, _ = some(shape, 2, 11)
    wide = mx.concatenate([grouped[0] * scale, grouped[1]], axis=-1)
    expected = wide @ mx.concatenate([latents, rotated], axis=-1).swapaxes(-1, -2)
    found = Latent(scale).scores(grouped, (latents, rotated))
    assert mx.abs(found - expected).max() < SMALL * 10


@pytest.mark.parametrize(
    ("size", "dtype", "fits"),
    [
        (512, mx.bfloat16, True),
        (256, mx.float16, True),
        (64, mx.float32, True),
        (96, mx.float32, False),  # three elements are no pack
        (320, mx.float32, False),
        (16, mx.float32, False),
        (1024, mx.bfloat16, False),
        (512, mx.int32, False),
    ],
)
def test_what_the_kernel_reads(size: int, dtype: mx.Dtype, *, fits: bool) -> None:
    """One head of latents that a warp has whole packs of."""
    latents, rotated = (mx.zeros((2, 1, 4, n), dtype) for n in (size, 64))
    queries, turned = (mx.zeros((2, 8, 1, n), dtype) for n in (size, 64))
    assert reads((queries, turned), latents, rotated) == fits
    assert not reads((queries, turned), mx.zeros((2, 2, 4, size), dtype), rotated)
    assert not reads((queries[..., 1:], turned), latents, rotated)
    assert not reads((queries, turned), latents, rotated.astype(mx.int8))
    assert not reads((queries, turned.astype(mx.int8)), latents, rotated)
