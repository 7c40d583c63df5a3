"""Sums and norms of a step as one kernel, against MLX's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize

from umbel.models import residual
from umbel.models.binding import bind
from umbel.models.load.device import CPU, CUDA
from umbel.models.projections import across
from umbel.models.residual import Addend, LastLinear, LastQuantizedLinear, Sum, SumNorm
from umbel.models.step_arrays import Flat

from .. import zoo
from .cuda_emulator import EmulatedKernel, check_model

SMALL = 5e-6  # rounding of fp32 sums of thousands of terms
CHANGES: list[Callable[[Any], Any]] = [
    lambda x: x.__iadd__(1.0),
    lambda x: x.__imul__(3.0),
    lambda x: x.__isub__(mx.ones(x.shape)),
    lambda x: x.__setitem__((0, 0, 0), 7.0),
]


def norm(size: int) -> SumNorm:
    """One with weights that tell numbers apart."""
    made = SumNorm(size, eps=1e-3)
    made.weight = mx.random.normal((size,))
    return made


def usual(x: mx.array, like: RMSNorm) -> mx.array:
    """MLX's norm."""
    return mx.fast.rms_norm(x, like.weight, like.eps)


def step(rows: int = 3, size: int = 64) -> tuple[mx.array, Addend]:
    """A layer's input, and what its attention gives."""
    mx.random.seed(rows + size)
    return mx.random.normal((rows, 1, size)), Addend(mx.random.normal((rows, size)))


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (3, 64), (2, 33), (2, 40), (5, 9000)])
def test_it_is_the_sum_and_its_norm(kernels: list[EmulatedKernel], rows: int, size: int) -> None:
    """Of rows in whole packs and others, and of more than threads have at once."""
    left, right = step(rows, size)
    norms = norm(size)
    found: Any = left + right
    assert isinstance(found, Sum)
    assert mx.allclose(norms(found), usual(mx.add(left, right), norms), rtol=SMALL, atol=SMALL)
    assert isinstance(found.total, Flat)
    assert mx.array_equal(found.total, mx.add(left, right))
    assert [kernel.launches for kernel in kernels] == [1]


def test_what_is_added_to_a_sum_is_added_to_what_the_kernel_gave(
    kernels: list[EmulatedKernel],
) -> None:
    """Whoever gave it; and each sum is computed by one kernel, in the norm that follows."""
    left, right = step()
    norms = norm(64)
    first: Any = left + right
    more = norms(first)  # as an MLP would
    second = first + more
    assert isinstance(second, Sum)
    assert second.parts is not None
    assert second.parts[0] is first.total.flat
    expected = mx.add(mx.add(left, right), usual(mx.add(left, right), norms))
    assert mx.allclose(norms(second), usual(expected, norms), rtol=1e-5, atol=1e-5)
    assert mx.allclose(second, expected, rtol=1e-5, atol=1e-5)
    assert [kernel.launches for kernel in kernels] == [2]


def test_a_second_norm_of_a_sum_is_mlxs(kernels: list[EmulatedKernel]) -> None:
    """Some models compute attention and MLP of the same input, each behind a norm."""
    left, right = step()
    one, other = norm(64), norm(64)
    found = left + right
    for each in (one, other):
        expected = usual(mx.add(left, right), each)
        assert mx.allclose(each(found), expected, rtol=SMALL, atol=SMALL)
    assert [kernel.launches for kernel in kernels] == [1]


