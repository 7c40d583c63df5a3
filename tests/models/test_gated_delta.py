"""The gated delta rule as a kernel, against mlx-lm's operations."""

from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx_lm.models import gated_delta

from umbel.models.backends.base import METAL, Backend
from umbel.models.backends.cpu import CPU
from umbel.models.backends.cuda import CUDA

from .. import zoo
from .cuda_emulator import EmulatedKernel, check_model

Arguments = dict[str, Any]


def arguments(
    rows: int = 2,
    tokens: int = 9,
    *,
    heads: tuple[int, int] = (2, 4),
    sizes: tuple[int, int] = (32, 8),
    by_channel: bool = False,
    masked: bool = False,
    state: bool = True,
) -> Arguments:
    """Make what a layer hands over."""
    mx.random.seed(rows * 100 + tokens)
    (key_heads, heads_), (key_size, value_size) = heads, sizes
    normal = mx.random.normal
    q, k = gated_delta.normalize_qk(
        normal((rows, tokens, key_heads, key_size)),
        normal((rows, tokens, key_heads, key_size)),
        inv_scale=key_size**-0.5,
        eps=1e-6,
    )
    gates = (heads_, key_size) if by_channel else (heads_,)
    found = {
        "q": q,
        "k": k,
        "v": normal((rows, tokens, heads_, value_size)),
        "a": normal((rows, tokens, *gates)),
        "b": normal((rows, tokens, heads_)),
        "A_log": mx.log(mx.random.uniform(0.1, 4.0, (heads_, *([1] if by_channel else [])))),
        "dt_bias": mx.ones(gates),
        "state": normal((rows, heads_, value_size, key_size)) if state else None,
        "mask": None,
    }
    if masked:
        found["mask"] = mx.arange(tokens)[None] < mx.array([[tokens], [tokens // 2]])
    return found


@pytest.mark.parametrize(
    "given",
    [
        arguments(),
        arguments(3, 1),
        arguments(1, 5, heads=(4, 4), sizes=(64, 32)),
        arguments(by_channel=True, heads=(4, 4)),
        arguments(masked=True),
        arguments(masked=True, by_channel=True, heads=(4, 4)),
        arguments(state=False),
        arguments(1, 3, heads=(1, 2), sizes=(128, 40)),
    ],
    ids=["plain", "one", "wide", "channels", "masked", "masked channels", "new", "blocks"],
)
def test_it_is_the_rule(kernels: list[EmulatedKernel], given: Arguments) -> None:
    """The kernel gives what mlx-lm's operations give, and leaves the same state."""
    expected, state = gated_delta.gated_delta_update(**given)
    found, left = CUDA.gated_delta(**given)
    if given["mask"] is not None:
        hidden = ~given["mask"][..., None, None]
        assert mx.all(mx.where(hidden, found, 0) == 0)
        expected = mx.where(hidden, 0, expected)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert mx.allclose(left, state, rtol=1e-4, atol=1e-5)
    assert [kernel.launches for kernel in kernels] == [1]


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_a_model_computes_the_same(kernels: list[EmulatedKernel], name: str) -> None:
    """A model gives the same logits with the kernel: of a prompt, and of the token after it."""
    calls = check_model(zoo.make(name), replace(CUDA, compiles=False))
    own = [kernel for kernel in kernels if kernel.name.startswith("gated_delta")]
    assert sum(kernel.launches for kernel in own) >= calls


@pytest.mark.parametrize(
    ("device", "given"),
    [
        (CPU, arguments()),
        (METAL, arguments()),
        (CUDA, arguments() | {"use_kernel": False}),
        (CUDA, arguments(sizes=(16, 8))),
        (CUDA, arguments(1, 2, sizes=(288, 8))),
        (CUDA, arguments(sizes=(32, 6))),
    ],
    ids=[
        "CPU",
        "Metal",
        "gradient",
        "short rows",
        "long rows",
        "part of a warp",
    ],
)
def test_mlx_lms_own(kernels: list[EmulatedKernel], device: Backend, given: Arguments) -> None:
    """Where the kernel is not wanted, or does not have the shape, it is mlx-lm's own."""
    expected, state = gated_delta.gated_delta_update(**given)
    found, left = device.gated_delta(**given)
    assert mx.array_equal(found, expected)
    assert mx.array_equal(left, state)
    assert not kernels


@pytest.mark.parametrize("flags", [{"lower_bound": -5.0}, {"allow_neg_eigval": True}])
def test_other_gates(kernels: list[EmulatedKernel], flags: dict[str, Any]) -> None:
    """A bound of the gate, and what is written twice as strongly, are as mlx-lm has them."""
    given = arguments(1, 4) | flags
    expected, state = gated_delta.gated_delta_update(**given)
    found, left = CUDA.gated_delta(**given)
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert mx.allclose(left, state, rtol=1e-4, atol=1e-5)
    assert len(kernels) == 1
