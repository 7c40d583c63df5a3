"""The choice of tokens: filters, penalties, draws, and independence of neighbours."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.params import Mask, Row, SamplingParams
from umbel.models.sampling import _filtered, _penalised, sample_tokens

VOCAB = 12
Array = np.ndarray[Any, np.dtype[np.float64]]

LOGITS = st.lists(
    st.floats(-8, 8, width=32).map(lambda x: round(x, 2)), min_size=VOCAB, max_size=VOCAB
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
SEEDS = st.integers(0, 2**64 - 1)
PARAMS = st.builds(
    SamplingParams,
    seed=SEEDS,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
)


def row(
    *,
    output: Sequence[int] = (),
    prompt: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
    **params: Any,
) -> Row:
    """Make a row; the seed is 0 unless given, and all tokens are allowed unless some are named."""
    mask = None if allowed is None else masked(allowed)
    return Row(SamplingParams(**({"seed": 0} | params)), prompt, output, mask)


def masked(allowed: Sequence[int], words: int = 2) -> Mask:
    """Make the mask of some tokens, wider than any vocabulary here."""
    mask = np.zeros(words, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


MASKS = st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1).map(lambda s: masked(sorted(s)))
ROWS = st.builds(Row, params=PARAMS, prompt=TOKENS, output=TOKENS, mask=MASKS)


def sample(logits: Any, rows: Sequence[Row], vocab_size: int | None = None) -> list[int]:
    """Sample and evaluate."""
    array = mx.array(np.asarray(logits, np.float32))
    tokens = sample_tokens(array, rows, vocab_size or array.shape[-1]).tolist()
    assert isinstance(tokens, list)
    return [int(token) for token in tokens if isinstance(token, int)]


def kept(scores: Sequence[float], **params: Any) -> set[int]:
    """Give the tokens that the filters leave."""
    left = np.array(_filtered(mx.array([scores], dtype=mx.float32), [row(**params)]))[0]
    return set(np.flatnonzero(np.isfinite(left)).tolist())


def softmax(scores: Array) -> Array:
    """Turn scores to probabilities, in double precision."""
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def near(a: float, b: float) -> bool:
    """True if single precision may confuse the two."""
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)


@given(logits=LOGITS)
def test_greedy_is_argmax(logits: list[float]) -> None:
    """Temperature 0 takes the likeliest token, and of equals the first."""
    assert sample([logits], [row(temperature=0)]) == [int(np.argmax(logits))]


@given(scores=LOGITS, k=st.integers(1, VOCAB))
def test_top_k_keeps_the_k_likeliest(scores: list[float], k: int) -> None:
    """Exactly k tokens stay, and none that is left out is likelier."""
    left = kept(scores, top_k=k)
    assert len(left) == k
    dropped = set(range(VOCAB)) - left
    assert all(scores[a] >= scores[b] for a, b in itertools.product(left, dropped))


@given(scores=LOGITS, p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(scores: list[float], p: float) -> None:
    """The kept tokens reach p together, and would not without the least likely of them."""
    probabilities = softmax(np.asarray(scores))
    left = kept(scores, top_p=p)
    total = probabilities[list(left)].sum()
    assert total > p or near(total, p)
    least = probabilities[list(left)].min()
    assert total - least < p or near(total - least, p)
    dropped = set(range(VOCAB)) - left
    assert all(scores[a] >= scores[b] for a, b in itertools.product(left, dropped))


@given(scores=LOGITS, min_p=st.floats(0.01, 1))
def test_min_p_drops_tokens_below_a_share_of_the_likeliest(
    scores: list[float], min_p: float
) -> None:
    """A token stays where its probability is at least min_p of the greatest."""
    ratio = np.exp(np.asarray(scores) - max(scores))
    left = kept(scores, min_p=min_p)
    for token in range(VOCAB):
        assert (token in left) == (ratio[token] >= min_p) or near(ratio[token], min_p)


@given(scores=LOGITS)
def test_filters_that_are_off_keep_everything(scores: list[float]) -> None:
    """A row without filters keeps its scores bit for bit, beside one with filters."""
    pair = mx.array([scores, scores], dtype=mx.float32)
    left = _filtered(pair, [row(), row(top_k=1, top_p=0.1, min_p=1)])
    assert left[0].tolist() == pair[0].tolist()


def test_top_p_counts_what_top_k_left() -> None:
    """top-k comes first: top-p sees the probabilities of the tokens it kept."""
    scores = np.log([0.5, 0.3, 0.2]).tolist()
    assert kept(scores, top_p=0.6) == {0, 1}
    assert kept(scores, top_p=0.6, top_k=2) == {0}


def test_min_p_comes_after_top_p() -> None:
    """top-p sees the probabilities as they were before min-p took the unlikely ones."""
    scores = np.log([0.5, 0.3, 0.2]).tolist()
    assert kept(scores, top_p=0.55, min_p=0.5) == {0, 1}


def test_temperature_comes_before_the_filters() -> None:
    """A hot request keeps more tokens under the same top-p than a cold one."""
    logits = [np.log([0.6, 0.3, 0.1])]
    hot = {sample(logits, [row(temperature=2.0, top_p=0.5, seed=s)])[0] for s in range(60)}
    cold = {sample(logits, [row(temperature=0.5, top_p=0.5, seed=s)])[0] for s in range(60)}
    assert cold == {0}
    assert hot == {0, 1}


@pytest.mark.parametrize("params", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_strictest_filter_keeps_the_likeliest(params: dict[str, Any]) -> None:
    """No filter can leave nothing: top_p=0 and its like are greedy."""
    logits = [[0.0, 3.0, 1.0, 2.9]]
    drawn = {sample(logits, [row(seed=seed, **params)])[0] for seed in range(50)}
    assert drawn == {1}


@given(logits=LOGITS, rows=st.lists(ROWS, min_size=1, max_size=4))
def test_penalties_agree_with_a_loop(logits: list[float], rows: list[Row]) -> None:
    """Repetition, then presence and frequency, then bias, as params.py words them."""
    result = np.array(_penalised(mx.array([logits] * len(rows), dtype=mx.float32), rows))
    for i, r in enumerate(rows):
        for token in range(VOCAB):
            value = float(np.float32(logits[token]))
            if token in r.prompt or token in r.output:
                factor = r.params.repetition_penalty
                value = value / factor if value > 0 else value * factor
            times = list(r.output).count(token)
            value -= r.params.presence_penalty * (times > 0)
            value -= r.params.frequency_penalty * times
            value += r.params.logit_bias.get(token, 0.0)
            assert result[i, token] == pytest.approx(value, rel=1e-5, abs=1e-4)


def test_a_repeated_token_loses_to_a_fresh_one() -> None:
    """Each penalty alone is enough to change the choice it is meant to change."""
    logits = [[2.0, 1.9, 0.0]]
    assert sample(logits, [row(temperature=0, output=[0])]) == [0]
    assert sample(logits, [row(temperature=0, output=[0], presence_penalty=1.0)]) == [1]
    assert sample(logits, [row(temperature=0, output=[0], frequency_penalty=1.0)]) == [1]
    assert sample(logits, [row(temperature=0, prompt=[0], repetition_penalty=1.5)]) == [1]
    # The prompt counts for the repetition penalty only.
    both: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 1.0}
    assert sample(logits, [row(temperature=0, prompt=[0], **both)]) == [0]


def test_a_repetition_penalty_without_any_tokens_does_nothing() -> None:
    """A first draw from an empty prompt has nothing to repeat."""
    assert sample([[2.0, 1.9]], [row(temperature=0, repetition_penalty=1.5)]) == [0]


def test_logit_bias_forces_and_forbids() -> None:
    """+100 makes a token certain and -100 impossible, greedy or drawn."""
    logits = [[5.0, 0.0, 4.0]]
    assert sample(logits, [row(temperature=0, logit_bias={1: 100.0})]) == [1]
    assert sample(logits, [row(temperature=0, logit_bias={0: -100.0})]) == [2]
    assert {sample(logits, [row(seed=s, logit_bias={1: 100.0})])[0] for s in range(30)} == {1}


@given(data=st.data(), rows=st.lists(ROWS, min_size=1, max_size=6))
def test_a_rows_token_is_the_same_alone_and_in_any_batch(
    data: st.DataObject, rows: list[Row]
) -> None:
    """Neighbours never change an answer, whatever they are and in whatever order."""
    logits = [data.draw(LOGITS) for _ in rows]
    alone = [sample([line], [r])[0] for line, r in zip(logits, rows, strict=True)]
    assert sample(logits, rows) == alone
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample([logits[i] for i in order], [rows[i] for i in order])
    assert shuffled == [alone[i] for i in order]


def sequence(seed: int, length: int = 24) -> list[int]:
    """Draw a sequence from even odds: nothing but the seed decides."""
    return [sample([[0.0] * 64], [row(seed=seed, output=range(n))])[0] for n in range(length)]


def test_a_seed_reproduces_and_another_seed_does_not() -> None:
    """The seed is the whole source of randomness."""
    assert sequence(7) == sequence(7)
    assert sequence(7) != sequence(8)
    assert len(set(sequence(7))) > 5  # the position matters too


def test_the_global_random_state_is_neither_read_nor_changed() -> None:
    """Other users of mlx's random numbers and sampling do not meet."""
    mx.random.seed(1)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(1)
    before = sequence(3, 4)
    assert mx.random.uniform(shape=(4,)).tolist() == expected
    mx.random.seed(2)
    assert sequence(3, 4) == before


