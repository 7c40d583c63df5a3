"""The kernel that reads what rows alone lease, run on the CPU, against operations of MLX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.attention import split_kernel, splits
from umbel.models.attention.cascade import Part
from umbel.models.attention.splits import splits_of
from umbel.models.backends.cuda import CUDA
from umbel.models.kv.token_layer import Tensors, starts

from ..shared import limited
from .batch_fixture import BatchFixture
from .cuda_emulator import EmulatedKernel, emulated

DEVICE = limited(replace(CUDA, compiles=False), fp32=True, warms_up=False)
SMALL = 2e-6  # rounding of fp32 sums of a few hundred terms


@pytest.fixture(autouse=True)
def made(kernel_folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Have CUDA kernels run on the CPU; gives those that are made."""
    with emulated(kernel_folder) as kernels:
        yield kernels


@dataclass(frozen=True)
class Held:
    """Keys and values, parts of wider arrays."""

    keys: mx.array
    values: mx.array

    @property
    def length(self) -> int:
        """Tokens of it."""
        return self.keys.shape[2]

    def start_of(self, index: int) -> Tensors:
        """The same for every layer."""
        del index
        return starts((self.keys, self.values))


def held(kv_heads: int, tokens: int, size: int) -> Held:
    """Make some that begin within others."""
    shape = 2, kv_heads, tokens + 5, size
    return Held(*[mx.random.normal(shape)[1:, :, 5:] for _ in range(2)])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 2, 64), (4, 4, 16), (20, 1, 8), (2, 1, 256)]
)
@pytest.mark.parametrize("least", [16, 256])
def test_rows_of_many_lengths(
    heads: int, kv_heads: int, size: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several runs, of one and of none, read by one block and by many, in two calls."""
    monkeypatch.setattr(splits, "_LEAST", least)
    mx.random.seed(heads)
    lengths = {0: (40, 130, *range(2, 12)), 3: (33, *range(9, 1, -1)), 2: (1,)}
    private = {row: [held(kv_heads, n, size) for n in each] for row, each in lengths.items()}
    found = splits_of(private, 4, 2)
    assert len(found) == 2
    queries = mx.random.normal((4, 1, heads + 1, size))[:, :, 1:].swapaxes(1, 2)
    asked = queries.reshape(4, kv_heads, -1, size)
    outputs = splits.attend(found, 1, asked, size**-0.5)
    assert outputs is not None
    assert outputs[1].shape[1] >= (9 if least > 40 else 18)
    part = split_kernel.merged(outputs, kv_heads, mx.float32)
    for slot in range(4):
        check(queries[slot], private.get(slot, []), part, slot)


def check(queries: mx.array, read: Sequence[Held], part: Part, slot: int) -> None:
    """Hold one row to attention by operations of MLX."""
    output, lse = part.output[slot], part.lse[slot]
    if not read:
        assert mx.all(output == 0)
        assert mx.all(lse == -mx.inf)
        return
    keys = mx.concatenate([each.keys[0] for each in read], 1)
    values = mx.concatenate([each.values[0] for each in read], 1)
    kv_heads, _, size = keys.shape
    scores = queries.reshape(kv_heads, -1, size) * size**-0.5 @ keys.swapaxes(-1, -2)
    expected = mx.softmax(scores, axis=-1) @ values
    assert mx.abs(output - expected).max() < 5 * SMALL
    assert mx.abs(lse - mx.logsumexp(scores, axis=-1, keepdims=True)).max() < 20 * SMALL


def test_what_it_does_not_read() -> None:
    """Nothing, sizes that are no whole packs, other types."""
    few = held(2, 9, 16)
    assert splits_of({}, 2, 1) == []
    assert splits.attend([], 0, few.keys, 1.0) is None
    assert splits_of({0: [held(2, 9, 12)]}, 2, 1) == []
    assert splits_of({0: [Held(few.keys, few.values[..., :8])]}, 2, 1) == []
    whole = Held(few.keys.astype(mx.int32), few.values.astype(mx.int32))
    assert splits_of({0: [whole]}, 2, 1) == []
    assert not split_kernel.reads((few.keys, few.values, few.keys))


def test_histories_of_other_lengths_have_one_form() -> None:
    """Arguments of the same shapes, whoever comes."""

    def form(*lengths: int) -> list[tuple[int, ...]]:
        (found,) = splits_of({slot: [held(2, n, 16)] for slot, n in enumerate(lengths)}, 3, 1)
        arrays = [array for segment in found.segments(0) for array in segment]
        return [tuple(array.shape) for array in [found.table, *arrays]]

    assert form(600, 700, 650) == form(580, 735) == form(601, 513, 513)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma4_text", "llama_kv8"])
def test_rows_of_a_batch(name: str, made: list[EmulatedKernel]) -> None:
    """Private histories of rows that come and go, against mlx-lm's own."""
    world = BatchFixture(name, device=DEVICE, own=8, limit=16)
    common = world.branch(70)
    for tokens in (0, 40, 20, 13):
        world.come(world.branch(tokens, common) if tokens else common, 3)
    world.come(world.branch(70), 2)
    world.decode(steps=4)
    world.leave(world.agents[1])
    world.come(world.branch(30, common), 4)
    world.decode(steps=10)  # some are full, and packed
    world.check()
    launched = {kernel.name for kernel in made if kernel.launches}
    reads = name != "llama_kv8"  # whose keys have fewer bits
    assert ("attend_split" in launched) == reads
