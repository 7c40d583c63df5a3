"""The kernel that reads what rows alone lease, run on the CPU, against operations of MLX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.attention import split_kernel, splits
from umbel.models.attention.cascade import Part
from umbel.models.attention.splits import Reading, splits_of
from umbel.models.kv.token_layer import Tensors, starts
from umbel.models.load.device import CUDA

from .batch_fixture import BatchFixture
from .cuda_emulator import EmulatedKernel, emulated

DEVICE = replace(CUDA, fp32=True, compiles=False, warms_up=False)
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

    def start_of(self, index: int) -> Tensors:
        """The same for every layer."""
        del index
        return starts((self.keys, self.values))


def held(rows: int, kv_heads: int, tokens: int, size: int) -> Held:
    """Make some that begin within others."""
    shape = rows + 1, kv_heads, tokens + 5, size
    return Held(*[mx.random.normal(shape)[1:, :, 5:] for _ in range(2)])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 2, 64), (4, 4, 16), (20, 1, 8), (2, 1, 256)]
)
@pytest.mark.parametrize("least", [16, 256])
def test_rows_of_many_lengths(
    heads: int, kv_heads: int, size: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stack and of runs, some of both, one of nothing; read by one block and by many."""
    monkeypatch.setattr(splits, "_LEAST", least)
    mx.random.seed(heads)
    sources = [
        held(3, kv_heads, 40, size),
        held(1, kv_heads, 130, size),
        held(1, kv_heads, 1, size),
    ]
    readings = [Reading(0, 0, 2, 40), Reading(3, 0, 0, 33), Reading(0, 1, 0, 130)]
    readings.append(Reading(2, 2, 0, 1))
    found = splits_of(sources, readings, 4, 2)
    assert found is not None
    queries = mx.random.normal((4, 1, heads + 1, size))[:, :, 1:].swapaxes(1, 2)
    asked = queries.reshape(4, kv_heads, -1, size)
    outputs = split_kernel.attend(asked, found.segments(1), found.table, size**-0.5)
    assert outputs[1].shape[1] >= (1 if least > 40 else 9)
    part = split_kernel.merged(outputs, kv_heads, mx.float32)
    for slot in range(4):
        check(queries[slot], [r for r in readings if r.slot == slot], sources, part, slot)


def check(
    queries: mx.array,
    readings: Sequence[Reading],
    sources: Sequence[Held],
    part: Part,
    slot: int,
) -> None:
    """Hold one row to attention by operations of MLX."""
    output, lse = part.output[slot], part.lse[slot]
    if not readings:
        assert mx.all(output == 0)
        assert mx.all(lse == -mx.inf)
        return
    keys, values = (
        mx.concatenate([getattr(sources[r.source], n)[r.row, :, : r.tokens] for r in readings], 1)
        for n in ("keys", "values")
    )
    kv_heads, _, size = keys.shape
    scores = queries.reshape(kv_heads, -1, size) * size**-0.5 @ keys.swapaxes(-1, -2)
    expected = mx.softmax(scores, axis=-1) @ values
    assert mx.abs(output - expected).max() < 5 * SMALL
    assert mx.abs(lse - mx.logsumexp(scores, axis=-1, keepdims=True)).max() < 20 * SMALL


def test_what_it_does_not_read() -> None:
    """Nothing, more than it has arguments for, sizes that are no whole packs, other types."""
    few, read = held(1, 2, 9, 16), [Reading(0, 0, 0, 9)]
    assert splits_of([], [], 2, 1) is None
    assert splits_of([few] * (split_kernel.MOST + 1), read, 2, 1) is None
    assert splits_of([held(1, 2, 9, 12)], read, 2, 1) is None
    assert splits_of([Held(few.keys, few.values[..., :8])], read, 2, 1) is None
    assert (
        splits_of([Held(*[x.astype(mx.int32) for x in (few.keys, few.values)])], read, 2, 1) is None
    )
    assert not split_kernel.reads((few.keys, few.values, few.keys))


def test_histories_of_other_lengths_have_one_form() -> None:
    """Arguments of the same shapes, whoever comes."""

    def form(*lengths: int) -> list[tuple[int, ...]]:
        readings = [Reading(slot, slot, 0, tokens) for slot, tokens in enumerate(lengths)]
        sources = [held(1, 2, tokens, 16) for tokens in lengths]
        found = splits_of(sources, readings, 3, 1)
        assert found is not None
        arrays = [array for segment in found.segments(0) for array in segment]
        return [tuple(array.shape) for array in [found.table, *arrays]]

    assert form(600, 700, 650) == form(580, 735) == form(601, 513, 513)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma4_text", "llama_kv8"])
def test_rows_of_a_batch(name: str, made: list[EmulatedKernel]) -> None:
    """Histories in stacks and beside them, of those who come and go, against mlx-lm's own."""
    world = BatchFixture(name, device=DEVICE, own=8, limit=16)
    common = world.branch(70)
    for tokens in (0, 40, 20, 13):
        world.come(world.branch(tokens, common) if tokens else common, 3)
    world.come(world.branch(70), 2)
    world.decode(steps=4)
    assert world.placement.stacks  # made before it was known who reads
    world.leave(world.agents[1])
    world.come(world.branch(30, common), 4)
    world.decode(steps=10)  # some are full, and packed
    world.check()
    launched = {kernel.name for kernel in made if kernel.launches}
    reads = name != "llama_kv8"  # whose keys have fewer bits
    assert ("attend_split" in launched) == reads
    assert world.placement.reads_apart == reads


def test_what_is_read_apart_is_not_copied() -> None:
    """Once it is known that a kernel reads it: nobody's tokens move as others come."""
    world = BatchFixture("llama", device=DEVICE, own=8)
    common = world.branch(64)
    world.come(world.branch(40, common), 2)
    world.come(world.branch(45, common), 2)
    world.decode(steps=2)
    for tokens in (30, 50, 65, 40):
        world.come(world.branch(tokens, common), 2)
        world.decode(steps=2)
    assert world.placement.stacks == ()
    assert not world.placement.restack_due
    world.check()
