"""Real conversations of many turns: few segments, the same bytes, and a cold run's tokens."""

import math
import random
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.node import as_tokens
from umbel.cachestore.tries import Namespace
from umbel.models.kv.spans import PackedSpan

from .bench import Bench, words

COMPARED = (0, 24, 99)  # turns whose answer is held to that of a cold run
TOLERANCE = 1e-3


def spans_of(bench: Bench, tokens: list[int]) -> list[PackedSpan]:
    """The state of all that is known of some tokens, in order."""
    trie = bench.cache.tries.get(Namespace("t"))
    assert trie is not None
    spans = [node.span for node in trie.match(as_tokens(tokens)).node.path()]
    assert all(isinstance(span, PackedSpan) for span in spans)
    return [span for span in spans if isinstance(span, PackedSpan)]


def read(spans: list[PackedSpan]) -> list[NDArray[np.generic]]:
    """Put state together, array by array."""
    packed = zip(*[span.arrays for span in spans], strict=True)
    return [np.array(mx.concatenate(list(parts), axis=-2)) for parts in packed]


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        pytest.param("llama", 100, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 50, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 25, marks=pytest.mark.slow),
        ("llama", 12),
    ],
)
def test_many_turns(name: str, turns: int) -> None:
    """Each turn's state stays as it was computed, however often it is moved."""
    bench, rng = Bench(name), random.Random(name)  # noqa: S311  (not a secret)
    history: list[int] = words(150, "system")
    before: list[NDArray[np.generic]] = []
    for turn in range(turns):
        start = len(history)
        prompt = [*history, *words(rng.choice([5, 9, 60]), f"message {turn}")]
        borders = [(start, Reason.MESSAGE), (len(prompt) - 3, Reason.MESSAGE)]
        outcome = bench.run(prompt, rng.choice([3, 4, 20]), borders)
        assert turn == 0 or outcome.cached >= start - 1 - bench.exact * 24
        if turn in COMPARED:
            assert bench.difference(outcome) < TOLERANCE
        history = outcome.history
        spans = spans_of(bench, history)
        after = read(spans)
        for old, new in zip(before, after, strict=False):
            assert np.array_equal(old, new[..., : old.shape[-2], :])
        before = after
        tokens = sum(span.length for span in spans)
        segments = 1 + sum(not a.adjoins(b) for a, b in pairwise(spans))
        assert segments <= 2 + math.log2(max(1, tokens / 256)), turn
