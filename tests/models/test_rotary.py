"""Rotary embeddings: by table, which is MLX's to the last bit."""

from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE

from umbel.models import rotary
from umbel.models.binding import bind
from umbel.models.load.device import CPU, CUDA, GPU

from .. import zoo
from .batch_fixture import BatchFixture

LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64}
KINDS: dict[str, Any] = {
    "base": lambda: RoPE(64, base=1e5),
    "narrow": lambda: RoPE(6),
    "scaled": lambda: RoPE(64, scale=0.25),
    "llama3": lambda: Llama3RoPE(64, base=5e5, scaling_config=LLAMA3),
    "neighbours": lambda: RoPE(64, base=1e5, traditional=True),
    "llama3 neighbours": lambda: Llama3RoPE(64, base=5e5, traditional=True, scaling_config=LLAMA3),
}
OFFSETS: dict[str, Any] = {
    "none": 0,
    "one": 4097,
    "scalar": mx.array(70000),
    "array of one": mx.array([9]),
    "each row": mx.array([0, 511, 30000]),
}


class Layers(Module):
    """A model of several modules."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [*modules]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call had for which sines were computed."""
    seen: list[int] = []
    sin = mx.sin

    def sines(angles: mx.array) -> mx.array:
        seen.append(angles.shape[-2])
        return sin(angles)

    monkeypatch.setattr(mx, "sin", sines)
    return seen


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("at", OFFSETS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_mlx_computes(
    kind: str, at: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, for queries and keys of several rows, and from their table the second time."""
    module, usual, seen = KINDS[kind](), KINDS[kind](), counted(monkeypatch)
    assert rotary.bind(Layers(module), by_table=True)
    for heads in (9, 3):
        x = mx.random.normal((3, tokens, heads, module.dims)).swapaxes(1, 2)
        assert mx.array_equal(module(x, offset=OFFSETS[at]), usual(x, offset=OFFSETS[at]))
    assert seen == [tokens]


def test_layers_that_rotate_alike_have_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another base have their own; other positions, or as many more, have a new one."""
    seen = counted(monkeypatch)
    modules = [RoPE(8), RoPE(8), RoPE(8, base=5e5), KINDS["llama3"](), KINDS["llama3"]()]
    rotary.bind(Layers(*modules), by_table=True)
    asked = [(5, 1), (5, 2), (6, 2), (mx.array([6, 7]), 2), (mx.array([6, 7]), 2)]
    for offset, tokens in asked:
        for module in modules:
            module(mx.zeros((2, 3, tokens, module.dims)), offset=offset)
    assert seen == [tokens for _, tokens in asked[:-1] for _ in range(3)]


def test_positions_that_are_counted_in_place_are_seen() -> None:
    """mlx-lm's `BatchKVCache` counts in the array that it gives."""
    module, usual = KINDS["narrow"](), KINDS["narrow"]()
    rotary.bind(Layers(module), by_table=True)
    offset, x = mx.array([3, 8]), mx.random.normal((2, 1, 1, 6))
    module(x, offset=offset)
    offset += 1
    assert mx.array_equal(module(x, offset=offset), usual(x, offset=offset))


@pytest.mark.parametrize(
    "x",
    [
        mx.random.normal((1, 2, 3, 16)),
        mx.random.normal((2, 3, 8)),
        mx.random.normal((1, 2, 3, 8)).astype(mx.bfloat16),
    ],
    ids=["wider heads", "no heads", "bfloat16"],
)
def test_what_is_left_to_mlx(x: mx.array, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of which a part is rotated, other shapes and other types."""
    module, usual, seen = RoPE(8), RoPE(8), counted(monkeypatch)
    rotary.bind(Layers(module), by_table=True)
    assert mx.array_equal(module(x, offset=4), usual(x, offset=4))
    assert seen == []


def test_neighbours_have_a_table_of_their_own() -> None:
    """They are rotated by the same angles, which lie otherwise in a head."""
    modules = [RoPE(8), RoPE(8, traditional=True)]
    rotary.bind(Layers(*modules), by_table=True)
    x = mx.random.normal((1, 2, 3, 8))
    for module, usual in zip(modules, (RoPE(8), RoPE(8, traditional=True)), strict=True):
        assert mx.array_equal(module(x, offset=4), usual(x, offset=4))


def test_a_model_is_bound_for_its_device() -> None:
    """On a CPU, and for another device all is as before."""
    model: Any = zoo.make("llama")
    embeddings = [layer.self_attn.rope for layer in model.layers]
    for device, kind in ((CPU, rotary.TabledRoPE), (GPU, RoPE), (CPU, rotary.TabledRoPE)):
        for _ in range(2):
            bind(model, device)
            assert {type(each) for each in embeddings} == {kind}
    assert len({id(vars(each)["_rotation"]) for each in embeddings}) == 1
    (rotation,) = rotary.rotations(model)
    bind(model, CUDA)
    assert rotary.rotations(model) == []
    bind(model, CPU)
    assert rotary.rotations(model) == [rotation], "whoever has it forget goes on to"


def test_no_table_outlives_its_call() -> None:
    """Of prompts, of those who decode and of both; what is active then is what is accounted for."""
    world = BatchFixture("llama")
    (rotation,) = rotary.rotations(world.model)
    agents = [world.come(prompt=5) for _ in range(2)]
    caches = [agent.cache for agent in agents]
    assert rotation._tables is None
    seen = []
    rotate = rotation.rotate

    def rotated(x: mx.array, offset: rotary.Offset) -> mx.array:
        result = rotate(x, offset)
        seen.append(rotation._tables is not None)
        return result

    rotation.rotate = rotated  # type: ignore[method-assign]
    try:
        for mixed in (True, False):
            for decoding in ([], caches[:1], caches):
                prompt = world.come().cache
                chunks = [([1, 2, 3], prompt)]
                plan = world.runner.plan(decoding, [(prompt, 3)], mixed=mixed)
                if mixed:
                    world.runner.mix(plan, decoding, [1] * len(decoding), chunks)
                else:
                    world.runner.run(plan, decoding, [1] * len(decoding))
                    world.runner.prefill(chunks)
                assert seen
                assert all(seen)
                assert rotation._tables is None
                seen.clear()
    finally:
        del vars(rotation)["rotate"]
