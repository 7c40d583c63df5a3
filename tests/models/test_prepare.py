"""Models prepared for a device: which functions their layers call, and that they share none."""

from collections.abc import Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import activations, base, llama
from mlx_lm.models.cache import make_prompt_cache

from umbel.models.attention.binding import Attention
from umbel.models.attention.rows import CountsByRow
from umbel.models.backends.cpu import CPU, Cpu
from umbel.models.backends.cuda import CUDA
from umbel.models.backends.prepare import _FUNCTIONS, prepare, restore
from umbel.models.kv.layout import CacheLayout

from .. import zoo
from ..scenario.memory_tools import Ask, ServerFixture, agents, replaced, zoo_model
from ..shared import AS_GPU
from .batch_fixture import mlx_lm_alone

TOKENS = mx.array([[3, 1, 4, 1, 5]])


def functions(model: Any) -> Iterator[FunctionType]:
    """All methods that layers of a model have."""
    for layer in model.modules():
        for name in dir(type(layer)):
            method = getattr(type(layer), name)
            if isinstance(method, FunctionType):
                yield method


@pytest.mark.parametrize("name", zoo.NAMES)
def test_no_layer_sees_a_function_of_mlx_lms_that_is_replaced(name: str) -> None:
    """Every method has umbel's in its place, and MLX itself where positions are counted by row."""
    model = zoo.make(name)
    prepare(model, CUDA)
    seen: set[str] = set()
    for method in functions(model):
        for function_name, function in _FUNCTIONS.items():
            present: Any = method.__globals__.get(function_name)
            assert present is not function
            if present in {Attention(CUDA), CUDA.swiglu, CUDA.gated_delta}:
                seen.add(function_name)
        counts = isinstance(method.__globals__.get("mx"), CountsByRow)
        assert counts == (name == "llama4" and "ChunkedKVCache" in method.__globals__)
    assert seen or name in {"gemma2", "mamba2", "plamo2"}


@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_model_is_restored(name: str) -> None:
    """Layers have the classes that they had, and compute the same."""
    model = zoo.make(name)
    kinds = [type(layer) for layer in model.modules()]
    expected = model(TOKENS, cache=make_prompt_cache(model))
    mx.eval(expected)
    prepare(model, CPU)
    assert mx.allclose(model(TOKENS, cache=make_prompt_cache(model)), expected, atol=1e-4)
    restore(model)
    restore(model)  # twice is once
    assert [type(layer) for layer in model.modules()] == kinds
    assert mx.array_equal(model(TOKENS, cache=make_prompt_cache(model)), expected)


def test_preparing_twice_is_preparing_once() -> None:
    """The classes stay, and so does what chooses the tokens that have logits."""
    model = zoo.make("llama")
    outputs = prepare(model, CPU)
    kinds = [type(layer) for layer in model.modules()]
    assert prepare(model, CPU) is outputs
    assert [type(layer) for layer in model.modules()] == kinds
    assert prepare(model, CUDA) is outputs
    restore(model)
    assert prepare(model, CPU) is outputs


def test_mlx_lms_modules_stay_as_they_are() -> None:
    """A model that is not prepared calls mlx-lm's functions, whatever was prepared before it."""
    prepared, plain = zoo.make("llama"), zoo.make("llama")
    prepare(prepared, CPU)
    assert vars(llama)["scaled_dot_product_attention"] is base.scaled_dot_product_attention
    assert vars(llama)["swiglu"] is activations.swiglu
    assert type(plain.layers[0].self_attn) is llama.Attention
    assert isinstance(prepared.layers[0].self_attn, llama.Attention)


def test_each_of_two_models_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one family, called in turn, whichever was prepared last."""
    seen: list[Cpu] = []
    for name in ("attend", "swiglu"):
        call = getattr(Cpu, name)

        def watched(self: Any, *args: Any, call: Any = call) -> mx.array:
            seen.append(self)
            result: mx.array = call(self, *args)
            return result

        monkeypatch.setattr(Cpu, name, watched)
    devices = [CPU, replace(CPU, host_gates=0), replace(CPU, compiles=True)]
    models = [zoo.make("llama") for _ in devices]
    for model, device in zip(models, devices, strict=True):
        prepare(model, device)
    outputs = []
    for _ in range(2):
        for model, device in zip(models, devices, strict=True):
            seen.clear()
            outputs.append(model(TOKENS))
            mx.eval(outputs[-1])
            assert len(seen) == 2 * len(model.layers)
            assert set(seen) == {device}
    for output in outputs[1:]:
        assert mx.allclose(output, outputs[0], atol=1e-4)


def test_three_llamas_at_work_in_one_process() -> None:
    """One as a GPU runs it, an exact one and a quantised one: each answers as mlx-lm does."""
    small = zoo.make("llama")
    quantize(small, group_size=32, bits=8)
    mx.eval(small.parameters())
    usual = zoo_model("llama")
    loaded = replaced(usual, model=small, layout=CacheLayout(small), fingerprint="8 bits")
    servers = [
        ServerFixture(zoo_model("llama", device=AS_GPU), 1 << 28, max_batch=3),
        ServerFixture(usual, 1 << 28, exact=True, max_batch=3),
        ServerFixture(loaded, 1 << 28, max_batch=3),
    ]
    models = [zoo_model("llama", device=AS_GPU).model, usual.model, small]
    asks = agents(3, system=70, user=(9, 30), answer=(12, 6, 9), every=2)
    names = [[server.send(ask) for ask in asks] for server in servers]
    while not all(server.idle for server in servers):
        for server in servers:
            if not server.idle:
                server.step()
    for server, model, sent in zip(servers, models, names, strict=True):
        told = [server.told[name] for name in sent]
        assert [each.error for each in told] == [None] * len(asks)
        assert [each.tokens for each in told] == [alone(model, ask) for ask in asks]


def alone(model: Any, ask: Ask) -> list[int]:
    """The greedy answer of plain mlx-lm."""
    with mlx_lm_alone(model):
        cache: Any = make_prompt_cache(model)
        answer: list[int] = []
        tokens = ask.prompt
        for _ in range(ask.tokens):
            answer.append(int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1])))
            tokens = answer[-1:]
    return answer
