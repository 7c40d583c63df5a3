"""Prompts that are computed in one call, held to the same prompts computed one by one."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from umbel.models import gated_delta, runner, runtime
from umbel.models.attention import binding, joint
from umbel.models.attention.blocks import BLOCK
from umbel.models.errors import NotBatchableError
from umbel.models.kv import batch_cache
from umbel.models.kv.sequence_cache import SequenceCache, flat_arrays
from umbel.models.load.device import CPU, device_policy
from umbel.models.memory_profile import PlannedChunk
from umbel.models.prefill import prefill
from umbel.models.prepare import prepare
from umbel.models.runtime import launch, launch_in_turn, resident_bytes

from ..shared import AS_GPU, padding
from .batch_fixture import NAMES, TOLERANCE, BatchFixture, Branch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, and no package
from recorder import operations

BY_THEMSELVES = {
    "deepseek_v32": "it reads keys for its indexer",
    "gemma2": "its attention is its own",
    "llama4": "it attends in chunks",
    **dict.fromkeys(
        ("qwen3_next", "mamba2", "falcon_h1", "kimi_linear", "plamo2", "mamba"),
        "padding may get into the state of its recurrent layers",
    ),
}
"""Models whose prompts are computed one by one, and why."""

TOGETHER = [name for name in (*NAMES, "llama_kv4") if name not in BY_THEMSELVES]
ROUNDING = 1e-5
"""Of a number in fp32 that is a sum of many, in another order: some states grow to a thousand."""

LENGTHS = [(7, 1, 4), (70, 33, 2), (1, 1, 1), (BLOCK + 9, 4, 2), (5, 5, 5)]
LAYERS = 6


def started(world: BatchFixture, branch: Branch, twice: int) -> list[list[SequenceCache]]:
    """Open the same three sequences some times: two lease a prefix, one starts from nothing."""
    return [
        [world.come(branch).cache, world.come(branch).cache, world.come().cache]
        for _ in range(twice)
    ]


def state(cache: SequenceCache) -> list[np.ndarray]:
    """All that a sequence has of its own."""
    return [
        np.array(array.astype(mx.float32) if array.dtype != mx.uint32 else array)
        for array in flat_arrays([*cache.suffix(), [x.state for x in cache.non_trimmable]])
    ]


def hold_the_same(joined: list[SequenceCache], alone: list[SequenceCache]) -> None:
    """Check that sequences have the state of others, but for rounding."""
    for one, other in zip(joined, alone, strict=True):
        for mine, theirs in zip(state(one), state(other), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=ROUNDING, atol=TOLERANCE)


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("name", TOGETHER)
def test_together_as_alone(name: str, multiple: int) -> None:
    """Each has the state that it has alone, call after call, and no padding gets into it."""
    world = BatchFixture(name, device=padding(multiple))
    assert world.runner.prefills_together
    joined, alone = started(world, world.branch(40), 2)
    for lengths in LENGTHS:
        chunks = [world.words(length) for length in lengths]
        world.runner.prefill(list(zip(chunks, joined, strict=True)))
        for tokens, cache in zip(chunks, alone, strict=True):
            world.runner.prefill([(tokens, cache)])
    for one, other in zip(joined, alone, strict=True):
        assert (one.offset, one.suffix_length) == (other.offset, other.suffix_length)
        if "kv" not in name:  # a rounding is a whole step of what is quantised
            for mine, theirs in zip(state(one), state(other), strict=True):
                assert mine.shape == theirs.shape
                np.testing.assert_allclose(mine, theirs, rtol=ROUNDING, atol=TOLERANCE)
        logits = [world.model(mx.array([[3]]), cache=each.layers) for each in (one, other)]
        assert mx.abs(logits[0] - logits[1]).max() < TOLERANCE * (100 if "kv" in name else 1)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [([9], (1, 9)), ([9, 3], (2, 16)), ([16, 16], (2, 16)), ([5, 17, 9], (3, 32))],
)
def test_several_are_padded_to_a_multiple(
    lengths: list[int], shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of several has one of few numbers of tokens; one prompt has its own."""
    world, seen = BatchFixture("llama", device=padding(16)), []
    call = type(world.model).__call__

    def called(model: Any, tokens: mx.array, **options: Any) -> mx.array:
        seen.append(tokens.shape)
        found: mx.array = call(model, tokens, **options)
        return found

    caches = [world.come().cache for _ in lengths]
    monkeypatch.setattr(type(world.model), "__call__", called)
    world.runner.prefill([(world.words(n), c) for n, c in zip(lengths, caches, strict=True)])
    assert seen == [shape]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_whatever_each_reads_alone(name: str) -> None:
    """Prefixes of their own, of several spans, a suffix after them, or nothing at all."""
    world = BatchFixture(name)
    trunk = world.branch(40)
    first = world.branch(9, trunk)
    places = [trunk, first, first, world.branch(30, world.branch(5, trunk)), Branch()]
    joined, alone = ([world.come(place).cache for place in places] for _ in range(2))
    held = [3, 0, 0, 6, 0]
    for length, one, other in zip(held, joined, alone, strict=True):
        if length:
            tokens = world.words(length)
            for cache in (one, other):
                world.runner.prefill([(tokens, cache)])
    chunks = [world.words(length) for length in (4, 9, 2, 12, 7)]
    world.runner.prefill(list(zip(chunks, joined, strict=True)))
    for tokens, cache in zip(chunks, alone, strict=True):
        world.runner.prefill([(tokens, cache)])
    hold_the_same(joined, alone)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_suffix_keeps_nobody_from_reading_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt whose first part is computed: all read what they share at once, as before."""
    world, seen, real = BatchFixture(name), list[int](), joint.attend_jointly
    first, second, late = started(world, world.branch(40), 1)[0]

    def noted(*args: Any) -> mx.array:
        seen.append(len(args[3]))
        return real(*args)

    monkeypatch.setattr("umbel.models.attention.padded.attend_jointly", noted)
    world.runner.prefill([(world.words(7), first), (world.words(5), second)])
    layers = len(seen)
    assert seen == [2] * layers
    assert 0 < layers <= len(first.token_layers)
    world.runner.prefill([(world.words(3), first), (world.words(9), late)])
    world.runner.prefill([(world.words(4), each) for each in (first, second, late)])
    assert seen[layers:] == [2] * layers + [3] * layers


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("llama", [9]),
        ("llama", [9, 8, 7]),  # read jointly
        ("llama", [BLOCK + 9, 8]),  # and row by row
        ("gpt_oss", [9, 8]),  # with sliding layers, which are
        ("qwen3_next", [9]),  # or recurrent ones
    ],
)
def test_layers_are_launched_as_equal_graphs(
    name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch a layer, all but the first with as many operations; and the same is computed."""
    # SiLU's gates are waited for: what is counted after a launch is then not half evaluated.
    device = replace(device_policy(), launches_layers=True, host_gates=0)
    more: dict[str, Any] = {"num_hidden_layers": LAYERS} if name == "llama" else {}
    world = BatchFixture(name, device=device, **more)
    branch = world.branch(40)
    launched, usual = ([world.come(branch).cache for _ in lengths] for _ in range(2))
    chunks = [world.words(length) for length in lengths]
    counts: list[int] = []
    with monkeypatch.context() as patch:
        for module in (binding, gated_delta):
            patch.setattr(module, "launch", partial(_count, counts))
        world.runner.prefill(list(zip(chunks, launched, strict=True)))
    assert len(counts) == len(world.model.layers)
    first, *others = counts
    assert 0 < first < min(others)
    if name == "llama":  # other layers are of two kinds
        assert set(others) == {max(others)}
    prepare(world.model, replace(device_policy(), host_gates=0))
    world.runner.prefill(list(zip(chunks, usual, strict=True)))
    for one, other in zip(launched, usual, strict=True):
        for mine, theirs in zip(state(one), state(other), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def _count(found: list[int], queries: mx.array) -> None:
    found.append(operations(queries))
    launch(queries)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "gemma2"])
