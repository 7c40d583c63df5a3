"""Exact serving (L3): same request, same bits, whatever else runs and whatever is cached."""

import numpy as np
import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.models.backends import choose
from umbel.models.params import SamplingParams

from .. import zoo
from .bench import CHUNK, Ask, Bench, Outcome, words

SYSTEM = 2 * CHUNK + 22
SEEDED = SamplingParams(seed=7, temperature=1.0, top_p=0.95)


def request(*, at: int = 0, sampling: SamplingParams = SEEDED) -> Ask:
    """Ask what is asked under all circumstances."""
    prompt = [*words(SYSTEM, "system"), *words(CHUNK + 9, "question")]
    return Ask(prompt, 24, at=at, sampling=sampling, boundaries=[(SYSTEM, Reason.SYSTEM)])


def others(count: int) -> list[Ask]:
    """Agents with the same system prompt, and with none, that come and go."""
    return [
        Ask(
            [*words(SYSTEM if i % 3 else 0, "system"), *words(11 + 17 * i, f"other {i}")],
            9 + 5 * i,
            at=3 * i,
            boundaries=[(SYSTEM, Reason.SYSTEM)] if i % 3 else [],
        )
        for i in range(count)
    ]


def same(a: Outcome, b: Outcome) -> bool:
    """Return True if two answers and all their log-probabilities agree bit by bit."""
    return a.tokens == b.tokens and np.array_equal(np.array(a.logprobs), np.array(b.logprobs))


@pytest.mark.parametrize("name", [*zoo.NAMES, *zoo.QUANTIZED])
def test_a_crowd_changes_nothing(name: str) -> None:
    """Alone or among ten that join and leave, a request has the same log-probabilities."""
    (alone,) = Bench(name, exact=True).run_together([request()])
    crowded = Bench(name, exact=True).run_together([*others(5), request(at=4), *others(5)])
    assert same(alone, crowded[5])


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "deepseek_v3"])
def test_a_crowd_changes_nothing_on_the_metal_path(name: str) -> None:
    """The same of MLX's operations alone."""
    metal = choose("metal")
    (alone,) = Bench(name, exact=True, device=metal).run_together([request()])
    crowded = Bench(name, exact=True, device=metal).run_together([request(), *others(4)])
    assert same(alone, crowded[0])


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.nightly) if n in zoo.TWINS else n for n in zoo.NAMES),
        *zoo.QUANTIZED,
    ],
)
def test_what_is_cached_changes_nothing(name: str) -> None:
    """Cold, over a shared system prompt, and repeated: the same bits, and yet less computed."""
    (cold,) = Bench(name, exact=True).run_together([request()])
    bench = Bench(name, exact=True)
    bench.run_together(others(3))
    (shared,) = bench.run_together([request()])
    (repeated,) = bench.run_together([request()])
    assert shared.cached == 2 * CHUNK
    assert repeated.cached == 3 * CHUNK
    assert cold.cached == 0
    assert same(cold, shared)
    assert same(cold, repeated)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "deepseek_v3"])
def test_a_later_turn_is_as_if_it_were_the_first(name: str) -> None:
    """A turn over its own history has the bits of the same prompt sent to a fresh daemon."""
    bench = Bench(name, exact=True)
    (first,) = bench.run_together([request()])
    turn = Ask([*first.history, *words(40, "next")], 12)
    (later,) = bench.run_together([turn])
    (fresh,) = Bench(name, exact=True).run_together([turn])
    assert later.cached == 3 * CHUNK
    assert same(later, fresh)


def test_rows_that_cannot_be_apart_decode_one_by_one() -> None:
    """A model that attends to all rows at once batches, but not where rows must be exact."""
    assert Bench("gemma2").runner.batches
    exact = Bench("gemma2", exact=True).runner
    assert not exact.batches
    assert "attend each by itself" in (exact.one_by_one or "")


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_exact_answers_are_right(name: str) -> None:
    """Exactness does not cost truth: the answers are those of mlx-lm's own cold run."""
    bench = Bench(name, exact=True)
    greedy = SamplingParams(seed=0, temperature=0.0)
    outcomes = bench.run_together([*others(4), request(sampling=greedy)])
    for outcome in outcomes:
        assert bench.difference(outcome) < 1e-3


def test_short_prompts_are_not_kept() -> None:
    """A prompt shorter than the grid leaves nothing behind, and is answered alike."""
    bench = Bench("llama", exact=True)
    ask = Ask(words(CHUNK - 5, "short"), 8)
    (first,) = bench.run_together([ask])
    (again,) = bench.run_together([ask])
    assert again.cached == 0
    assert bench.cache.tries.size.nbytes == 0
    assert same(first, again)
