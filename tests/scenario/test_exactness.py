"""L2 of the exactness levels, in fp32, over every kind of stack; L1 is in test_sequence_cache."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umbel.cachestore.checkpoints import FINAL_AFTER
from umbel.models.backends import choose

from .. import zoo
from .bench import Ask, Bench, words
from .conversations import SCENARIOS, Scenario, fork_in_an_answer, tool_turns

TOLERANCE = 3e-4
"""Largest |Δ log p| against a cold run; fp32 rounding in another order of summation."""


DOC = Path(__file__).parents[2] / "docs" / "internals" / "exactness.md"


def test_the_table_is_complete() -> None:
    """docs/internals/exactness.md has a figure for every model, within the tested bound."""
    rows = re.findall(
        r"^\| (\w+) \| \w+ \| \d+ \| \d+ \| ([\d.e+-]+) \|$", DOC.read_text(), re.MULTILINE
    )
    assert [name for name, _ in rows] == list(zoo.NAMES)
    assert all(float(figure) < TOLERANCE for _, figure in rows)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in zoo.TWINS else ()) for n in zoo.NAMES]
)
def test_every_architecture_answers_like_mlx_lm(name: str) -> None:
    """In a batch of six that join and leave, in follow-ups over restored state, and evicted."""
    bench = Bench(name)
    system = words(150, "system")
    asks = [
        Ask([*system, *words(5 + 23 * i, i)], 10 + 7 * (i % 4), at=3 * (i % 3)) for i in range(6)
    ]
    first = bench.run_together(asks)
    assert bench.runner.batches
    assert bench.runner.one_by_one is None
    assert max(bench.runner.rows) > 3
    turns = [Ask([*outcome.history, *words(40, outcome.prompt)], 12) for outcome in first[::2]]
    restored = bench.run_together(turns)
    assert all(outcome.cached > 100 for outcome in restored)
    bench.cache.evict(bench.cache.tries.size.nbytes // 2)
    again = bench.run_together([asks[1], *turns])
    bench.cache.evict(0)
    cold = bench.run_together(turns[:1])
    assert cold[0].cached == 0
    for outcome in (*first, *restored, *again, *cold):
        assert bench.difference(outcome) < TOLERANCE


_SLOW = ("deepseek_v3", "gpt_oss", "llama4")


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        pytest.param(*pair, marks=pytest.mark.slow if pair[0] in _SLOW else ())
        for pair in zoo.each(SCENARIOS, once=())
    ],
    ids=lambda of: getattr(of, "__name__", None),
)
def test_restored_equals_cold(name: str, scenario: Scenario) -> None:
    """Over any restored prefix a request gets the tokens and log-probs of a cold run (L2)."""
    bench = Bench(name)
    for outcome, matched, at_least in scenario(bench):
        # A stack that keeps no spans forgets the few tokens after its last checkpoint.
        forgotten = 0 if bench.spans else matched - outcome.matched
        assert 0 <= forgotten < FINAL_AFTER
        assert outcome.matched == matched - forgotten
        expected = at_least if bench.exact else min(matched, len(outcome.prompt) - 1)
        assert outcome.cached >= min(expected, outcome.matched)
        assert bench.difference(outcome) < TOLERANCE


@pytest.mark.parametrize("scenario", [fork_in_an_answer, tool_turns])
@pytest.mark.parametrize("name", zoo.one_of_each_kind())
def test_restored_equals_cold_on_the_metal_path(name: str, scenario: Scenario) -> None:
    """MLX's operations alone, which is what a Mac runs: a model of each kind of state."""
    bench = Bench(name, device=choose("metal"))
    for outcome, _, _ in scenario(bench):
        assert bench.difference(outcome) < TOLERANCE


UNEQUAL = (3, 250, 11, 120, 5, 64, 200, 37)
"""Tokens of prompts that come at once: the longest has eighty times as many as the shortest."""


def _unequal() -> Iterator[Any]:
    for name in (*zoo.NAMES, *zoo.UNTOLD):
        for seed in range(3):
            often = name in zoo.UNTOLD or seed == 0
            yield pytest.param(name, seed, marks=() if often else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "seed"), list(_unequal()))
def test_unequal_prompts_at_once_and_then_alone(name: str, seed: int) -> None:
    """Prompts of very unequal length get the answers of cold runs, and so do their repeats.

    A wrong state would be stored, and given to requests that come later and alone.
    """
    bench = Bench(name, seed=seed, prefill_chunk=1024)
    prompts = [words(length, f"unequal {seed} {length}") for length in UNEQUAL]
    together = bench.run_together([Ask(prompt, 6) for prompt in prompts])
    alone = [bench.run(prompt, 6) for prompt in prompts]
    for outcome in (*together, *alone):
        assert bench.difference(outcome) < TOLERANCE
    assert sum(outcome.cached for outcome in alone) > 0


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gemma3_text", "gpt_oss", "llama4"])
def test_follow_up_resumes_inside_the_answer(name: str) -> None:
    """The figure that decode checkpoints were made for: 96 matched, 94 cached, not 30.

    Ollama's PR #15914 measured `matched=96 cached=30` before and `cached=94` after.
    """
    bench = Bench(name)
    prompt = words(31, "prompt")
    first = bench.run(prompt, 120)
    assert (first.matched, first.cached) == (0, 0)
    follow_up = bench.run([*first.history[:96], *words(334, "rewritten")], 16)
    assert (len(follow_up.prompt), follow_up.matched, follow_up.cached) == (430, 96, 94)
    assert bench.difference(follow_up) < TOLERANCE


def test_no_decode_checkpoints_without_need() -> None:
    """A stack of token-addressable layers only pays for no checkpoint at all."""
    bench = Bench("llama")
    bench.run(words(300, "prompt"), 150)
    assert bench.cache.tries.statistics().checkpoints == 0


@pytest.mark.parametrize("kept", [0, pytest.param(1, marks=pytest.mark.slow), 4])
def test_few_checkpoints_stay(kept: int) -> None:
    """One request leaves behind no more checkpoints than it may."""
    bench = Bench("qwen3_next", kept=kept)
    bench.run(words(600, "prompt"), 300)
    assert bench.cache.tries.statistics().checkpoints == kept


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "mamba2"])
def test_answers_stay_right_under_pressure(name: str) -> None:
    """With room for about one conversation, many of them still get exact answers."""
    probe = Bench(name)
    probe.run(words(200, "size"), 8)
    bench = Bench(name, budget=int(1.2 * probe.cache.tries.size.nbytes))
    for turn in range(3):
        for agent in range(4):
            prompt = [*words(90, "system"), *words(60 + 30 * turn, agent)]
            outcome = bench.run(prompt, 8)
            assert bench.difference(outcome) < TOLERANCE
            assert bench.cache.tries.size.nbytes <= bench.cache.budget
    assert bench.cache.tries.statistics().evictions > 0