def test_steps_are_launched_by_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each layer, in the batch and alone; and the same is computed."""
    more: dict[str, Any] = {"num_hidden_layers": LAYERS} if name == "llama" else {}
    # Where gates are waited for, all before them is computed by then.
    world = BatchFixture(name, device=replace(AS_GPU, host_gates=0), **more)
    agents = [world.come(world.branch(40), 1) for _ in range(2)]
    calls = _counted_in_turn(monkeypatch)
    world.decode(agents, steps=2)
    world.decode(agents[:1], steps=2)
    world.check()
    assert [len(counts) for counts in calls] == [len(world.model.layers)] * 4
    assert all(min(counts) > 0 for counts in calls)
    if name == "llama":  # whose layers are of one kind: one graph serves all but the first
        assert all(len(set(counts[1:])) == 1 for counts in calls[1::2])  # with nothing to move


def _counted_in_turn(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Count the operations of each launch of each step from here on."""
    found: list[list[int]] = []
    for module in (batch_cache, runner):
        monkeypatch.setattr(module, "launch_in_turn", partial(_count_in_turn, found))
    return found


def _count_in_turn(found: list[list[int]], layers: Sequence[Any]) -> None:
    found.append([])

    def launched(arrays: Any) -> None:
        found[-1].append(operations(*arrays))
        launch(arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "launch", launched)
        launch_in_turn(layers)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_keys_in_one_piece_stay_so(name: str) -> None:
    """Who has a copy of its prefix writes to that, beside others who have none."""
    world = BatchFixture(name)
    branch = world.branch(40)
    joined, alone = ([world.come(branch).cache for _ in range(2)] for _ in range(2))
    joined[0].make_contiguous()
    chunks = [world.words(length) for length in (4, 9)]
    world.runner.prefill(list(zip(chunks, joined, strict=True)))
    for tokens, cache in zip(chunks, alone, strict=True):
        world.runner.prefill([(tokens, cache)])
    assert joined[0].is_contiguous
    for one, other in zip(joined, alone, strict=True):
        logits = [world.model(mx.array([[3]]), cache=each.layers) for each in (one, other)]
        assert mx.abs(logits[0] - logits[1]).max() < TOLERANCE


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_who_cannot_is_found_out(name: str) -> None:
    """A model that would give other state, or fail, is never asked for several prompts at once."""
    assert not BatchFixture(name).runner.prefills_together


