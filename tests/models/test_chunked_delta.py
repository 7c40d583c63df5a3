"""The gated delta rule in chunks, held to double precision and to mlx-lm's loop."""

from dataclasses import dataclass, replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta

from umbel.models.binding import bind
from umbel.models.chunked_delta import CHUNK, SPAN, chunked_delta
from umbel.models.load.device import CPU
from umbel.models.runtime import peak_of

from .. import zoo

Floats = np.ndarray[Any, np.dtype[Any]]

GATES = ("usual", "open", "tiny", "shut", "sudden")
KEYS = ("usual", "one", "two")
MASKS = ("none", "end", "start", "holes")
UNIT = 2.0**-24
"""The rounding of fp32."""

TIMES, MORE = 4, 2 * CHUNK * UNIT
"""How much larger than the loop's the error may be: it comes of sums over a chunk. Both are of what
the state and the values are; where keys are alike and all is written twice, they cancel."""


@dataclass(frozen=True)
class Case:
    """What a layer may hand over.

    Attributes:
        tokens: of a row.
        rows: of a call.
        heads: of keys, and of values.
        sizes: of keys, and of values.
        by_channel: each channel of a key has a gate.
        gates: how far they are open.
        keys: whether tokens have keys of their own.
        most: that is written.
        mask: which tokens are masked.
        seed: of all figures.
    """

    tokens: int
    rows: int = 1
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (32, 8)
    by_channel: bool = False
    gates: str = "usual"
    keys: str = "usual"
    most: float = 1.0
    mask: str = "none"
    seed: int = 0

    def inputs(self) -> dict[str, Floats]:
        """Make `q`, `k`, `v`, `g`, `beta` and the state, in fp32."""
        rng = np.random.default_rng(self.seed)
        (key_heads, heads), (key_size, value_size) = self.heads, self.sizes
        lead = self.rows, self.tokens
        keys = rng.standard_normal((*lead, key_heads, key_size))
        different = {"usual": self.tokens, "one": 1, "two": 2}[self.keys]
        keys = keys[:, np.arange(self.tokens) % different]
        found = {
            "q": _unit(rng.standard_normal(keys.shape)) * key_size**-0.5,
            "k": _unit(keys),
            "v": rng.standard_normal((*lead, heads, value_size)),
            "g": self._gates(rng, (*lead, heads, *([key_size] if self.by_channel else []))),
            "beta": np.clip(rng.uniform(-0.2, self.most + 0.2, (*lead, heads)), 0, self.most),
            "state": rng.standard_normal((self.rows, heads, value_size, key_size)),
        }
        return {name: x.astype(np.float32) for name, x in found.items()}

    def _gates(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        usual = rng.uniform(0.7, 1, shape)
        powers = 10.0 ** -rng.uniform(0, 45, shape)  # of which the last are 0, or nearly
        return {
            "usual": usual,
            "open": np.ones(shape),
            "tiny": powers,
            "shut": np.where(rng.random(shape) < 0.2, 0.0, usual),
            "sudden": np.where(rng.random(shape) < 0.1, powers, 1 - 1e-4 * usual),
        }[self.gates]

    def seen(self) -> Floats | None:
        """Make the mask."""
        if self.mask == "none":
            return None
        places = np.arange(self.tokens)[None] + np.zeros((self.rows, 1), int)
        lengths = 1 + np.arange(self.rows)[:, None] * self.tokens // self.rows
        return {
            "end": places < lengths,
            "start": places >= self.tokens - lengths,
            "holes": np.random.default_rng(self.seed + 1).random(places.shape) < 0.6,
        }[self.mask]


def _unit(x: Floats) -> Floats:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def reference(inputs: dict[str, Floats], seen: Floats | None) -> tuple[Floats, Floats, Floats]:
    """Compute the rule in double precision: what comes out, the state, and each token's scale."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in inputs.values())
    times = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, times, axis=2), np.repeat(k, times, axis=2)
    g = g[..., None] if g.ndim < v.ndim else g
    outs, scales = [], []
    for t in range(q.shape[1]):
        decayed = state * g[:, t, :, None]
        known = (decayed * k[:, t, :, None]).sum(-1)
        delta = (v[:, t] - known) * beta[:, t, :, None]
        new = decayed + delta[..., None] * k[:, t, :, None]
        outs.append((new * q[:, t, :, None]).sum(-1))
        scales.append(np.abs(decayed).max((-1, -2)) + np.abs(v[:, t]).max(-1))
        state = new if seen is None else np.where(seen[:, t, None, None, None], new, state)
    return np.stack(outs, axis=1), state, np.stack(scales, axis=1)


def errors(
    found: tuple[mx.array, mx.array], inputs: dict[str, Floats], seen: Floats | None
) -> tuple[float, float]:
    """The largest errors of what comes out and of the state, over the scale of each."""
    outs, state, scales = reference(inputs, seen)
    out_errors = np.abs(np.array(found[0]) - outs) / scales[..., None]
    if seen is not None:
        out_errors = out_errors[seen]
    largest = np.abs(state).max((-1, -2)) + np.abs(inputs["v"]).max((1, 3))
    state_errors = np.abs(np.array(found[1]) - state) / largest[..., None, None]
    spread = inputs["k"].shape[3] ** 0.5  # queries are so short
    return spread * out_errors.max(initial=0), state_errors.max()


def compute(function: Any, inputs: dict[str, Floats], seen: Floats | None) -> Any:
    """Call one of the two."""
    arrays = {name: mx.array(x) for name, x in inputs.items()}
    return function(**arrays, mask=None if seen is None else mx.array(seen))


cases = st.builds(
    Case,
    tokens=st.one_of(
        st.integers(2, 40), st.sampled_from([SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 37])
    ),
    rows=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    sizes=st.sampled_from([(32, 8), (4, 3), (128, 5)]),
    by_channel=st.booleans(),
    gates=st.sampled_from(GATES),
    keys=st.sampled_from(KEYS),
    most=st.sampled_from([0.1, 1.0, 2.0]),
    mask=st.sampled_from(MASKS),
    seed=st.integers(0, 1 << 20),
)


@given(cases)
@example(Case(64, 2, (2, 4), gates="sudden", keys="one", most=2.0))
@example(Case(SPAN, 2, (2, 4), (4, 3), by_channel=True, gates="sudden", keys="one", most=2.0))
@example(Case(SPAN + 5, 2, by_channel=True, gates="tiny", mask="holes"))
@settings(max_examples=60)
def test_it_is_as_exact_as_the_loop(case: Case) -> None:
    """However small gates are, and whoever is masked."""
    inputs, seen = case.inputs(), case.seen()
    found = errors(compute(chunked_delta, inputs, seen), inputs, seen)
    loop = errors(compute(gated_delta.gated_delta_ops, inputs, seen), inputs, seen)
    for error, known in zip(found, loop, strict=True):
        assert error <= TIMES * known + MORE


@pytest.mark.parametrize("by_channel", [False, True])
def test_what_was_let_go_leaves_nothing_behind(by_channel: bool) -> None:  # noqa: FBT001
    """After a gate that is shut there is no trace of what was large before, also in a chunk."""
    inputs = Case(CHUNK, by_channel=by_channel).inputs()
    inputs["state"] *= np.float32(1e12)
    inputs["v"][:, :10] *= np.float32(1e12)
    inputs["g"][:, 10] = 0
    outs, state = compute(chunked_delta, inputs, None)
    later = {name: x if name == "state" else x[:, 10:] for name, x in inputs.items()}
    expected, left, _ = reference(later, None)
    np.testing.assert_allclose(np.array(outs)[:, 10:], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(state), left, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("tokens", [5, CHUNK, SPAN + 33])
def test_rows_know_nothing_of_each_other(tokens: int, by_channel: bool) -> None:  # noqa: FBT001
    """A row has the same bits beside others and alone, and whenever it is computed."""
    inputs = Case(tokens, 3, by_channel=by_channel).inputs()
    outs, states = compute(chunked_delta, inputs, None)
    for row in range(3):
        alone = {name: x[row : row + 1] for name, x in inputs.items()}
        for _ in range(2):
            out, state = compute(chunked_delta, alone, None)
            assert mx.array_equal(out[0], outs[row])
            assert mx.array_equal(state[0], states[row])


@pytest.mark.parametrize("mask", ["end", "start", "holes"])
def test_masked_tokens_may_be_anything(mask: str) -> None:
    """Nothing of them gets into the state, not even what is no number."""
    case = Case(SPAN + 9, 2, mask=mask)
    inputs, seen = case.inputs(), case.seen()
    assert seen is not None
    expected, state = compute(chunked_delta, inputs, seen)
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name][~seen] = np.nan
    found, left = compute(chunked_delta, inputs, seen)
    assert mx.array_equal(left, state)
    assert np.array_equal(np.array(found)[seen], np.array(expected)[seen])


@given(st.integers(2, SPAN + 40), st.integers(0, 1 << 20))
@settings(max_examples=20)
def test_a_prompt_may_be_cut_anywhere(tokens: int, seed: int) -> None:
    """Two calls give what one call gives, but for rounding."""
    inputs = Case(tokens, seed=seed).inputs()
    expected, state = compute(chunked_delta, inputs, None)
    cut, outs, left = 1 + seed % (tokens - 1), [], inputs["state"]
    for piece in (slice(0, cut), slice(cut, None)):
        some = {name: x if name == "state" else x[:, piece] for name, x in inputs.items()}
        out, after = compute(chunked_delta, some | {"state": left}, None)
        outs.append(out)
        left = np.array(after)
    assert mx.allclose(mx.concatenate(outs, axis=1), expected, rtol=1e-4, atol=1e-5)
    assert mx.allclose(mx.array(left), state, rtol=1e-4, atol=1e-5)


def test_long_prompts_take_little_more_memory() -> None:
    """Each span is waited for, so that what it takes is free for the next."""

    def peak(tokens: int) -> int:
        inputs = Case(tokens, heads=(2, 4), sizes=(64, 64)).inputs()
        arrays = {name: mx.array(x) for name, x in inputs.items()}

        def work() -> tuple[mx.array, mx.array]:
            outputs = chunked_delta(**arrays)
            mx.eval(*outputs)
            return outputs

        return peak_of(work)[1]

    assert peak(8 * SPAN) < 1.7 * peak(SPAN)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_of_halves_only_the_result_is_rounded(dtype: mx.Dtype) -> None:
    """Queries, keys and values of 16 bits are computed with in fp32, and so is the state."""
    inputs = {name: mx.array(x) for name, x in Case(40).inputs().items()}
    short = {name: inputs[name].astype(dtype) for name in ("q", "k", "v", "beta")}
    wide = {name: x.astype(mx.float32) for name, x in short.items()}
    found, left = chunked_delta(**inputs | short)
    expected, state = chunked_delta(**inputs | wide)
    assert mx.array_equal(found, expected.astype(dtype))
    assert found.dtype == dtype
    assert mx.array_equal(left, state)
    assert left.dtype == mx.float32


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "kimi_linear"])
def test_a_model_computes_the_same(name: str) -> None:
    """A model gives the same logits as with the loop: of a prompt, and of the token after it."""
    model = zoo.make(name)
    tokens, after = mx.arange(SPAN + 20)[None] % 90, mx.array([[9]])

    def logits() -> list[mx.array]:
        cache = model.make_cache()
        return [model(tokens, cache=cache), model(after, cache=cache)]

    bind(model, replace(CPU, recurrence_chunks=False))
    expected = logits()
    mx.eval(expected)
    bind(model, CPU)
    for one, other in zip(logits(), expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-4)
