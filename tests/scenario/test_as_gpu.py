"""Code that only a GPU runs, run on the CPU: warm-up, overlap, fused attention.

As with CUDA, so that what goes to the disk is copied by the device, too.
"""

from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx_lm.models.cache import make_prompt_cache

from umbel.models.backends.base import Backend
from umbel.models.backends.cpu import CPU
from umbel.models.backends.cuda import CUDA
from umbel.scheduler.errors import ComputationError
from umbel.scheduler.request import FinishReason
from umbel.scheduler.sequence import Sequence, SequenceStatus

from .. import zoo
from ..models.batch_fixture import mlx_lm_alone
from ..models.cuda_emulator import emulated
from ..shared import AS_GPU, limited
from .memory_tools import (
    CHUNK,
    SEEDED,
    Ask,
    ServerFixture,
    Told,
    agents,
    words,
    zoo_model,
)

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

MEMORY = 1 << 30
_SHORTEST = 80
"""Tokens that the warm-up's longest sequence has at least where the budget is small."""
KINDS = ("llama", "qwen3_next", "gemma3_text", "deepseek_v3")
"""Full attention, a hybrid, sliding windows, and latents."""

RECURRENT = {"gated_delta", "short_convolution"}
"""Kernels of layers whose rule is the gated delta rule."""


def kinds(*quick: str, hows: Items[Any] = (None,)) -> list[Any]:
    """Parameters for every kind; those not named are slow.

    Args:
        quick: names, or names and hows joined by a hyphen.
        hows: a second parameter, if there is one.
    """
    listed = []
    for how in hows:
        for name in KINDS:
            label = name if how is None else f"{name}-{how}"
            values = (name,) if how is None else (name, how)
            marks = [] if label in quick else [pytest.mark.slow]
            listed.append(pytest.param(*values, marks=marks, id=label))
    return listed


def model(name: str) -> "LoadedModel":
    """Make a zoo model that runs as on a METAL."""
    return zoo_model(name, device=AS_GPU)


def alone(name: str, ask: Ask) -> list[int]:
    """The greedy answer of plain mlx-lm."""
    net = model(name).model
    with mlx_lm_alone(net):
        cache: Any = make_prompt_cache(net)
        for start in range(0, len(ask.prompt) - 1, CHUNK):
            net(mx.array([ask.prompt[start : len(ask.prompt) - 1][:CHUNK]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        answer = [ask.prompt[-1]]
        for _ in range(ask.tokens):
            answer.append(int(mx.argmax(net(mx.array([[answer[-1]]]), cache=cache)[0, -1])))
    return answer[1:]


def check(server: ServerFixture, asks: Items[Ask], told: Items[Told]) -> None:
    """All were answered as plain mlx-lm answers, and nothing is left of them."""
    assert [t.error for t in told] == [None] * len(told)
    for ask, each in zip(asks, told, strict=True):
        assert each.tokens == alone(server.name, ask)
    server.check_rest()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("llama", "qwen3_next", *zoo.TWINS) else pytest.mark.slow)
        for n in (*zoo.NAMES, *zoo.QUANTIZED)
    ],
)
def test_every_architecture_starts_and_answers(name: str) -> None:
    """It warms up; then agents join and leave, and each gets mlx-lm's own answer."""
    server = ServerFixture(model(name), MEMORY, max_batch=6, warmup="quick")
    runner = server.assembly.runner
    rows = {shape[0] for shape in runner.shapes}
    assert rows == ({2, 3, 4, 6} if runner.batches else set())
    asks = agents(4, user=(9, 40), answer=(28, 6, 12), every=5)
    asks.append(replace(asks[1], at=60))  # comes when the first is alone, or has ended
    check(server, asks, server.serve(asks))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("qwen3_next", RECURRENT),
        ("kimi_linear", RECURRENT),
        ("llama", set()),
    ],
)
def test_with_kernels(name: str, kernels: set[str], kernel_folder: Path) -> None:
    """Agents that start together, join and leave get mlx-lm's own answers of our kernels."""
    with emulated(kernel_folder) as made:
        device = limited(replace(CUDA, compiles=False), fp32=True, warms_up=False)
        loaded = zoo_model(name, device=device)
        # The trial of its batches meets kernels that these agents are too few for.
        server = ServerFixture(loaded, MEMORY, called={"probe"}, max_batch=3)
        asks = agents(3, system=75, user=(6, 11), answer=(5, 3), every=2)
        check(server, asks, server.serve(asks))
    assert {kernel.name.removesuffix("_masked") for kernel in made if kernel.launches} == kernels


