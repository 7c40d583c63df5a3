"""Many agents at once: the same answers as alone, and a shared prompt computed once."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.models import sampling
from umbel.models.backends import choose
from umbel.models.backends.prepare import prepare
from umbel.models.kv.batch_cache import BatchCache
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.load import probe, trials
from umbel.models.load.trials import Trials
from umbel.models.params import Row, SamplingParams
from umbel.models.sampling import sample_tokens as real_sample
from umbel.models.step_plan import EXACT_ROWS, Call
from umbel.scheduler.errors import ComputationError
from umbel.scheduler.request import FinishReason

from .. import zoo
from .bench import Ask, Bench, words
from .test_exactness import TOLERANCE

if TYPE_CHECKING:
    from umbel.models.kv.spans import SpanRun

SYSTEM = 150
SHARED = ("llama", "qwen3_next", "gemma3_text", "mamba2")


def agents(count: int, *, at: int = 0, apart: int = 0) -> list[Ask]:
    """Agents with one system prompt, and questions and answers of unequal lengths."""
    return [
        Ask(
            [*words(SYSTEM, "system"), *words(5 + 23 * i, f"user {i}")],
            10 + 7 * (i % 4),
            at=at + apart * i,
            boundaries=[(SYSTEM, Reason.SYSTEM)],
        )
        for i in range(count)
    ]


def test_the_reason_says_by_how_much_answers_would_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are further from the answers of each alone than is allowed, it says how far."""
    monkeypatch.setattr(trials, "MARGIN", 0.0)
    monkeypatch.setattr(trials, "_SMALL", 0.0)
    net, device = zoo.make("llama"), choose()
    outputs = prepare(net, device)
    reason = probe.probe(Trials(net, CacheLayout(net)), device, outputs).one_by_one
    assert reason is not None
    found = re.search(r"logits differ by (.*) of their spread and states by ([\d.e-]+);", reason)
    assert found is not None
    assert 0 < float(found[1]) < 1e-4
    assert 0 < float(found[2]) < 1e-4
    assert "rounding explains 0 and 0" in reason


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next", "gemma3_text", "gpt_oss"])
def test_a_common_prompt_is_computed_once(name: str) -> None:
    """Agents that start together wait for the first one's prefill, and share it."""
    bench = Bench(name)
    asks = agents(6)
    outcomes = bench.run_together(asks)
    unique = sum(len(ask.prompt) - SYSTEM for ask in asks)
    assert bench.engine.statistics().prefill_tokens == SYSTEM + unique
    assert [outcome.cached for outcome in outcomes] == [0] + [SYSTEM] * 5


def test_a_common_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that rows share is multiplied once a layer, whatever the number of rows."""
    bench = Bench("llama")
    bench.run(words(SYSTEM, "system"), 1)
    seen: list[list[list[SpanRun]]] = []
    real = BatchCache.read

    def spy(batch: BatchCache, *told: Any) -> None:
        real(batch, *told)
        seen.append([spans for spans, members in batch._step.shared if members is None])

    monkeypatch.setattr(BatchCache, "read", spy)
    asks = agents(5)
    for ask in asks:
        ask.tokens = 40
    bench.run_together(asks)
    # The prompt's last token was never fed to the cache.
    assert any(sum(s.length for run in runs for s in run) >= SYSTEM - 1 for runs in seen)


def test_nested_sharing() -> None:
    """System prompt, project and conversation: each level is shared by the agents that have it."""
    bench = Bench("llama")
    system, projects = words(80, "system"), [words(60, p) for p in "ab"]
    asks = [Ask([*system, *projects[i % 2], *words(20 + i, i)], 20) for i in range(6)]
    outcomes = bench.run_together(asks)
    for outcome in outcomes:
        assert bench.difference(outcome) < TOLERANCE
    assert bench.engine.statistics().prefill_tokens == 80 + 2 * 60 + sum(20 + i for i in range(6))


@pytest.mark.parametrize("name", SHARED)
def test_mixed_sampling(name: str) -> None:
    """Seeded, greedy and penalised requests get the tokens they get alone."""
    samplings = [
        SamplingParams(seed=1, temperature=1.0),
        SamplingParams(seed=0, temperature=0.0),
        SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(seed=3, temperature=1.3, min_p=0.02, repetition_penalty=1.3),
        SamplingParams(seed=4, temperature=0.9, presence_penalty=1, logit_bias={5: 3.0}),
    ]
    asks = agents(5)
    for ask, params in zip(asks, samplings, strict=True):
        ask.sampling = params
    together = Bench(name).run_together(asks)
    for ask, outcome in zip(asks, together, strict=True):
        (alone,) = Bench(name).run_together([ask])
        assert outcome.tokens == alone.tokens


def test_one_rows_fault_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that raises at token 3 ends its request; neighbours' log-probs do not move."""
    cursed = 666
    real = real_sample

    def sample(logits: mx.array, rows: list[Row], vocab_size: int) -> mx.array:
        if any(row.params.seed == cursed and len(row.output) == 3 for row in rows):
            raise RuntimeError("the third token")
        return real(logits, rows, vocab_size)

    asks = agents(4)
    healthy = Bench("llama").run_together(asks)
    monkeypatch.setattr(sampling, "sample_tokens", sample)
    asks[1].sampling = SamplingParams(seed=cursed, temperature=0.0)
    outcomes = Bench("llama").run_together(asks)
    failed = outcomes.pop(1)
    assert failed.reason is FinishReason.ERROR
    assert isinstance(failed.error, ComputationError)
    assert "the third token" in str(failed.error)
    assert failed.tokens == healthy.pop(1).tokens[:3]
    bench = Bench("llama")
    for outcome, before in zip(outcomes, healthy, strict=True):
        assert outcome.tokens == before.tokens
        assert bench.difference(outcome) < TOLERANCE


