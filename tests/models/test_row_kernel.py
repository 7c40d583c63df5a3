"""The kernel that puts tokens of rows side by side, run on the CPU."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from umbel.models.kv.packed import pack_suffix
from umbel.models.kv.ring_buffer import RingBuffer
from umbel.models.kv.row_kernel import MOST, Arrangement

from .cuda_emulator import EmulatedKernel, emulated


@pytest.fixture(autouse=True)
def launched(kernel_folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Have CUDA kernels run on the CPU; gives those that are made."""
    with emulated(kernel_folder) as made:
        yield made


def part(tokens: int, heads: int, size: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Tokens as spans give them: a slice of what is longer."""
    whole = mx.random.normal((1, heads, tokens + 7, size)) * 1e6
    return whole.astype(dtype)[:, :, 3 : 3 + tokens]


def apart(tokens: int, heads: int, size: int) -> mx.array:
    """Tokens as some models give them: the elements of one are not side by side."""
    return mx.random.normal((1, heads, size, tokens)).swapaxes(2, 3)


@pytest.mark.parametrize(
    ("lengths", "starts", "launches"),
    [
        ([[3]], [0], 1),
        ([[3, 1], [], [9]], [17, 5, -4], 1),
        ([[1] * 9, [2] * 5, [1] * 4, [20]], [11, -2, 0, 3], 2),
        ([[1] * MOST, [1]], [-16, 19], 2),
        ([[1] * (MOST + 1), [4, 4]], [2, 8], 1),
    ],
)
@pytest.mark.parametrize("size", [12, 9])
@pytest.mark.parametrize("dtype", [mx.float32, mx.uint32], ids=["plain", "quantised"])
def test_tokens_are_put_side_by_side(
    lengths: Sequence[Sequence[int]],
    starts: Sequence[int],
    launches: int,
    dtype: mx.Dtype,
    size: int,
    launched: list[EmulatedKernel],
) -> None:
    """Parts follow each other in a ring of positions, and zeros are everywhere else."""
    heads, positions = 2, 20
    rows = [[part(length, heads, size, dtype) for length in row] for row in lengths]
    found = np.array(Arrangement(lengths, starts, positions).arrange(rows))
    expected = np.zeros((len(rows), heads, positions, size), found.dtype)
    for row, (parts, start) in enumerate(zip(rows, starts, strict=True)):
        tokens = [np.array(each)[0] for each in parts] or [np.zeros((heads, 0, size))]
        together = np.concatenate(tokens, axis=1)
        expected[row, :, (start + np.arange(together.shape[1])) % positions] = np.moveaxis(
            together, 1, 0
        )
    assert np.array_equal(found, expected)
    assert [kernel.launches for kernel in launched] == [launches]


def test_elements_may_lie_anywhere() -> None:
    """Whatever the steps between them are, they are read one by one where packs are not there."""
    rows = [[apart(5, 2, 8), part(6, 2, 8)], [part(3, 2, 16)[..., 1:9]]]
    mx.eval(rows)
    found = Arrangement([[5, 6], [3]], [0, 0], 11).arrange(rows)
    assert mx.array_equal(found[:1], mx.concatenate(rows[0], axis=2))
    assert mx.array_equal(found[1:, :, :3], rows[1][0])


def test_a_ring_buffer_writes_rows_as_it_does_one_by_one() -> None:
    """Wherever its ring stands; what others have is as it was, and no NaN of a former row stays."""
    mx.random.seed(1)
    one, many = (RingBuffer(64, scores_masked=True, in_kernel=kernel) for kernel in (False, True))
    token = mx.random.normal((5, 2, 1, 8))
    for buffer in (one, many):
        buffer.reserve(2)
        buffer.resize(5, 24)
        for _ in range(30):
            buffer.begin_step()
            for index in range(2):
                buffer.append(index, token)
            buffer.end_step(range(5))
    rows = [1, 4, 3]
    tensors = [[[part(n, 2, 8) for n in own] for _ in range(2)] for own in ([9, 4], [1], [24])]
    for held in many.tensors:
        assert held is not None
        held[3] = mx.nan
    for row in rows:
        one.wipe(row)
    one.put_all(rows, tensors)
    many.put_all(rows, tensors)
    assert one.lengths == many.lengths == [24, 13, 24, 24, 1]
    for row, count in enumerate(one.lengths):
        for expected, found in zip(one.take(row, count), many.take(row, count), strict=True):
            assert mx.array_equal(expected, found)
    assert not any(mx.isnan(held).any() for held in many.tensors if held is not None)


def test_a_suffix_is_packed_as_without_the_kernel(launched: list[EmulatedKernel]) -> None:
    """In the same arrays, also of two shapes and where a ring ends: one launch for each array."""
    mx.random.seed(2)
    layers = [
        [[part(3, heads, size), part(8, heads, size)] for heads, size in ((2, 8), (1, 12))]
        for _ in range(9)
    ]
    expected = pack_suffix(layers)
    assert not launched
    found = pack_suffix(layers, in_kernel=True)
    assert found.length == expected.length == 11
    assert found.places == expected.places
    for one, other in zip(found.arrays, expected.arrays, strict=True):
        assert mx.array_equal(one, other)
    for number, layer in enumerate(layers):
        for tensor, parts in zip(found.layer(number), layer, strict=True):
            assert mx.array_equal(tensor, mx.concatenate(parts, axis=2))
    assert [kernel.launches for kernel in launched] == [len(expected.arrays)]