@pytest.mark.parametrize("name", kinds("llama", "qwen3_next", "deepseek_v3"))
def test_a_small_budget_warms_up_less(name: str) -> None:
    """The daemon starts, warms up as many rows as fit, and serves one after the other."""
    promise = ServerFixture(model(name), MEMORY, max_batch=1).assembly.runner.profile.worst_case
    budget = promise(_SHORTEST).nbytes * 9 // 8
    server = ServerFixture(model(name), budget, max_batch=6, warmup="quick")
    runner = server.assembly.runner
    assert all(rows < 6 for rows, *_ in runner.shapes)
    asks = agents(3, system=20, user=(12,), answer=(20,))
    check(server, asks, server.serve(asks))


@pytest.mark.parametrize(
    ("device", "warmup", "shapes"),
    [
        (AS_GPU, "none", 0),
        (AS_GPU, "quick", 1),
        (CPU, "quick", 0),
    ],
    ids=["none", "quick", "quick-cpu"],
)
def test_what_is_run_at_start(device: Backend, warmup: str, shapes: int) -> None:
    """The warm-up runs where the setting and the device ask for it."""
    loaded = zoo_model("llama", device=device)
    server = ServerFixture(loaded, MEMORY, max_batch=2, warmup=warmup)
    assert len(server.assembly.runner.shapes) == shapes
    check(server, asks := agents(2, answer=(3,)), server.serve(asks))


