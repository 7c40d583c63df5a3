"""The choice of a batch's tokens: log-probabilities, and errors that are one row's own."""

from collections.abc import Sequence
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models import sampling
from umbel.models.params import Row, SamplingParams, Token
from umbel.models.sampling import SamplerOutput, sample

Floats = np.ndarray[Any, np.dtype[Any]]

VOCAB, PADDED = 50, 64
"""Tokens that exist, and logits that an output layer gives."""


def random_logits(rows: int, *, seed: int = 0, spread: float = 3.0) -> Floats:
    """Logits, the padding's far above all others."""
    rng = np.random.default_rng([rows, seed])
    logits = (rng.standard_normal((rows, PADDED)) * spread).astype(np.float32)
    logits[:, VOCAB:] += 1000
    return logits


def row(output: Sequence[int] = (), **params: Any) -> Row:
    """Make a row; greedy with seed 0 unless told otherwise."""
    return Row(SamplingParams(**({"seed": 0, "temperature": 0.0} | params)), [1, 2, 3], output)


def chosen(logits: Floats, rows: list[Row]) -> SamplerOutput:
    """Choose among the tokens that exist."""
    return sample(mx.array(logits), rows, VOCAB)


def check(token: Token, logits: Floats, count: int) -> None:
    """Hold a token's log-probabilities to a log-softmax in double precision."""
    scores = logits[:VOCAB].astype(np.float64)
    expected = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
    assert token.logprobs is not None
    assert np.isclose(token.logprobs.chosen, expected[token.id], rtol=1e-6, atol=1e-4)
    ids = [number for number, _ in token.logprobs.top]
    values = [value for _, value in token.logprobs.top]
    assert len(set(ids)) == len(ids) == min(count, VOCAB)
    assert values == sorted(values, reverse=True)
    assert np.allclose(values, np.sort(expected)[::-1][:count], rtol=1e-6, atol=1e-4)
    assert np.allclose(values, expected[ids], rtol=1e-6, atol=1e-4)


MIXED = [
    row(),
    row(top_logprobs=5),
    row(temperature=1.0, seed=3, top_logprobs=0),
    row(temperature=0.7, seed=4, top_p=0.8),
    row(output=[4, 5], repetition_penalty=1.5, logit_bias={7: 50.0}, top_logprobs=3),
    row(temperature=2.0, seed=5, top_k=3, top_logprobs=VOCAB),
]
"""Rows of every kind, some of which ask for log-probabilities."""


@given(
    counts=st.lists(st.none() | st.integers(0, VOCAB), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.0, 1e-3, 3.0, 1e3]),
)
def test_logprobs(counts: list[int | None], temperature: float, seed: int, spread: float) -> None:
    """Rows that ask get the log-softmax of their logits and the likeliest tokens, others none."""
    logits = random_logits(len(counts), seed=seed, spread=spread)
    rows = [row(temperature=temperature, seed=seed, top_logprobs=count) for count in counts]
    for token, values, count in zip(chosen(logits, rows).read(), logits, counts, strict=True):
        assert token.id < VOCAB
        if count is None:
            assert token.logprobs is None
        else:
            check(token, values, count)


def test_logprobs_are_the_models_own() -> None:
    """Penalties, temperature and filters change the token and not the log-probabilities."""
    logits = random_logits(len(MIXED))
    tokens = chosen(logits, MIXED).read()
    for token, values, each in zip(tokens, logits, MIXED, strict=True):
        if each.params.top_logprobs is None:
            assert token.logprobs is None
        else:
            check(token, values, each.params.top_logprobs)
    assert tokens[4].id == 7, "the bias decides, the log-probability tells what the model thought"


def test_asking_changes_no_token() -> None:
    """Log-probabilities of any row change no row's token."""
    logits = random_logits(len(MIXED))
    silent = [row(each.output, **_without_logprobs(each)) for each in MIXED]
    ids = [token.id for token in chosen(logits, MIXED).read()]
    assert ids == [token.id for token in chosen(logits, silent).read()]
    for number, each in enumerate(MIXED):
        (alone,) = chosen(logits[number : number + 1], [each]).read()
        assert alone.id == ids[number]


def _without_logprobs(each: Row) -> dict[str, Any]:
    names = set(each.params.__struct_fields__) - {"top_logprobs"}
    return {name: getattr(each.params, name) for name in names}


