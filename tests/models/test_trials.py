"""Sequences that a model is tried out with: they go on from what was computed once."""

from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.backends import choose
from umbel.models.backends.prepare import prepare
from umbel.models.kv.layout import CacheLayout
from umbel.models.load.trials import NEIGHBOURS, PROBED, Trial, Trials

from .. import zoo
from ..scenario.memory_tools import zoo_model

_TOKENS = [*range(1, 9)]


def logits_after(trials: Trials, trial: Trial) -> list[mx.array]:
    """The logits of each sequence for some more tokens, which change its state."""
    return [trials.forward(cache, _TOKENS) for cache in trials.prefilled(trial)]


@pytest.mark.parametrize("name", [*zoo.NAMES, "llama_kv8"])
def test_each_time_they_have_the_state_that_their_prompts_leave(name: str) -> None:
    """Sequences that were prefilled before have continued."""
    loaded = zoo_model(name)
    prepare(loaded.model, choose())
    trials = Trials(loaded.model, loaded.layout)
    trial = NEIGHBOURS[1][1]
    first, _, again = [logits_after(trials, each) for each in (trial, PROBED, trial)]
    for prompt, one, other in zip(trial.prompts(), first, again, strict=True):
        cache = loaded.layout.open()
        trials.forward(cache, prompt)
        expected = trials.forward(cache, _TOKENS)
        assert mx.array_equal(one, other)
        assert mx.allclose(one, expected, rtol=0, atol=1e-2 if name == "llama_kv8" else 1e-3)


def test_the_prefix_is_computed_once() -> None:
    """Then what each of the three has of its own, and once a step of each alone."""
    model, calls = zoo_model("llama").model, list[tuple[int, ...]]()

    def called(tokens: mx.array, cache: Any) -> mx.array:
        calls.append(tokens.shape)
        logits: mx.array = model(tokens, cache=cache)
        return logits

    trials = Trials(called, CacheLayout(model))
    for _ in range(2):
        assert [cache.offset for cache in trials.prefilled(PROBED)] == [
            len(prompt) for prompt in PROBED.prompts()
        ]
    own = [(1, len(own)) for own in PROBED.own]
    assert calls == [(1, len(PROBED.prefix)), *own * 2]
    calls.clear()
    first, second = trials.alone, trials.alone
    assert first is second
    assert first.logits.shape == (len(PROBED.decoded), 3, model.args.vocab_size)
    assert calls == own + [(1, 1)] * 6
