"""Conditions for a model's sequences to run as rows of one batch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from structlog.testing import capture_logs

from umbel.models.backends import choose
from umbel.models.backends.base import Backend
from umbel.models.backends.prepare import prepare
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.recurrent import BatchedRecurrentLayer
from umbel.models.kv.ring_buffer import RingBuffer
from umbel.models.load import probe, trials
from umbel.models.load.trials import Trials

from .. import zoo
from ..shared import AS_GPU, shared_model


def reason(model: Any, called: Any = None) -> str | None:
    """Probe a model, or something that is called in its place."""
    return probed(model, called).one_by_one


def probed(model: Any, called: Any = None, backend: Backend | None = None) -> probe.Probed:
    """Probe it, for this device unless another backend is given."""
    backend = backend or choose()
    outputs = prepare(model, backend)
    return probe.probe(Trials(called or model, CacheLayout(model)), backend, outputs)


def near_ties() -> Any:
    """Make a mixture whose experts are so close that rounding decides which of them are taken."""
    model = zoo.make("qwen3_next", num_experts=8)
    rng = np.random.default_rng(3)
    for layer in model.layers:
        gate = layer.mlp.gate
        alike = mx.broadcast_to(gate.weight[:1], gate.weight.shape)
        gate.weight = alike * (1 + mx.array(rng.normal(0, 3e-7, (8, 1)).astype(np.float32)))
    return model


def mixing(model: Any, share: float) -> Callable[..., mx.array]:
    """Call a model and give each row a share of all rows' logits."""

    def called(tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = model(tokens, cache=cache)
        return logits + share * logits.mean(axis=0, keepdims=True) if len(tokens) > 1 else logits

    return called


def test_a_mixture_near_a_tie_runs_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs from itself by more than most models may, and from its batch by no more."""
    model = near_ties()
    assert reason(model) is None
    monkeypatch.setattr(trials, "MARGIN", 0.0)
    assert "the model's rounding explains 0.001 and 0.001" in (reason(model) or "")


@pytest.mark.parametrize(
    ("make", "share"),
    [(near_ties, 0.1), (lambda: shared_model("llama"), 0.001)],
    ids=["moe", "dense"],
)
def test_rows_that_mix_are_found_out(make: Callable[[], Any], share: float) -> None:
    """A share of the neighbours' is too much, also where rounding alone moves a row further."""
    model = make()
    assert "with other neighbours" in (reason(model, mixing(model, share)) or "")


def test_a_state_that_differs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits agree while a recurrent state is a thousandth off: rounding is not that large."""
    model, take = shared_model("mamba2"), BatchedRecurrentLayer.take

    def taken(layer: BatchedRecurrentLayer, row: int) -> Any:
        state = take(layer, row)
        state.cache = [array * 1.001 for array in state.cache]
        return state

    assert reason(model) is None
    monkeypatch.setattr(BatchedRecurrentLayer, "take", taken)
    assert re.search(r"and states by 0\.00\d+;", reason(model) or "")


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_state_that_is_no_number_is_in_every_layer_found(layer: int) -> None:
    """It is the largest difference, wherever it stands among others."""
    right = [mx.arange(6.0).reshape(1, 6) for _ in range(3)]
    wrong = [state * (float("nan") if n == layer else 1.0) for n, state in enumerate(right)]
    logits = mx.arange(6.0).reshape(1, 6)
    found = trials.difference(trials.Outcome(logits, wrong), trials.Outcome(logits, right))
    assert not found.within(trials.Difference(1e-6, 1e-6))
    assert trials.difference(
        trials.Outcome(logits, right), trials.Outcome(logits, right)
    ) == trials.Difference(0.0, 0.0)


@pytest.mark.parametrize("lost", ["logits", "states"])
@pytest.mark.parametrize("rounding", [1e-6, 0.01])
def test_rounding_explains_no_lost_state(rounding: float, lost: str) -> None:
    """Both must be near, by the model's own rounding: a part that is lost is a whole spread off."""
    own = trials.Difference(rounding, rounding)
    near = trials.Difference(3 * rounding, 3 * rounding)
    assert near.within(own)
    assert not near._replace(**{lost: 0.5}).within(own)
    assert not near._replace(**{lost: float("nan")}).within(own)


def test_other_answers_than_alone_are_found_out() -> None:
    """Rows may leave each other alone and be wrong: this one forgets where it is."""
    model = shared_model("llama")

    def called(tokens: mx.array, cache: Any) -> mx.array:
        if len(tokens) > 1:
            cache[0]._step.positions = cache[0]._step.positions * 0
        result: mx.array = model(tokens, cache=cache)
        return result

    said = reason(model, called) or ""
    assert "other answers than alone" in said
    explained = re.findall(r"e-05", said.partition("explains")[2])
    assert len(explained) == 2, said


def test_a_nan_is_no_answer() -> None:
    """Logits that cannot be compared are not taken for equal ones."""
    model = shared_model("llama")

    def called(tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = model(tokens, cache=cache)
        return logits * float("nan") if len(tokens) > 1 else logits

    assert "with other neighbours" in (reason(model, called) or "")


def test_what_a_batch_has_no_answer_to_is_said() -> None:
    """A model that wants its position as a number gets none, and the reason says what it did."""
    model = shared_model("llama")

    def called(tokens: mx.array, cache: Any) -> mx.array:
        result: mx.array = model(tokens, cache=cache)
        return result + 0 * int(cache[0].offset)

    assert "does with a layer's state what a batch cannot" in (reason(model, called) or "")


def test_a_fault_of_ours_is_not_said_to_be_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the module, and so does the log: another way to batch may be found."""
    model = shared_model("llama")
    monkeypatch.delattr(RingBuffer, "end_step")
    with capture_logs() as logs:
        found = reason(model)
    assert found is not None
    assert found.startswith("a fault of umbel's own, in umbel.models.kv.length_classes: ")
    assert "'RingBuffer' object has no attribute 'end_step'" in found
    assert [line["reason"] for line in logs] == [found] * 3


@pytest.mark.parametrize(
    ("name", "parts"), [("llama", True), ("mamba2", True), ("deepseek_v3", False)]
)
def test_who_reads_keys_in_parts(name: str, *, parts: bool) -> None:
    """Latents are multiplied by the model itself, in one piece; other keys where they lie."""
    assert probed(shared_model(name)).reads_parts == parts


@pytest.mark.parametrize("reason", [None, "it cannot"])
def test_what_was_found_out_is_kept(tmp_path: Path, reason: str | None) -> None:
    """A later start does not try it out again, except for the reason against batches."""
    found, tried = probe.Probed(reason, 4, reads_parts=True), []

    def try_out() -> probe.Probed:
        tried.append(1)
        return found

    for _ in range(3):
        kept = probe.probed_once(tmp_path, ("model", 1), try_out)
        assert kept == found
    assert len(tried) == (1 if reason is None else 4)
    other = probe.Probed(None, 0, head_known=True)
    assert probe.probed_once(tmp_path, ("model", 2), lambda: other) == other


GATHERED = {"gemma2", "deepseek_v32", "plamo2"}
"""Whose attention is their own, so that keys of all rows are put together for them."""


@pytest.mark.parametrize("name", zoo.NAMES)
def test_who_attends_by_itself(name: str) -> None:
    """All others' rows are read where they lie: a fault of ours would have them gathered, too."""
    model = shared_model(name)
    for backend in (choose(), AS_GPU):
        found = probed(model, backend=backend)
        assert found.one_by_one is None
        assert bool(found.mask_axes) == (name in GATHERED)
