"""Quantised keys and values: requests in a batch are answered as mlx-lm answers each alone."""

import numpy as np
import pytest

from umbel.cachestore.checkpoints import Reason

from .. import zoo
from .bench import Ask, Bench, Outcome, words

SYSTEM = 96
NEAR = 0.5
"""Log-probabilities that are no further apart may change places where rounding puts a number
of a key on its other level; mlx-lm's own do, see `zoo.ROUNDED`."""

every_kind = pytest.mark.parametrize("name", zoo.QUANTIZED)


def asks(count: int) -> list[Ask]:
    """Requests of one system prompt, and one that has another."""
    made = [
        Ask(
            [*words(SYSTEM, "system"), *words(5 + 17 * i, f"user {i}")],
            24,
            boundaries=[(SYSTEM, Reason.SYSTEM)],
        )
        for i in range(count)
    ]
    if count > 1:
        made[-1].prompt = words(60, "another")
        made[-1].boundaries = []
    return made


def check(bench: Bench, outcome: Outcome) -> None:
    """Hold an answer to mlx-lm's own loop over the same tokens."""
    cold = bench.cold(outcome.prompt, outcome.tokens)
    assert len(outcome.tokens) == len(outcome.logprobs) == len(cold.logprobs) == 24
    differences = np.abs(np.array(outcome.logprobs) - np.array(cold.logprobs))
    assert differences.mean() < zoo.ROUNDED  # and no NaN
    for token, logprobs in zip(outcome.tokens, cold.logprobs, strict=True):
        assert logprobs.max() - logprobs[token] < NEAR


@every_kind
@pytest.mark.parametrize("count", range(1, 7))
def test_together_as_mlx_lm_alone(name: str, count: int) -> None:
    """From one to six at once, some of whom share their prompt: greedy tokens are mlx-lm's."""
    bench = Bench(name)
    outcomes = bench.run_together(asks(count))
    for outcome in outcomes:
        check(bench, outcome)
    assert bench.runner.batches
    assert max(bench.runner.rows) == count
    assert [o.cached for o in outcomes[:-1]] == [0, *[SYSTEM] * (count - 2)][: count - 1]


@every_kind
def test_what_was_kept_is_read_again(name: str) -> None:
    """A conversation goes on over its stored state, and over one that parts from it."""
    bench = Bench(name)
    (first,) = bench.run_together(asks(1))
    follow_up = bench.run([*first.history, *words(9, "next")], 24)
    assert follow_up.cached == len(first.history) - 1
    parted = bench.run([*first.history[:60], *words(30, "rewritten")], 24)
    assert parted.cached == 60
    for outcome in (first, follow_up, parted):
        check(bench, outcome)
