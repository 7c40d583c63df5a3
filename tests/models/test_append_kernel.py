"""The kernel that rotates a step's queries and keys and writes keys and values, against MLX's."""

from dataclasses import replace
from typing import Any, NamedTuple

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE

from umbel.models.attention import append_kernel, decode_kernel
from umbel.models.attention.append_kernel import Token, Turn, append, appends, rotates
from umbel.models.load.device import CUDA
from umbel.models.step_arrays import Cut

from .batch_fixture import BatchFixture
from .cuda_emulator import EmulatedKernel
from .rings import Places, places

LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}
TURNS: dict[str, tuple[Any, Any]] = {
    "base": (RoPE(16, base=1e5), Turn(16, 1.0, 1e5, None)),
    "scaled": (RoPE(16, scale=0.25), Turn(16, 0.25, 1e4, None)),
    "narrow": (RoPE(6), Turn(6, 1.0, 1e4, None)),
}
LISTED = Llama3RoPE(16, base=5e5, scaling_config=LLAMA3)
TURNS["llama3"] = LISTED, Turn(16, 1.0, 1.0, LISTED._freqs)


class Shape(NamedTuple):
    """Of a step: rows, heads, those of keys, and positions of the ring."""

    rows: int
    heads: int
    kv_heads: int
    positions: int


SHAPES = [Shape(1, 2, 2, 5), Shape(3, 8, 2, 20), Shape(5, 6, 1, 9)]
SIZE = 16


def cuts(shape: Shape) -> list[Cut]:
    """Queries, keys and values as a model cuts them out of a product that has other columns too."""
    rows, heads, kv_heads, _ = shape
    mx.random.seed(sum(shape))
    product = mx.random.normal((rows, (heads + 2 * kv_heads + 1) * SIZE))
    mx.eval(product)
    found, begin = [], SIZE
    for count in (heads, kv_heads, kv_heads):
        end = begin + count * SIZE
        part: Any = Cut(product[:, None, begin:end], product, begin)
        found.append(part.reshape(rows, 1, count, -1).transpose(0, 2, 1, 3))
        begin = end
    return found


def newest(held: Places, positions: int) -> list[int]:
    """Where each row's newest token is."""
    spans = np.array(held.spans)
    found: list[int] = ((spans.sum(axis=1) - 1) % positions).tolist()
    return found


@pytest.mark.parametrize("cut", [True, False], ids=["of a product", "apart"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("kind", TURNS)
def test_it_rotates_and_writes(
    kernels: list[EmulatedKernel],
    kind: str,
    shape: Shape,
    cut: bool,  # noqa: FBT001
) -> None:
    """Each row's at its position, where its newest token goes; all else of the ring stays."""
    usual, turn = TURNS[kind]
    rows, heads, kv_heads, positions = shape
    parts = cuts(shape)
    given = [part if cut else mx.array(part) for part in parts]
    at = mx.array([3, 511, 90, 7, 1][:rows])
    held = places(rows, positions)
    ring = [mx.random.normal((rows, kv_heads, positions, SIZE)) for _ in range(2)]
    mx.eval(ring)
    before = [mx.array(tensor) + 0 for tensor in ring]
    mx.eval(before)
    token = Token(given[0], given[1], given[2], at, turn)
    assert appends(token)
    found = append(token, ring, held.spans)
    queries, keys = (usual(mx.array(part), offset=at) for part in parts[:2])
    assert found.shape == (1, kv_heads, rows * heads // kv_heads, SIZE)
    by_head = queries.reshape(rows, kv_heads, -1, SIZE).swapaxes(0, 1)
    assert mx.allclose(found.reshape(by_head.shape), by_head, atol=2e-4)
    for tensor, old, new in zip(ring, before, (keys, mx.array(parts[2])), strict=True):
        for row, place in enumerate(newest(held, positions)):
            old[row, :, place] = new[row, :, 0]
        assert mx.allclose(tensor, old, atol=2e-4)
    assert [kernel.launches for kernel in kernels] == [1]
    assert kernels[0].name == ("append_cut" if cut else "append")


def test_a_product_that_was_changed_is_not_read(kernels: list[EmulatedKernel]) -> None:
    """One of the three was scaled by the model: all are read as they are."""
    shape = SHAPES[1]
    queries, keys, values = cuts(shape)
    values *= 3.0  # type: ignore[misc]
    usual, turn = TURNS["base"]
    at = mx.array([3, 511, 90])
    held = places(3, 20)
    ring = [mx.zeros((3, 2, 20, SIZE)) for _ in range(2)]
    mx.eval(ring)
    append(Token(queries, keys, values, at, turn), ring, held.spans)
    for row, place in enumerate(newest(held, 20)):
        assert mx.array_equal(ring[1][row, :, place], mx.array(values)[row, :, 0])
        expected = usual(mx.array(keys), offset=at)[row, :, 0]
        assert mx.allclose(ring[0][row, :, place], expected, atol=2e-4)
    assert [kernel.name for kernel in kernels] == ["append"]


def test_what_it_does_not_know() -> None:
    """Prompts, odd sizes, other positions and numbers; heads and values that do not fit."""
    x, at = mx.zeros((3, 4, 1, 16)), mx.array([1, 2, 3])
    assert rotates(x, at, 16)
    assert rotates(x.astype(mx.bfloat16), at, 6)
    for one, positions, dims in (
        (mx.zeros((3, 4, 2, 16)), at, 16),
        (mx.zeros((3, 4, 16)), at, 16),
        (mx.zeros((3, 4, 1, 15)), at, 14),
        (x, at, 5),
        (x, mx.array(4), 16),
        (x, at[:2], 16),
        (x, at.astype(mx.int64), 16),
        (x.astype(mx.int32), at, 16),
    ):
        assert not rotates(one, positions, dims)
    turn = TURNS["base"][1]
    keys = mx.zeros((3, 2, 1, 16))
    assert appends(Token(x, keys, keys, at, turn))
    for queries, one, values in (
        (x, keys, mx.zeros((3, 2, 1, 8))),
        (x, mx.zeros((3, 3, 1, 16)), mx.zeros((3, 3, 1, 16))),
        (x, keys.astype(mx.bfloat16), keys),
        (x[:2], keys, keys),
    ):
        assert not appends(Token(queries, one, values, at, turn))


@pytest.mark.parametrize("reads", [True, False], ids=["a kernel", "products"])
def test_who_reads_what_it_wrote_needs_its_queries(
    kernels: list[EmulatedKernel],
    monkeypatch: pytest.MonkeyPatch,
    reads: bool,  # noqa: FBT001
) -> None:
    """Nothing else tells a GPU that it is written before it is read."""
    if not reads:
        monkeypatch.setattr(decode_kernel, "reads", lambda *_: False)
    device = replace(CUDA, fp32=True, compiles=False, compile_after=1, warms_up=False)
    world = BatchFixture("llama", device=device)
    caches = [world.come(prompt=5).cache for _ in range(2)]
    world.decode(steps=2)
    world.check()
    assert "append_cut" in {kernel.name for kernel in kernels if kernel.launches}
    monkeypatch.setattr(append_kernel, "append", lambda *given: append(*given) * mx.nan)
    output = world.runner.run(world.runner.plan(caches), caches, [1, 2])
    assert output.logits is not None
    assert mx.isnan(output.logits).all()
