"""The zoo: what its models promise to the tests that use them, and what mlx-lm makes of them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, make_prompt_cache

from .. import zoo

PROMPT_LENGTH = 300
"""Nine windows and a piece, so that what is far is beyond every window."""
PERTURBED = 11
GRID = 64
STEPS = 64

# Leaf cache classes, layer by layer, with one entry for each cache, not for each layer: the
# last two layers of gemma3n and gemma4_text have none of their own.
_SLIDING = ["RotatingKVCache", "KVCache"] * 2
_HYBRID = ["ArraysCache", "KVCache"] * 2
LEAVES = {
    "llama": ["KVCache"] * 2,
    "qwen3": ["KVCache"] * 4,
    "deepseek_v3": ["KVCache"] * 3,
    "deepseek_v32": ["KVCache", "KVCache"] * 3,  # pairs: latents, index keys
    "glm4_moe_lite": ["KVCache"] * 3,
    "longcat_flash": ["KVCache", "KVCache"] * 2,  # pairs: two attentions a layer
    "kimi_linear": _HYBRID,
    "gemma2": ["KVCache"] * 4,
    "gemma3_text": _SLIDING,
    "gemma3n": _SLIDING,
    "gemma4_text": _SLIDING,
    "gpt_oss": _SLIDING,
    "mamba2": ["ArraysCache"] * 3,
    "mamba": ["ArraysCache"] * 3,
    "plamo2": _HYBRID,
    "falcon_h1": ["ArraysCache", "KVCache"] * 3,  # pairs
    "lfm2": _HYBRID,
    "qwen3_5": _HYBRID,
    "qwen3_next": _HYBRID,
    "llama4": ["ChunkedKVCache"] * 3 + ["KVCache"],
}
IN_LISTS = {"deepseek_v32", "longcat_flash", "falcon_h1"}
"""Models whose layers keep their leaves in a CacheList."""
WITH_STATE = ("mamba2", "mamba", "plamo2", "falcon_h1", "qwen3_5", "qwen3_next")
"""Models whose first layer carries a recurrent state; lfm2's keeps two tokens."""

Array = np.ndarray[Any, np.dtype[np.float32]]

every_name = pytest.mark.parametrize("name", zoo.NAMES)


@dataclass(frozen=True)
class Run:
    """A prefill and the greedy answer to it.

    Attributes:
        logits: [V] after the prompt.
        states: of the recurrent layers after the prompt.
        answer: the tokens chosen.
        gaps: by how much each of them won.
    """

    logits: Array
    states: list[Array]
    answer: list[int]
    gaps: list[float]


@functools.cache
def model(name: str) -> Any:
    """Build each model once; its arrays belong to the main thread."""
    return zoo.make(name)


def prompt(*, perturbed: bool = False) -> list[int]:
    """Draw the prompt, or the one that differs from it in the first few tokens."""
    tokens: list[int] = np.random.default_rng(1).integers(0, zoo.VOCAB_SIZE, PROMPT_LENGTH).tolist()
    shift = 7 if perturbed else 0
    return [(t + shift) % zoo.VOCAB_SIZE for t in tokens[:PERTURBED]] + tokens[PERTURBED:]


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Take cache lists apart."""
    found = []
    for cache in caches:
        found += leaves(cache.caches) if isinstance(cache, CacheList) else [cache]
    return found


@functools.cache
def run(name: str, *, perturbed: bool = False, step: int = PROMPT_LENGTH) -> Run:
    """Prefill the prompt in pieces of `step` tokens and answer it greedily."""
    net, tokens = model(name), prompt(perturbed=perturbed)
    caches = make_prompt_cache(net)
    for start in range(0, len(tokens), step):
        output = net(mx.array([tokens[start : start + step]]), cache=caches)
        mx.eval(output, [cache.state for cache in caches])
    states = [
        np.array(leaf[1])
        for leaf in leaves(caches)
        if type(leaf).__name__ == "ArraysCache" and len(leaf.cache) > 1
    ]
    first = logits = np.array(output[0, -1])
    answer, gaps = [], []
    for _ in range(STEPS):
        second, best = np.partition(logits, -2)[-2:]
        answer.append(int(logits.argmax()))
        gaps.append(float(best - second))
        logits = np.array(net(mx.array([[answer[-1]]]), cache=caches)[0, -1])
    return Run(first, states, answer, gaps)


def test_every_model_has_a_kind_and_a_row_in_the_table() -> None:
    """Names, kinds and expected caches speak of the same models, and all kinds occur."""
    assert set(zoo.NAMES) == set(zoo.KINDS) == set(LEAVES)
    assert set(zoo.KINDS.values()) == {
        "dense",
        "mla",
        "capped",
        "sliding",
        "sinks",
        "recurrent",
        "hybrid",
        "chunked",
    }


@every_name
def test_mlx_lm_makes_the_caches_that_we_know(name: str) -> None:
    """An upgrade of mlx-lm that changes a model's caches fails here, by name."""
    caches = make_prompt_cache(model(name))
    assert [type(leaf).__name__ for leaf in leaves(caches)] == LEAVES[name]
    assert {isinstance(cache, CacheList) for cache in caches} == {name in IN_LISTS}