def test_only_who_asks_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are computed once for each row that asks, and for no other."""
    calls: list[int] = []
    real = sampling._logprobs

    def spy(logits: mx.array, token: mx.array, count: int) -> Any:
        calls.append(count)
        return real(logits, token, count)

    monkeypatch.setattr(sampling, "_logprobs", spy)
    chosen(random_logits(2), [row(), row(temperature=1.0)]).read()
    assert calls == []
    chosen(random_logits(len(MIXED)), MIXED).read()
    assert calls == [5, 0, 3, VOCAB]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_logprobs_of_halves(dtype: mx.Dtype) -> None:
    """From logits in half precision, log-probabilities in full."""
    logits = mx.array(random_logits(1)[:, :VOCAB]).astype(dtype)
    (token,) = sample(logits, [row(top_logprobs=4)], VOCAB).read()
    check(token, np.array(logits.astype(mx.float32))[0], 4)


def test_nobody() -> None:
    """The choice of no rows has no tokens."""
    assert SamplerOutput.empty().read() == []


@pytest.mark.parametrize("cursed", range(len(MIXED)))
@pytest.mark.parametrize("where", ["_penalised", "sample_tokens", "_filtered", "_gumbel"])
def test_an_error_is_its_rows_own(where: str, cursed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's error is told for that row; the others' tokens and log-probabilities stay."""
    rows = [row(each.output, **_without_logprobs(each), top_logprobs=3) for each in MIXED]
    rows[cursed] = row(temperature=1.0, seed=666, top_k=5, top_logprobs=3)
    logits = random_logits(len(rows))
    healthy = chosen(logits, rows).read()
    real = getattr(sampling, where)

    def fail(*args: Any) -> Any:
        involved = [args[0]] if where == "_gumbel" else args[1]
        if any(each.params.seed == 666 for each in involved):
            raise RuntimeError("cursed")
        return real(*args)

    monkeypatch.setattr(sampling, where, fail)
    choice = chosen(logits, rows)
    assert list(choice.errors) == [cursed]
    assert str(choice.errors[cursed]) == "cursed"
    tokens = choice.read()
    assert len(tokens) == len(rows)
    assert tokens.pop(cursed).logprobs is None
    healthy.pop(cursed)
    assert [token.id for token in tokens] == [token.id for token in healthy]
    for token, before in zip(tokens, healthy, strict=True):
        assert token.logprobs is not None
        assert before.logprobs is not None
        assert np.allclose(token.logprobs.chosen, before.logprobs.chosen, rtol=0, atol=1e-5)
        assert [n for n, _ in token.logprobs.top] == [n for n, _ in before.logprobs.top]


def test_several_errors() -> None:
    """Each of several rows whose own output cannot be counted fails, with its own error."""
    bad = row([PADDED + 5], presence_penalty=1.0)  # no such token
    rows = [row(), bad, row(temperature=1.0, seed=9), bad]
    logits = random_logits(4)
    choice = chosen(logits, rows)
    assert sorted(choice.errors) == [1, 3]
    assert all(isinstance(error, IndexError) for error in choice.errors.values())
    tokens = choice.read()
    for number in (0, 2):
        (alone,) = chosen(logits[number : number + 1], [rows[number]]).read()
        assert tokens[number] == alone


def test_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every row fails, every row is told, and the choice can still be read."""
    monkeypatch.setattr(sampling, "_penalised", lambda *_: 1 / 0)
    choice = chosen(random_logits(2), [row(top_logprobs=1), row()])
    assert [type(choice.errors[number]) for number in (0, 1)] == [ZeroDivisionError] * 2
    assert [token.logprobs for token in choice.read()] == [None, None]


def test_an_error_of_logprobs_is_its_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose log-probabilities cannot be computed fails alone."""
    real = sampling._logprobs

    def fail(logits: mx.array, token: mx.array, count: int) -> Any:
        if count == 5:
            raise MemoryError
        return real(logits, token, count)

    logits = random_logits(len(MIXED))
    healthy = chosen(logits, MIXED).read()
    monkeypatch.setattr(sampling, "_logprobs", fail)
    choice = chosen(logits, MIXED)
    assert list(choice.errors) == [1]
    tokens = choice.read()
    assert [tokens[n] for n in (0, 2, 3, 4, 5)] == [healthy[n] for n in (0, 2, 3, 4, 5)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_wild_logits_are_their_rows_own(value: float) -> None:
    """Logits that are no numbers, in a row, change no other row's token."""
    logits = random_logits(len(MIXED))
    healthy = chosen(logits, MIXED).read()
    logits[3] = value
    tokens = chosen(logits, MIXED).read()
    assert 0 <= tokens[3].id < VOCAB
    del tokens[3], healthy[3]
    assert tokens == healthy
