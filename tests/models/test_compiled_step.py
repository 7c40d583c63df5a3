"""Steps that MLX has compiled, against mlx-lm's own caches: as they are on a GPU, on the CPU."""

from dataclasses import replace

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from structlog.testing import capture_logs

from umbel.models.kv import compiled_step
from umbel.models.load.device import CPU, GPU
from umbel.models.runtime import resident_bytes

from .batch_fixture import NAMES, BatchFixture
from .cuda_emulator import traced_only
from .test_plan_cost import Accountant

AFTER = GPU.compile_after
DEVICE = replace(GPU, fp32=True, compiles=False, warms_up=False)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a step was traced: once, while MLX runs what was compiled."""
    return counted(monkeypatch, "_traced")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the model was called, to trace a step included."""
    return counted(monkeypatch, "_logits")


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Count the calls of a function of the module."""
    calls: list[int] = []
    real = getattr(compiled_step, name)

    def counting(*args: object) -> object:
        calls.append(len(calls))
        return real(*args)

    monkeypatch.setattr(compiled_step, name, counting)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_compiled_steps_answer_as_mlx_lm_does(name: str, traced: list[int]) -> None:
    """Over shared and private prefixes, while buffers wrap and grow, and as people come and go."""
    world = BatchFixture(name, device=DEVICE, own=8)
    traced.clear()
    branch = world.branch(37)
    for prompt in (3, 11, 5):
        world.come(branch, prompt)
    world.come(prompt=21)
    world.decode(steps=2 * AFTER + 60)
    assert len(traced) in (1, 2, 3), traced
    world.leave(world.agents[1])
    world.come(branch, 4)
    world.decode(steps=2 * AFTER + 4)
    assert world.batch.compiles
    world.check()


@pytest.mark.parametrize("name", NAMES)
def test_one_function_serves_whoever_comes(name: str, traced: list[int], called: list[int]) -> None:
    """Others lease the same, or as much of something else, and have as many rows."""
    world = BatchFixture(name, device=DEVICE, own=8)
    branches = [world.branch(128), world.branch(128)]
    for number, branch in enumerate(branches):
        for prompt in (3, 7, 5):
            world.come(branch, prompt)
        if not number:
            world.decode(steps=AFTER + 2)
        before = len(traced), len(called)
        for _ in range(4):
            world.leave(world.agents[0])
            world.come(branch, 4)
            world.decode(steps=AFTER - 1)
        if not world.runner.rules.gathers:
            assert (len(traced), len(called)) == before
        for agent in list(world.agents):
            world.leave(agent)


def test_rows_that_grew_are_compiled_at_once(traced: list[int], called: list[int]) -> None:
    """Others had as many, and are compiled; other numbers of rows are waited for as ever."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(20)
    for _ in range(2):
        world.come(branch, 3)
    traced.clear()
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(150):
        before = len(called)
        world.decode()
        shape = tuple(world.placement.shape)
        seen[shape] = seen.get(shape, 0) + len(called) - before
    first, *grown = seen.values()
    assert first == AFTER + 1, "as they are, and one that is traced"
    assert grown == [1] * len(grown), "only traced"
    assert len(traced) == len(seen) > 2
    world.come(branch, 3)
    before = len(traced)
    world.decode(steps=AFTER)
    assert len(traced) == before
    world.check()


def test_rows_that_grow_early_are_waited_for(traced: list[int]) -> None:
    """None of as many was compiled: what their layers ask for may not be known yet."""
    world = BatchFixture("llama", device=DEVICE)
    branch = world.branch(20)
    for _ in range(2):
        world.come(branch, 105)
    traced.clear()
    world.decode()
    small = tuple(world.placement.shape)
    while tuple(world.placement.shape) == small:
        world.decode()
    world.decode(steps=AFTER - 1)
    assert not traced
    world.decode()
    assert len(traced) == 1
    world.check()


def test_a_few_steps_are_not_compiled(traced: list[int]) -> None:
    """To compile one costs what several save."""
    world = BatchFixture("llama", device=DEVICE)
    traced.clear()
    for steps in (AFTER, AFTER + 1):
        world.come(prompt=5)
        world.come(prompt=5)
        world.decode(steps=steps)
    assert len(traced) == 1


def test_a_step_that_cannot_be_traced_is_run_as_it_is() -> None:
    """What was half done is taken back: the very step gives what it would have given."""
    world = BatchFixture("llama", device=replace(CPU, compile_after=1))
    assert world.runner.rules.compile_after == 0  # the CPU waits for scores within a step
    world.runner.use(replace(world.runner.rules, compile_after=2))
    branch = world.branch(9)
    for prompt in (4, 7):
        world.come(branch, prompt)
    with capture_logs() as logs:
        world.decode(steps=8)
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["event"] == "steps are not compiled"
    assert "during function transformations" in line["reason"]
    assert not world.batch.compiles
    world.check()


def test_what_moves_is_read_where_it_is_then(traced: list[int]) -> None:
    """Tokens that move while a plan lasts are held where they are then only."""
    world = BatchFixture("llama", device=DEVICE)
    whole = world.branch(80)
    (span,) = whole.spans
    first, second = span.split(50)
    begin = replace(whole, tokens=whole.tokens[:50], spans=[first])
    for prompt in (3, 5):
        world.come(begin, prompt)
    traced.clear()
    world.decode(steps=AFTER + 2)
    assert len(traced) == 1
    del whole, span
    mx.clear_cache()  # a buffer that is used again counts as it is, pages larger than asked for
    held, freed = resident_bytes(), second.nbytes
    second.close()
    del second
    first.storage.trim()
    assert resident_bytes() <= held - freed  # at once, and not with the next step
    world.decode(steps=AFTER + 1)
    assert len(traced) == 1
    world.check()


def test_nothing_is_held_when_nobody_runs() -> None:
    """Neither the rows' state nor what they leased: a crowd leaves what a small one has left."""
    world = BatchFixture("llama", device=DEVICE)

    def come_and_go(shared: int) -> int:
        branch = world.branch(shared)
        for prompt in (3, 5):
            world.come(branch, prompt)
        world.decode(steps=AFTER + 3)
        assert world.batch.compiles
        for agent in list(world.agents):
            world.leave(agent)
        del branch, agent
        return resident_bytes()

    assert come_and_go(400) <= come_and_go(5)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_a_compiled_step_takes_no_more_than_its_price(name: str) -> None:
    """Its buffers are written in place, as those of other steps."""
    world = Accountant(name, device=DEVICE, own=24)
    branch = world.branch(60)
    for prompt in (3, 40, 5, 9):
        world.come(branch, prompt)
    world.decode(steps=AFTER + 70)
    assert world.batch.compiles


@pytest.mark.parametrize("name", NAMES)
def test_what_steps_are_traced_by_answers_as_mlx_lm_does(name: str) -> None:
    """Each step by itself, with its own arrays: it is the same for every plan."""
    with traced_only():
        world = BatchFixture(name, device=DEVICE, own=8, limit=24)
        world.runner.use(replace(world.runner.rules, compile_after=1))
        branches = [world.branch(37), world.branch(12)]
        for number in range(5):
            world.come(branches[number % 2], 3 + number)
            world.decode(steps=7)
        for _ in range(3):
            world.leave(world.agents[0])
            world.decode(steps=7)
        assert world.batch.compiles
        world.check()