@pytest.mark.parametrize("before", [False, True], ids=["after its norm", "before"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_sum_that_is_changed_is_no_sum(
    kernels: list[EmulatedKernel],
    change: Callable[[Any], Any],
    before: bool,  # noqa: FBT001
) -> None:
    """In place, by an operator or by index: the norm after it is of the new numbers."""
    left, right = step()
    norms, found, plain = norm(64), left + right, mx.add(left, right)
    if not before:
        norms(found)
    change(found)
    change(plain)
    assert mx.array_equal(found, plain)
    assert mx.allclose(norms(found), usual(plain, norms), rtol=SMALL, atol=SMALL)
    assert mx.array_equal(found + right, mx.add(plain, right))
    assert sum(kernel.launches for kernel in kernels) == (0 if before else 1)


def test_what_is_changed_after_it_was_added_was_added_before(
    kernels: list[EmulatedKernel],
) -> None:
    """In place: the sum has the numbers that it was made of."""
    made: Any = step()
    left, right = made
    norms, plain = norm(64), mx.add(left, right)
    found = left + right
    left *= 2.0
    right *= 3.0
    assert mx.allclose(norms(found), usual(plain, norms), rtol=SMALL, atol=SMALL)
    assert mx.array_equal(found, plain)
    assert [kernel.launches for kernel in kernels] == [1]


@pytest.mark.parametrize(
    "other", [2.0, mx.ones((64,)), mx.ones((3, 2, 64)), mx.ones((3, 1, 64), mx.bfloat16)]
)
def test_other_sums_are_mlxs(other: Any) -> None:
    """Of numbers, of other shapes and of other types."""
    left, right = step()
    for one in (right, left + right):
        for found in (one + other, other + one):
            assert not isinstance(found, Sum)
            assert mx.allclose(found, mx.add(mx.array(one), other))


def test_only_a_steps_output_is_added_later() -> None:
    """Prompts have their own way, and so have numbers that the kernel does not know."""
    last = LastLinear(8, 8)
    vars(last)["_across"] = across(last)
    assert isinstance(last(mx.ones((4, 1, 8))), Addend)
    assert type(last(mx.ones((4, 2, 8)))) is mx.array
    assert type(last(mx.ones((4, 1, 8), mx.int32))) is mx.array
    assert type(last(mx.ones((4, 8)))) is mx.array


def test_a_norm_of_another_type_is_mlxs(kernels: list[EmulatedKernel]) -> None:
    """What MLX promotes is not for the kernel."""
    left, right = step()
    norms = norm(64)
    norms.weight = norms.weight.astype(mx.bfloat16)
    expected = usual(mx.add(left, right), norms)
    assert mx.array_equal(norms(left + right), expected)
    assert kernels == []


@pytest.mark.parametrize("quantised", [False, True], ids=["plain", "quantised"])
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt_oss", "deepseek_v3", "gemma3_text"])
def test_a_model_computes_the_same(
    kernels: list[EmulatedKernel], name: str, *, quantised: bool
) -> None:
    """A model gives the same logits: of a prompt, and of the token after it, which has kernels."""
    model: Any = zoo.make(name)
    if quantised:
        quantize(model, group_size=32, bits=8)
    check_model(model, replace(CPU, step_kernels=True))
    launched = sum(kernel.launches for kernel in kernels if kernel.name == "sum_norm")
    # Gemma's layers have a norm of their own between the projection and the sum.
    assert launched == (0 if name == "gemma3_text" else 2 * len(model.layers))


def test_binding_can_be_undone() -> None:
    """A model is bound for its device, twice is once, and for another all is as before."""
    model: Any = zoo.make("llama")
    layer = model.layers[0]
    for device, kinds in (
        (CUDA, (LastLinear, SumNorm)),
        (CPU, (Linear, RMSNorm)),
        (CUDA, (LastLinear, SumNorm)),
    ):
        for _ in range(2):
            bind(model, device)
            assert (type(layer.self_attn.o_proj), type(layer.input_layernorm)) == kinds
            assert type(layer.mlp.down_proj) is kinds[0]
    quantize(model, group_size=32, bits=8)
    bind(model, CPU)
    assert residual.bind(model, by_kernel=True)
    assert type(layer.self_attn.o_proj) is LastQuantizedLinear
    assert not residual.bind(model, by_kernel=True)
    assert residual.bind(model, by_kernel=False)