@pytest.mark.parametrize(
    ("name", "how"),
    kinds(
        *("llama-cancel", "deepseek_v3-fail", "gemma3_text-preempt"),
        hows=("cancel", "fail", "preempt"),
    ),
)
def test_one_ends_while_its_step_is_under_way(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that goes with a token on its way; its neighbours' answers are mlx-lm's."""
    server = ServerFixture(model(name), 1 << 26, max_batch=6, warmup="none")
    asks = agents(3, system=70, user=(9, 20, 14), answer=(30,))
    names = [server.send(ask) for ask in asks]
    live = [server.live[name] for name in names]
    server.until(lambda: all(len(s.output) >= 9 for s in live))
    assert live[1].pending is not None
    if how == "cancel":
        live[1].cancelled = True
    elif how == "fail":
        fail_for(server, live[1], monkeypatch)
    else:
        server.squeeze()
        assert SequenceStatus.PREEMPTED in [s.status for s in live]
        server.allow(server.budget)
    server.until(lambda: server.idle)
    told = [server.told[name] for name in names]
    if how != "preempt":
        gone, ask = told.pop(1), asks.pop(1)
        assert gone.reason is (FinishReason.CANCELLED if how == "cancel" else FinishReason.ERROR)
        assert isinstance(gone.error, ComputationError) == (how == "fail")
        assert gone.tokens == alone(name, ask)[: len(gone.tokens)]
    check(server, asks, told)


def fail_for(server: ServerFixture, victim: Sequence, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a sequence fail after its next token was computed, and before one is chosen."""
    kv_cache, real = server.engine._kv_cache, server.engine._kv_cache.capture_if_due

    def captured(sequence: Sequence) -> None:
        if sequence is victim:
            raise RuntimeError("it failed")
        real(sequence)

    monkeypatch.setattr(kv_cache, "capture_if_due", captured)


@pytest.mark.parametrize("name", kinds("llama", "qwen3_next"))
def test_the_prefix_of_a_single_sequence_is_cut_evicted_and_shared(name: str) -> None:
    """Meanwhile the sequence decodes alone, and later with others; both answers are right."""
    server = ServerFixture(model(name), 1 << 26, max_batch=6, warmup="none")
    first = Ask(words(150, "shared"), 40)
    other = Ask([*first.prompt[:90], *words(30, "other")], 30)
    (told,) = server.serve([replace(first, tokens=2)])
    assert told.error is None
    name_of = server.send(first)
    server.until(lambda: len(server.live[name_of].output) >= 12)
    server.assembly.cache.evict(0)  # all that is not leased
    later = server.send(other)  # cuts the leased span, and makes the first one enter a row
    server.until(lambda: len(server.live[later].output) >= 4)
    server.squeeze()
    server.allow(server.budget)
    server.until(lambda: server.idle)
    check(server, [first, other], [server.told[name_of], server.told[later]])


@pytest.mark.parametrize("name", kinds("qwen3_next"))
def test_state_comes_back_from_disk_after_a_restart(name: str, tmp_path: Path) -> None:
    """Paged-out state is read by the next daemon, after its warm-up."""
    asks = agents(2, user=(40,), answer=(10,))
    server = ServerFixture(model(name), MEMORY, disk=tmp_path, max_batch=6)
    check(server, asks, server.serve(asks))
    server.close()
    again = ServerFixture(model(name), MEMORY, disk=tmp_path, max_batch=6, warmup="quick")
    told = again.serve(asks)
    assert all(t.cached for t in told)
    assert again.engine.statistics().page_ins > 0
    check(again, asks, told)
    again.close()


@pytest.mark.parametrize(
    ("device", "budget", "given", "longest_chunk"),
    [
        (AS_GPU, MEMORY, {}, 2048),
        (AS_GPU, MEMORY // 4, {}, 1024),
        (AS_GPU, MEMORY // 32, {}, 512),
        (CPU, MEMORY, {}, 512),
        (AS_GPU, MEMORY, {"exact": True}, 512),
        (AS_GPU, MEMORY // 32, {"prefill_chunk": 700}, 700),
    ],
    ids=["gpu", "less memory", "little memory", "cpu", "exact", "given"],
)
def test_how_much_of_a_prompt_is_computed_at_once(
    device: Backend,
    budget: int,
    given: dict[str, Any],
    longest_chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device decides where the user does not, and the budget; exact serving shares pieces."""
    settings = {"prefill_chunk": None, "warmup": "none"} | given
    server = ServerFixture(zoo_model("llama", device=device), budget, **settings)
    lengths = list[int]()
    runner = server.assembly.runner
    for name in ("prefill", "complete"):
        monkeypatch.setattr(runner, name, partial(_noted, lengths, getattr(runner, name)))
    (told,) = server.serve([Ask(words(2500, "long"), 1)])
    assert told.error is None
    assert max(lengths) == longest_chunk
    assert sum(lengths) == 2500


def _noted(lengths: list[int], compute: Any, tokens: Items[int], cache: Any) -> Any:
    lengths.append(len(tokens))
    return compute(tokens, cache)


@pytest.mark.parametrize("name", kinds("gemma3_text"))
def test_exact_answers_do_not_depend_on_company(name: str) -> None:
    """A seeded answer has the same tokens alone, in a crowd, and over what is cached."""
    ask = replace(agents(1, user=(30,), answer=(24,), sampling=(SEEDED,))[0], at=40)
    (cold,) = ServerFixture(model(name), MEMORY, exact=True, max_batch=6).serve([ask])
    server = ServerFixture(model(name), MEMORY, exact=True, max_batch=6, warmup="quick")
    told = server.serve([*agents(4, user=(9, 40), answer=(28, 6), every=3), ask])
    assert (cold.cached, cold.error) == (0, None)
    assert told[-1].cached
    assert told[-1].tokens == cold.tokens
    server.check_rest()
