"""Short convolutions as a kernel, against MLX's own."""

from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.nn.layers.convolution import Conv1d

from umbel.models.backends.cpu import CPU
from umbel.models.backends.cuda import CUDA
from umbel.models.backends.cuda.short_convolution import ShortConvolution
from umbel.models.backends.prepare import prepare

from .. import zoo
from .cuda_emulator import EmulatedKernel, check_model

BY_KERNEL = replace(CUDA, compiles=False)
MODELS = ["qwen3_next", "kimi_linear", "mamba2", "lfm2"]


def convolution(channels: int = 40, size: int = 4, **more: Any) -> Conv1d:
    """Make one as models of recurrent layers have."""
    mx.random.seed(channels + size)
    made = Conv1d(channels, channels, size, **{"groups": channels, "bias": False, **more})
    if "bias" in made:
        made.bias = mx.random.normal((channels,))
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "tokens", "channels", "size"),
    [(1, 1, 32, 4), (3, 1, 40, 4), (2, 8, 160, 4), (3, 21, 33, 2), (1, 9, 300, 7), (2, 5, 8, 1)],
)
def test_it_is_the_convolution(
    kernels: list[EmulatedKernel], rows: int, tokens: int, channels: int, size: int, *, bias: bool
) -> None:
    """The kernel gives what MLX gives, for blocks that are full and not, and stretches likewise."""
    module = convolution(channels, size, bias=bias)
    x = mx.random.normal((rows, tokens + size - 1, channels))
    expected = module(x)
    mx.eval(expected)
    prepare(module, BY_KERNEL)
    assert mx.allclose(module(x), expected, rtol=1e-5, atol=1e-5)
    assert [kernel.launches for kernel in kernels] == [1]


@pytest.mark.parametrize(
    "more",
    [{"groups": 1}, {"stride": 2}, {"padding": 3}, {"dilation": 2}, {"size": 17}, {"groups": 20}],
)
def test_others_stay_mlxs(more: dict[str, Any]) -> None:
    """Those that mix channels, or whose tokens lie apart, or are many, are left alone."""
    module = convolution(**more)
    prepare(module, BY_KERNEL)
    assert type(module) is Conv1d


@pytest.mark.parametrize(
    "x", [mx.ones((2, 9, 40), mx.bfloat16), mx.ones((2, 3, 40))], ids=["another type", "too few"]
)
def test_what_the_kernel_does_not_take(kernels: list[EmulatedKernel], x: mx.array) -> None:
    """An input of another type than the weights, or too short for an output, is MLX's to judge."""
    module = convolution()
    expected = _outcome(module, x)
    prepare(module, BY_KERNEL)
    assert _outcome(module, x) == expected
    assert kernels == []


def _outcome(module: Conv1d, x: mx.array) -> Any:
    try:
        return module(x).tolist()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same(kernels: list[EmulatedKernel], name: str) -> None:
    """A model gives the same logits with the kernel: of a prompt, and of the token after it."""
    model = zoo.make(name)
    calls = check_model(model, BY_KERNEL)
    convolutions = [each for each in model.modules() if isinstance(each, ShortConvolution)]
    assert convolutions
    own = [kernel for kernel in kernels if kernel.name == "short_convolution"]
    assert sum(kernel.launches for kernel in own) == len(convolutions) * calls


def test_a_model_that_is_prepared_for_another_device_has_mlxs_own_again() -> None:
    """Each device has its class, whichever the model was prepared for before."""
    model = zoo.make("mamba2")
    kinds = {BY_KERNEL: ShortConvolution, CPU: Conv1d}
    for device in (BY_KERNEL, CPU, BY_KERNEL):
        prepare(model, device)
        assert {type(m) for m in model.modules() if isinstance(m, Conv1d)} == {kinds[device]}