def test_every_seed_of_64_bits_works_and_counts() -> None:
    """Seeds that differ in any one bit, up to 2**64-1, give different answers."""
    seeds = [0, 2**64 - 1, *(1 << bit for bit in range(64))]
    assert len({tuple(sequence(seed, 8)) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("over", ["seeds", "positions"])
def test_draws_follow_the_distribution(over: str) -> None:
    """Chi-square of 3,000 draws at temperature 1, over seeds and along one answer."""
    probabilities = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    count = 3000
    if over == "seeds":
        rows = [row(seed=seed) for seed in range(count)]
    else:
        rows = [row(seed=11, output=range(position)) for position in range(count)]
    drawn = np.bincount(sample([np.log(probabilities)] * count, rows), minlength=8)
    expected = probabilities * count
    # 24.3 is the 0.1% point for 7 degrees of freedom; the draws are the same every time.
    assert ((drawn - expected) ** 2 / expected).sum() < 24.3


def test_temperature_sharpens_and_flattens() -> None:
    """The odds of two tokens are raised to the power 1/temperature."""
    logits = [[math.log(0.8), math.log(0.2)]] * 1000
    for temperature in (0.5, 2.0):
        rows = [row(seed=seed, temperature=temperature) for seed in range(1000)]
        share = sample(logits, rows).count(0) / 1000
        odds = 4 ** (1 / temperature)
        assert share == pytest.approx(odds / (1 + odds), abs=0.04)


def test_padding_of_the_output_layer_is_never_chosen() -> None:
    """Tokens beyond the vocabulary do not exist, however likely the model finds them."""
    logits = [[0.0, 1.0, 0.5, 1e9, 1e9]]
    assert sample(logits, [row(temperature=0)], vocab_size=3) == [1]
    drawn = {sample(logits, [row(seed=s, top_k=3, top_p=0.99)], vocab_size=3)[0] for s in range(40)}
    assert drawn <= {0, 1, 2}


def test_tokens_without_a_logit_are_passed_over() -> None:
    """A tokenizer may know more tokens than the output layer; naming one breaks nothing."""
    wide = row(temperature=0, prompt=[0, 7], repetition_penalty=2.0, logit_bias={7: 100.0})
    assert sample([[2.0, 1.5]], [wide], vocab_size=8) == [1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 2.0])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_extreme_temperatures_never_meet_nan(temperature: float, dtype: mx.Dtype) -> None:
    """Any temperature gives an existing token; a tiny one the likeliest."""
    logits = mx.array([[-1e4, 3.0, 1e4, 0.0, -mx.inf]]).astype(dtype)
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}]
    for params in filters:
        assert sample_tokens(logits, [row(temperature=temperature, **params)], 5).tolist() == [2]
    mild = mx.array([[1.0, 1.5, 0.5]]).astype(dtype)
    rows = [row(temperature=temperature, seed=seed) for seed in range(40)]
    drawn = set(sample([mild[0].tolist()] * 40, rows))
    assert drawn == ({1} if temperature < 1 else {0, 1, 2})