@every_name
def test_windows_and_chunks_are_short_enough_to_wrap(name: str) -> None:
    """Every bounded cache keeps 32 tokens, so the prompts of the tests wrap it."""
    for leaf in leaves(make_prompt_cache(model(name))):
        if type(leaf).__name__ == "RotatingKVCache":
            assert leaf.max_size == zoo.WINDOW
        if type(leaf).__name__ == "ChunkedKVCache":
            assert leaf.chunk_size == zoo.WINDOW


@every_name
def test_weights_are_fp32_and_decided_by_the_seed(name: str) -> None:
    """The same seed gives the same weights, another seed gives others, all of them fp32."""
    first, again, other = (
        dict(tree_flatten(net.parameters()))
        for net in (model(name), zoo.make(name), zoo.make(name, seed=1))
    )
    assert {value.dtype for value in first.values()} == {mx.float32}
    # Holds for gemma3n too, whose runner pass clips two of its weights in place: far from these.
    assert all(mx.array_equal(first[path], again[path]) for path in first)
    assert not all(mx.array_equal(first[path], other[path]) for path in first)


def test_overrides_reach_flat_and_nested_configs() -> None:
    """An override changes the text config wherever the model keeps it."""
    assert len(model("llama").layers) != len(zoo.make("llama", num_hidden_layers=3).layers) == 3
    llama4 = make_prompt_cache(zoo.make("llama4", attention_chunk_size=16))
    assert llama4[0].chunk_size == 16


@every_name
def test_answers_are_far_from_rounding(name: str) -> None:
    """The best token leads by much more than the error of fp32, so greedy tests cannot flake."""
    gaps = run(name).gaps
    assert np.median(gaps) > 0.05
    assert min(gaps) > 1e-4


@every_name
def test_answers_wander(name: str) -> None:
    """No answer collapses into a few repeated tokens, which would hide a broken cache."""
    assert len(set(run(name).answer)) >= 16


@every_name
def test_answers_depend_on_the_distant_past(name: str) -> None:
    """Other first tokens change the logits 289 tokens later, and the greedy answer."""
    near, far = run(name), run(name, perturbed=True)
    assert np.abs(near.logits - far.logits).max() > 1e-2
    assert near.answer != far.answer


@pytest.mark.parametrize("name", WITH_STATE)
def test_recurrent_states_remember(name: str) -> None:
    """The first layer's state, which sees nothing but its input, still holds the difference."""
    near, far = run(name).states[0], run(name, perturbed=True).states[0]
    assert np.abs(near - far).max() > 1e-2 * np.abs(near).max()


@every_name
def test_prefill_in_pieces_equals_prefill_at_once(name: str) -> None:
    """Where a prompt is cut on the grid changes the logits by rounding only, and no token."""
    whole, pieces = run(name), run(name, step=GRID)
    np.testing.assert_allclose(pieces.logits, whole.logits, rtol=0, atol=1e-3)
    assert pieces.answer[:32] == whole.answer[:32]