@pytest.mark.parametrize("name", SHARED)
def test_cancelling_in_a_batch(name: str) -> None:
    """Clients that leave at any stage free their rows; the others' answers stay right."""
    bench = Bench(name)
    asks = agents(8)
    for number, after in ((0, 2), (2, 9), (3, 0), (5, 14)):
        asks[number].cancel_after = after
    outcomes = bench.run_together(asks)
    for ask, outcome in zip(asks, outcomes, strict=True):
        if ask.cancel_after is None:
            assert outcome.reason is FinishReason.LENGTH
            assert bench.difference(outcome) < TOLERANCE
    assert bench.cache.tries.statistics().leases == 0


def test_batch_limit() -> None:
    """No more rows run at once than may."""
    bench = Bench("llama", max_batch=3)
    for outcome in bench.run_together(agents(7)):
        assert bench.difference(outcome) < TOLERANCE
    assert max(bench.runner.rows) == 3


@pytest.mark.parametrize("name", SHARED)
def test_second_turns_together(name: str) -> None:
    """Every agent's next turn resumes at its own end, also when all come at once."""
    bench = Bench(name)
    first = bench.run_together(agents(5))
    asks = [
        Ask([*o.history, *words(30, f"next {i}")], 12, boundaries=[(SYSTEM, Reason.SYSTEM)])
        for i, o in enumerate(first)
    ]
    for outcome in bench.run_together(asks):
        assert outcome.cached > SYSTEM
        assert bench.difference(outcome) < TOLERANCE


def test_a_lone_rows_failure_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sequences decode one by one, the model's own failure ends one of them only."""
    bench = Bench("llama")
    bench.runner.use(replace(bench.runner.rules, batches=False))
    real, asks = bench.runner._call, agents(4)

    def call(planned: Call, caches: list[SequenceCache], *given: Any) -> mx.array:
        if caches[0] is bench.runner._opened[1]:
            raise RuntimeError("the model failed")
        return real(planned, caches, *given)

    monkeypatch.setattr(bench.runner, "_call", call)
    outcomes = bench.run_together(asks)
    assert isinstance(outcomes.pop(1).error, ComputationError)
    for outcome in outcomes:
        assert outcome.reason is FinishReason.LENGTH
        assert bench.difference(outcome) < TOLERANCE


@pytest.mark.parametrize("fails", [0, 1])
def test_a_failure_of_exact_rows_is_that_calls_own(
    fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten sequences are two calls; those of the one that does not fail get their answers."""
    asks = [Ask(words(9, f"user {i}"), 30) for i in range(10)]
    healthy = Bench("llama", exact=True, max_batch=10).run_together(asks)
    bench = Bench("llama", exact=True, max_batch=10)
    real, full = bench.runner._exactly, 0

    def exactly(caches: Any, *rest: Any) -> Any:
        nonlocal full
        full += len(caches) == EXACT_ROWS
        if full == 12 and len(caches) == (EXACT_ROWS, 2)[fails]:
            raise RuntimeError("the model failed")
        return real(caches, *rest)

    monkeypatch.setattr(bench.runner, "_exactly", exactly)
    outcomes = bench.run_together(asks)
    failed = [outcome.error is not None for outcome in outcomes]
    assert sorted(failed) == [False] * (2, 8)[fails] + [True] * (8, 2)[fails]
    for outcome, expected in zip(outcomes, healthy, strict=True):
        if outcome.error is None:
            assert outcome.tokens == expected.tokens