@pytest.mark.parametrize("name", ["llama4", "mamba2"])
def test_layers_that_compute_one_prompt_a_call_say_so(name: str) -> None:
    """What is tried nevertheless raises, and says why."""
    world = BatchFixture(name)
    caches = [world.come().cache for _ in range(2)]
    with pytest.raises(NotBatchableError, match="computed one by one"):
        prefill(world.model, [([1, 2], cache) for cache in caches], CPU)


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(
    ("lengths", "multiple"),
    [([40, 33], 1), ([40, 33, 26, 19, 12], 1), ([9, 7, 5, 3, 1], 128)],
)
def test_it_takes_no_more_than_planned(name: str, lengths: list[int], multiple: int) -> None:
    """The allocator's peak is within the plan's cost, which is not several times as much."""
    world = BatchFixture(name, device=padding(multiple))
    branch = world.branch(300)
    caches = [world.come(branch).cache for _ in lengths]
    chunks = [(world.words(length), cache) for length, cache in zip(lengths, caches, strict=True)]
    plan = world.runner.plan([], list(zip(caches, lengths, strict=True)))
    price = world.runner.cost(plan).nbytes
    mx.clear_cache()
    before = resident_bytes()
    mx.reset_peak_memory()
    world.runner.prefill(chunks)
    peak = mx.get_peak_memory() - before
    assert peak <= price < 4 * peak


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_suffixes_that_grow_are_priced_and_teach_nothing_odd(name: str) -> None:
    """A second call over what a first one left takes no more than planned, layer by layer."""
    world = BatchFixture(name)
    caches = [world.come().cache for _ in range(4)]
    chunk = PlannedChunk(8, 100, 8)
    before = world.runner.profile.prefill([chunk] * 4).nbytes
    for tokens in (3, 1, 40, 2):
        plan = world.runner.plan([], [(cache, tokens) for cache in caches])
        price = world.runner.cost(plan).nbytes
        chunks = [(world.words(tokens), cache) for cache in caches]
        mx.clear_cache()
        held = resident_bytes()
        mx.reset_peak_memory()
        world.runner.prefill(chunks)
        assert mx.get_peak_memory() - held <= price
    assert world.runner.profile.prefill([chunk] * 4).nbytes < 1.5 * before


