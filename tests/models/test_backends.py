"""The choice of a backend, and models that are run another device's way."""

from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx_lm.models.cache import make_prompt_cache

from umbel.models import backends
from umbel.models.backends import Name, choose, limits_of
from umbel.models.backends.base import METAL, Backend
from umbel.models.backends.cpu import CPU, Cpu
from umbel.models.backends.cuda import CUDA
from umbel.models.backends.prepare import restore
from umbel.models.errors import ModelLoadError
from umbel.models.load.loader import OpenedModel, Source
from umbel.models.runner import ModelRunner

OWN = {"cpu": CPU, "metal": METAL, "cuda": CUDA}


@pytest.mark.parametrize("name", OWN)
def test_a_device_has_its_own(name: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a path is asked for, or if it is asked for by its own name."""
    monkeypatch.setattr(backends, "device_name", lambda: name)
    assert choose() is choose(name) is OWN[name]
    assert limits_of() is OWN[name].limits


def test_metal_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has MLX's operations, in the CPU's type, and starts no compiler."""
    monkeypatch.setattr(backends, "device_name", lambda: "cpu")
    chosen = choose("metal")
    assert type(chosen) is Backend
    assert chosen.limits.fp32
    assert chosen.limits.freed_bytes == CPU.limits.freed_bytes
    assert chosen.limits.prefill_chunk == METAL.limits.prefill_chunk
    assert not chosen.compiles


def test_metal_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "device_name", lambda: "cuda")
    chosen = choose("metal")
    assert type(chosen) is Backend
    assert not chosen.limits.fp32
    assert not chosen.limits.host_reads
    assert chosen.limits.freed_bytes == CUDA.limits.freed_bytes
    assert chosen.compiles
    assert type(choose("cpu")) is Cpu
    assert limits_of("cpu").fp32


@pytest.mark.parametrize("device", ["cpu", "metal"])
def test_cudas_kernels_need_cuda(device: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said in words."""
    monkeypatch.setattr(backends, "device_name", lambda: device)
    with pytest.raises(ModelLoadError, match=f"needs CUDA, and MLX computes on {device}"):
        choose("cuda")


@pytest.mark.parametrize("name", [None, "metal"])
def test_a_loaded_model_has_mlx_lms_tokens(name: Name | None, tiny_dir: Path) -> None:
    """On every path: of a prompt, and of the tokens that follow."""
    opened = OpenedModel(Source("tiny", tiny_dir), backend=name)
    while opened.read_more():
        pass
    loaded = opened.finish()
    assert loaded.backend == choose(name)
    runner, prompt, tokens = ModelRunner(loaded), [5, 3, 8, 1, 9], list[int]()
    cache = runner.open()
    logits: Any = runner.complete(prompt, cache).logits
    for _ in range(6):
        tokens.append(int(mx.argmax(logits[-1])))
        logits = runner.run(runner.plan([cache]), [cache], tokens[-1:]).logits
    restore(loaded.model)
    theirs: Any = make_prompt_cache(loaded.model)
    expected, following = list[int](), prompt
    for _ in range(6):
        expected.append(int(mx.argmax(loaded.model(mx.array([following]), cache=theirs)[0, -1])))
        following = expected[-1:]
    assert tokens == expected
