"""Rotary embeddings: by table, which is MLX's to the last bit, and a step's."""

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
from umbel.models.step_arrays import StepKeys

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
    """They are rotated by the same angles, which lie otherwise in a head; by kernel are none."""
    modules = [RoPE(8), RoPE(8, traditional=True)]
    rotary.bind(Layers(*modules), by_table=True)
    x = mx.random.normal((1, 2, 3, 8))
    for module, usual in zip(modules, (RoPE(8), RoPE(8, traditional=True)), strict=True):
        assert mx.array_equal(module(x, offset=4), usual(x, offset=4))
    assert rotary.bind(Layers(*modules), by_kernel=True)
    assert [type(module) for module in modules] == [rotary.PairedRoPE, RoPE]


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


def paired(kind: str = "base") -> tuple[Any, Any]:
    """A module whose keys of a step are left to their layer, and MLX's own."""
    module, usual = KINDS[kind](), KINDS[kind]()
    rotary.bind(Layers(module), by_kernel=True)
    return module, usual


def step() -> tuple[mx.array, mx.array]:
    """A step's queries of eight heads, and keys of two."""
    mx.random.seed(3)
    return mx.random.normal((3, 8, 1, 64)), mx.random.normal((3, 2, 1, 64))


@pytest.mark.parametrize("kind", ["base", "scaled", "llama3"])
def test_a_steps_keys_know_their_queries(kind: str) -> None:
    """And what both were before they were rotated; to whoever else looks they are MLX's."""
    module, usual = paired(kind)
    queries, keys = step()
    at = mx.array([0, 511, 30000])
    asked, rotated = module(queries, offset=at), module(keys, offset=at)
    assert rotated.queries is asked
    assert (asked.plain is queries, rotated.plain is keys, asked.positions is at) == (True,) * 3
    assert mx.array_equal(asked, usual(queries, offset=at))
    assert mx.array_equal(rotated, usual(keys, offset=at))
    del asked
    assert rotated.queries is None


def test_what_are_no_pairs() -> None:
    """Other positions, prompts, one position for all, other numbers, queries that were let go."""
    module, usual = paired()
    queries, keys = step()
    at, later = mx.array([1, 2, 3]), mx.array([4, 5, 6])
    long = mx.random.normal((3, 2, 5, 64))
    for first, second in (
        [(queries, at), (keys, later)],
        [(queries, at), (long, at)],
        [(queries, 7), (keys, 7)],
        [(queries, at.astype(mx.int64)), (keys, at.astype(mx.int64))],
    ):
        asked, rotated = (module(x, offset=offset) for x, offset in (first, second))
        assert not isinstance(rotated, StepKeys)
        for each, (x, offset) in zip((asked, rotated), (first, second), strict=True):
            assert mx.array_equal(each, usual(x, offset=offset))
        del asked, rotated, each  # whoever holds queries may still have keys for them
    module(queries, offset=at)
    assert not isinstance(module(keys, offset=at), StepKeys)


def test_queries_and_keys_that_are_changed_are_no_notes() -> None:
    """In place, by a model that scales them, say."""
    module, usual = paired()
    queries, keys = step()
    at = mx.array([1, 2, 3])
    asked, rotated = module(queries, offset=at), module(keys, offset=at)
    asked *= 2.0
    rotated *= 3.0
    assert (asked.plain, rotated.plain) == (None, None)
    assert mx.array_equal(asked, 2 * usual(queries, offset=at))
    assert mx.array_equal(rotated, 3 * usual(keys, offset=at))


def test_a_model_is_bound_for_a_kernel() -> None:
    """Where the policy says that steps are kernels; for another device all is as before."""
    model: Any = zoo.make("llama")
    embeddings = [layer.self_attn.rope for layer in model.layers]
    for device, kind in (
        (CUDA, rotary.PairedRoPE),
        (CPU, rotary.TabledRoPE),
        (CUDA, rotary.PairedRoPE),
        (GPU, RoPE),
    ):
        bind(model, device)
        assert {type(each) for each in embeddings} == {kind}
