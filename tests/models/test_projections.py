"""Projections of one input as one product."""

import gc
import weakref
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.utils import tree_flatten

from umbel.models import projections

from .. import zoo

TOKENS = mx.array([[3, 1, 4, 1, 5]])
ATTENTION = ("q_proj", "k_proj", "v_proj")


class Counted:
    """Counts products of plain and quantised weights."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        for kind in (Linear, QuantizedLinear):
            patch.setattr(kind, "__call__", self._counting(kind.__call__))

    def _counting(self, real: Any) -> Any:
        def call(layer: Any, x: mx.array) -> mx.array:
            self.calls += 1
            product: mx.array = real(layer, x)
            return product

        return call


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Count from here on."""
    return Counted(monkeypatch)


def made(name: str = "llama", *, quantised: bool = False) -> Any:
    """A model of the zoo, in fp32."""
    model = zoo.make(name)
    if quantised:
        quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "quantised"])
def test_one_product_for_all(counted: Counted, *, quantised: bool) -> None:
    """The same logits of fewer products; afterwards each computes for itself again."""
    model = made(quantised=quantised)
    expected = model(TOKENS)
    apart, counted.calls = counted.calls, 0
    projections.join(model)
    projections.join(model)  # twice is once
    assert mx.allclose(model(TOKENS), expected, rtol=0, atol=1e-5)
    assert apart - counted.calls == 3 * len(model.layers)
    assert projections.separate(model)
    assert not projections.separate(model)
    counted.calls = 0
    assert mx.allclose(model(TOKENS), expected, rtol=0, atol=1e-5)
    assert counted.calls == apart


def test_weights_are_where_they_were_named() -> None:
    """Names, values and bytes of all weights stay; memory too."""
    model = made()
    before = weights(model)
    kept = {name: mx.array(array) for name, array in before.items()}
    mx.eval(kept)
    del before
    held = mx.get_active_memory()
    projections.join(model)
    mx.synchronize()
    assert mx.get_active_memory() <= held + 4096
    after = weights(model)
    assert after.keys() == kept.keys()
    assert all(mx.array_equal(after[name], array) for name, array in kept.items())


def weights(model: Any) -> dict[str, mx.array]:
    """A model's, by their names."""
    pairs: Any = tree_flatten(model.parameters())
    return dict(pairs)


def test_biases_go_along() -> None:
    """They are parts of one, too."""
    module: Any = Module()  # type: ignore[no-untyped-call]
    for name in ATTENTION:
        setattr(module, name, Linear(8, 4 if name == "q_proj" else 2, bias=True))
    x = mx.random.normal((2, 3, 8))
    expected = [module[name](x) for name in ATTENTION]
    projections.join(module)
    assert type(module.q_proj) is projections.JoinedLinear
    for name, output in zip(ATTENTION, expected, strict=True):
        assert mx.allclose(module[name](x), output, rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2)])
def test_in_any_order(order: tuple[int, ...], counted: Counted) -> None:
    """Who asks twice computes for itself, and so do all from then on."""
    layer = made().layers[0].self_attn
    x = mx.random.normal((1, 2, 64))
    expected = [layer[name](x) for name in ATTENTION]
    projections.join(layer)
    counted.calls = 0
    for index in order:
        found = layer[ATTENTION[index]](x)
        assert mx.allclose(found, expected[index], rtol=0, atol=1e-5)
    assert counted.calls == (1 if len(order) == len(ATTENTION) else 4)


def test_one_that_is_not_asked_ends_it() -> None:
    """Nothing of the last input is held, and later inputs are computed one by one."""
    layer = made().layers[0].self_attn
    projections.join(layer)
    first, second = mx.random.normal((2, 1, 2, 64))
    layer.q_proj(first)
    expected = second @ layer.v_proj["weight"].T
    assert mx.allclose(layer.v_proj(second), expected, rtol=0, atol=1e-5)
    assert [type(layer[name]) for name in ATTENTION] == [Linear] * 3


def test_different_ones_stay_apart() -> None:
    """Other types, or one without a bias: nothing is joined."""
    module: Any = Module()  # type: ignore[no-untyped-call]
    module.gate_proj, module.up_proj = Linear(32, 32), Linear(32, 32, bias=False)
    projections.join(module)
    assert type(module.gate_proj) is Linear
    module.up_proj = QuantizedLinear(32, 32, group_size=32)
    projections.join(module)
    assert type(module.up_proj) is QuantizedLinear


@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_architecture(name: str) -> None:
    """What a model computes is the same, and what it shared stays joined where all is asked for."""
    model = made(name)
    expected = model(TOKENS)
    projections.join(model)
    assert mx.allclose(model(TOKENS), expected, rtol=0, atol=1e-4)
    assert mx.allclose(model(TOKENS), expected, rtol=0, atol=1e-4)


def test_a_model_is_freed_without_the_collector() -> None:
    """A product holds no projection."""
    model = made()
    projections.join(model)
    mx.eval(model(TOKENS))
    gone = weakref.ref(model.layers[0].self_attn.q_proj)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