@given(logits=LOGITS, r=ROWS, allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_a_mask_is_the_last_word(logits: list[float], r: Row, allowed: set[int]) -> None:
    """Whatever penalties, biases, filters and seeds there are, what is chosen is allowed."""
    (token,) = sample([logits], [replace(r, mask=masked(sorted(allowed)))])
    assert token in allowed


@given(data=st.data(), logits=LOGITS, r=ROWS)
def test_a_mask_is_as_if_the_others_did_not_exist(
    data: st.DataObject, logits: list[float], r: Row
) -> None:
    """Filters see the probabilities among the allowed tokens only, and draws follow these."""
    allowed = data.draw(st.sets(st.integers(0, VOCAB - 1), min_size=1))
    bare = replace(r, mask=masked(sorted(allowed)))
    without = [x if t in allowed else -math.inf for t, x in enumerate(logits)]
    assert sample([logits], [bare]) == sample([without], [replace(r, mask=None)])


def test_biases_choose_among_what_a_mask_allows() -> None:
    """+100 does not let a token through, and -100 does not leave nothing."""
    logits = [[5.0, 4.0, 0.0]]
    assert sample(logits, [row(temperature=0, allowed=[1, 2], logit_bias={0: 100.0})]) == [1]
    assert sample(logits, [row(temperature=0, allowed=[1, 2], logit_bias={1: -100.0})]) == [2]
    assert sample(logits, [row(temperature=0, allowed=[1], logit_bias={1: -100.0})]) == [1]
    assert sample(logits, [row(temperature=0, allowed=[0], frequency_penalty=2.0, output=[0])]) == [
        0
    ]


@pytest.mark.parametrize("vocab_size", [33, 64, 70, 96])
def test_a_mask_is_read_bit_by_bit(vocab_size: int) -> None:
    """Every token has a bit of its own, at words' borders too, beside a row without a mask."""
    logits = np.zeros((vocab_size + 1, vocab_size + 7), np.float32)
    words = -(-vocab_size // 32)
    rows = [Row(SamplingParams(seed=0), [], [], masked([t], words)) for t in range(vocab_size)]
    chosen = sample(logits, [*rows, row(temperature=0)], vocab_size)
    assert chosen == [*range(vocab_size), 0]


def test_a_mask_names_tokens_without_a_logit() -> None:
    """Where the tokenizer knows more tokens than the output layer, those are not chosen."""
    wide = Row(SamplingParams(seed=0), [], [], masked([3, 40, 90], 3))
    assert sample([[0.0] * 36], [wide], vocab_size=96) == [3]