def test_what_was_fetched_is_freed_layer_by_layer() -> None:
    """Keys of a prefix that are put in one piece for a layer go before the next layer's are."""
    world = BatchFixture("llama", num_hidden_layers=12)
    branch = world.branch(2000)
    caches = [world.come(branch).cache for _ in range(2)]
    prefixes = 2 * sum(span.nbytes for span in branch.spans)
    before = resident_bytes()
    mx.reset_peak_memory()
    world.runner.prefill([(world.words(8), cache) for cache in caches])
    assert mx.get_peak_memory() - before < prefixes / 2


def far_apart(world: BatchFixture, lengths: list[int]) -> list[SequenceCache]:
    """Open sequences that lease so many tokens each, which none of the others leases."""
    return [world.come(world.branch(length)).cache for length in lengths]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llama", 30), ("deepseek_v3", 30), ("deepseek_v3", BLOCK + 20)],
)
def test_who_reads_far_more_alone_than_others(name: str, tokens: int) -> None:
    """What it reads is no padding of theirs; all have the state that they have alone."""
    world = BatchFixture(name)
    before = [900, 0, 40, 0, 700]
    branches = [world.branch(length) for length in before]
    joined, alone = ([world.come(branch).cache for branch in branches] for _ in range(2))
    chunks = [world.words(tokens - row) for row in range(len(before))]
    world.runner.prefill(list(zip(chunks, joined, strict=True)))
    for chunk, cache in zip(chunks, alone, strict=True):
        world.runner.prefill([(chunk, cache)])
    hold_the_same(joined, alone)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(
    ("before", "tokens"),
    [
        ([2000, 0, 0, 0], BLOCK),
        ([2000, *[0] * 7], 40),
        ([1200, 0], BLOCK),
        ([1200, 1000, 1100], 30),
        ([1200, 0], 2 * BLOCK - 6),
    ],
)
def test_what_rows_read_alone_is_priced(name: str, before: list[int], tokens: int) -> None:
    """Also where it is of very different lengths, or rows are longer than what is read jointly."""
    world = BatchFixture(name)
    caches = far_apart(world, before)
    chunks = [(world.words(tokens), cache) for cache in caches]
    plan = world.runner.plan([], [(cache, tokens) for cache in caches])
    price = world.runner.cost(plan).nbytes
    mx.clear_cache()
    held = resident_bytes()
    mx.reset_peak_memory()
    world.runner.prefill(chunks)
    assert mx.get_peak_memory() - held <= price


def test_padding_is_not_expanded_for_all() -> None:
    """Who reads 2,000 tokens alone makes a call of eight take no more than some times as much."""
    world = BatchFixture("deepseek_v3")
    found = []
    for caches in ([far_apart(world, [2000])[0]], far_apart(world, [2000, *[0] * 7])):
        chunks = [(world.words(40), cache) for cache in caches]
        mx.clear_cache()
        held = resident_bytes()
        mx.reset_peak_memory()
        world.runner.prefill(chunks)
        found.append(mx.get_peak_memory() - held)
    assert found[1] < 2.5 * found[0]
