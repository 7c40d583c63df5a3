"""Chunks of prompts: what follows the last one, how they are launched, and what they take."""

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

from umbel.models import runner, runtime
from umbel.models.attention import binding
from umbel.models.backends import base
from umbel.models.backends.cpu import CPU
from umbel.models.backends.prepare import prepare
from umbel.models.kv import batch_cache
from umbel.models.kv.sequence_cache import SequenceCache, flat_arrays
from umbel.models.runtime import launch, launch_in_turn, resident_bytes

from ..shared import AS_GPU
from .batch_fixture import NAMES, TOLERANCE, BatchFixture

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts, and no package
from recorder import operations

LAYERS = 6


def state(cache: SequenceCache) -> list[np.ndarray]:
    """All that a sequence has of its own."""
    return [
        np.array(array.astype(mx.float32) if array.dtype != mx.uint32 else array)
        for array in flat_arrays([*cache.suffix(), [x.state for x in cache.non_trimmable]])
    ]


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_layers_are_launched_as_equal_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch a layer, all but the first with as many operations; and the same is computed."""
    # SiLU's gates are waited for: what is counted after a launch is then not half evaluated.
    device = replace(CPU, launches_layers=True, host_gates=0)
    more: dict[str, Any] = {"num_hidden_layers": LAYERS} if name == "llama" else {}
    world = BatchFixture(name, device=device, **more)
    branch = world.branch(40)
    launched, usual = (world.come(branch).cache for _ in range(2))
    tokens = world.words(9)
    counts: list[int] = []
    with monkeypatch.context() as patch:
        for module in (binding, base):
            patch.setattr(module, "launch", partial(_count, counts))
        world.runner.prefill(tokens, launched)
    assert len(counts) == len(world.model.layers)
    first, *others = counts
    assert 0 < first < min(others)
    if name == "llama":  # other layers are of two kinds
        assert set(others) == {max(others)}
    prepare(world.model, replace(CPU, host_gates=0))
    world.runner.prefill(tokens, usual)
    for mine, theirs in zip(state(launched), state(usual), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def _count(found: list[int], queries: mx.array) -> None:
    found.append(operations(queries))
    launch(queries)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "gemma2"])
def test_steps_are_launched_by_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each layer, in the batch and alone; and the same is computed."""
    more: dict[str, Any] = {"num_hidden_layers": LAYERS} if name == "llama" else {}
    # Where gates are waited for, all before them is computed by then.
    world = BatchFixture(name, device=AS_GPU, **more)
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


@pytest.mark.parametrize("name", [*NAMES, "llama_kv4"])
def test_the_last_chunk_gives_what_follows(name: str) -> None:
    """The logits are those of the whole call's last token, and so is the state."""
    world = BatchFixture(name)
    branch = world.branch(40)
    for tokens in (1, 9, 70):
        words = world.words(tokens)
        one, other = (world.come(branch).cache for _ in range(2))
        found = world.runner.complete(words, one)
        expected = world.model(mx.array([words]), cache=other.layers)[:, -1]
        other.add_tokens(tokens)
        assert found.logits is not None
        assert found.logits.shape == expected.shape
        assert mx.abs(found.logits - expected).max() < TOLERANCE
        assert (one.offset, one.suffix_length) == (other.offset, other.suffix_length)
        for mine, theirs in zip(state(one), state(other), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_head_that_is_not_known_computes_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer within the model has the name of one: the trial finds out, and chunks are short."""
    monkeypatch.setattr("umbel.models.backends.prepare._HEADS", ("q_proj",))
    world = BatchFixture("llama", tie_word_embeddings=False)
    assert world.runner.max_completing == 16
    words = world.words(9)
    one, other = (world.come().cache for _ in range(2))
    expected = world.model(mx.array([words]), cache=other.layers)[:, -1]
    logits = world.runner.complete(words, one).logits
    assert logits is not None
    assert mx.array_equal(logits, expected)


@pytest.mark.parametrize("name", [*NAMES, "llama_kv4"])
@pytest.mark.parametrize("completes", [False, True])
def test_it_takes_no_more_than_planned(name: str, *, completes: bool) -> None:
    """The allocator's peak is within the plan's cost, call after call."""
    world = BatchFixture(name)
    cache = world.come(world.branch(300)).cache
    for tokens in (40, 3, 1, 33):
        plan = world.runner.plan([], (cache, tokens), completes=completes)
        price = world.runner.cost(plan).nbytes
        words = world.words(tokens)
        mx.clear_cache()
        before = resident_bytes()
        mx.reset_peak_memory()
        if completes:
            world.runner.complete(words, cache)
        else:
            world.runner.prefill(words, cache)
        assert mx.get_peak_memory() - before <= price


def test_what_was_fetched_is_freed_layer_by_layer() -> None:
    """Keys of a prefix that are put in one piece for a layer go before the next layer's are."""
    world = BatchFixture("llama", num_hidden_layers=12)
    branch = world.branch(2000)
    cache = world.come(branch).cache
    prefix = sum(span.nbytes for span in branch.spans)
    before = resident_bytes()
    mx.reset_peak_memory()
    world.runner.prefill(world.words(8), cache)
    assert mx.get_peak_memory() - before < prefix / 2
