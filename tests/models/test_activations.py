"""SiLU through NumPy against double precision, and the models that call it."""

from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx_lm.models import activations

from umbel.models.backends.base import METAL
from umbel.models.backends.cpu import CPU, Cpu
from umbel.models.backends.prepare import prepare

from .. import zoo

NUMPYS = replace(CPU, host_gates=0)
DEVICES = pytest.mark.parametrize("device", [CPU, NUMPYS], ids=["few are MLX's", "all NumPy's"])

Floats = np.ndarray[Any, np.dtype[Any]]


def reference(gate: Floats, x: Floats) -> Floats:
    """Compute it in double precision."""
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(wide / (1 + np.exp(-wide)) * x)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 33), (16, 1, 96), (2, 5, 3, 8), (9, 600)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
@DEVICES
def test_swiglu(shape: tuple[int, ...], spread: float, device: Cpu) -> None:
    """It is as close to double precision as fp32 is."""
    rng = np.random.default_rng([*shape])
    gate, x = (rng.standard_normal(shape).astype(np.float32) * spread for _ in range(2))
    found = np.array(device.swiglu(mx.array(gate), mx.array(x)))
    rtol = 2e-6 if gate.size >= device.host_gates else 5e-6  # MLX's, for -50 and less
    np.testing.assert_allclose(found, reference(gate, x), rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("gates", [CPU.host_gates - 1, CPU.host_gates])
def test_few_gates_are_not_waited_for(gates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit what MLX makes of them; from the limit on NumPy has them."""
    seen: list[int] = []
    exponential = np.exp

    def watched(view: Floats, out: Floats) -> Floats:
        seen.append(view.size)
        return np.asarray(exponential(view, out=out))

    monkeypatch.setattr(np, "exp", watched)
    gate, x = mx.random.normal((1, gates)), mx.random.normal((1, gates))
    found = CPU.swiglu(gate, x)
    if gates < CPU.host_gates:
        assert mx.array_equal(found, gate * mx.sigmoid(gate) * x)
    assert seen == ([] if gates < CPU.host_gates else [gates])


@DEVICES
def test_extreme_gates(device: Cpu) -> None:
    """A gate far below zero lets nothing through, and one far above lets all."""
    gate = mx.array([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4])
    found = np.array(device.swiglu(gate, mx.full(6, 2.0)))
    np.testing.assert_allclose(found, [0, 0, 0, 0, 176, 2e4], atol=1e-30)


@DEVICES
def test_views_are_not_written_to(device: Cpu) -> None:
    """Halves of one product stay as they are: others may look at them."""
    both = mx.random.normal((1, 5, 64))
    before = np.array(both)
    gate, x = mx.split(both, 2, axis=-1)
    found = np.array(device.swiglu(gate, x))
    assert np.array_equal(np.array(both), before)
    np.testing.assert_allclose(found, reference(np.array(gate), np.array(x)), rtol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_halves_are_mlx_own(dtype: mx.Dtype) -> None:
    """Gates that are not fp32 are left to mlx-lm's function, bit by bit."""
    gate, x = mx.random.normal((2, 3, 32), dtype), mx.random.normal((2, 3, 32), dtype)
    assert mx.array_equal(CPU.swiglu(gate, x), activations.swiglu(gate, x))


def test_layers_call_it() -> None:
    """Those of a model, for the device that it was prepared for last."""
    model = zoo.make("llama")
    mlp = model.layers[0].mlp
    for device in (METAL, CPU):
        prepare(model, device)
        assert type(mlp).__call__.__globals__["swiglu"] == device.swiglu
