"""A warm-up meets every kind of step that serving meets, as on a GPU and run on the CPU."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, cast

import numpy as np
import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.models.binding import bind
from umbel.models.load.device import GPU
from umbel.models.params import Mask, SamplingParams
from umbel.models.warmup.running import Bounds, ScenarioRunner
from umbel.models.warmup.scenarios import Scenario, full, padded_prompts, quick
from umbel.scheduler.engine import Engine

from .. import zoo
from ..models.cuda_emulator import traced_only
from ..models.step_kinds import Label, Recorder
from .memory_tools import CHUNK, GREEDY, SEEDED, Ask, ServerFixture, words, zoo_model

MEMORY = 1 << 30
ROWS = 8
CONTEXT = 512
LIMIT = 96
"""Tokens of its own after which a row is packed: two numbers of positions."""
DEVICE = replace(GPU, compiles=False, row_limit=LIMIT, spare_steps=2, prompt_multiple=16)
NAMES = [
    "llama",
    pytest.param("gemma3_text", marks=pytest.mark.slow),
    pytest.param("qwen3_next", marks=pytest.mark.slow),
]
"""Full attention, sliding windows, and recurrent layers beside full attention."""
OF_SHARED_CALLS = {"prompts together", "padded prompts", "side by side"}
"""Scenarios that bring nothing where each prompt has a call of its own: rows enter one by one."""

PENALISED = SamplingParams(seed=3, repetition_penalty=1.2, top_logprobs=3)


class AnyToken:
    """A grammar, and its matcher, that allows every token."""

    is_complete = False

    def matcher(self) -> "AnyToken":
        """Begin an answer."""
        return self

    def consume(self, token: int) -> None:
        """Take the answer's next token."""

    def mask(self) -> Mask:
        """Find the tokens that may follow."""
        return np.full(zoo.VOCAB_SIZE // 32, 2**32 - 1, np.uint32)


@pytest.fixture(autouse=True)
def _steps_are_traced() -> Iterator[None]:
    with traced_only():
        yield


@cache
def assembled(name: str, rows: int) -> ServerFixture:
    """Assemble an engine that did not warm up.

    Each look at its clock is a millisecond: which prompts share a call depends on what calls took.
    """
    loaded = zoo_model(name, device=DEVICE)
    defaults: dict[str, Any] = cast("Any", Engine.__init__).__kwdefaults__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "clock", count(step=0.001).__next__)
        return ServerFixture(loaded, MEMORY, max_batch=rows, warmup="none")


def server(name: str, rows: int = ROWS) -> ServerFixture:
    """Have an engine that did not warm up, bound again: other tests bind for other devices."""
    made = assembled(name, rows)
    bind(zoo_model(name).model, DEVICE)
    return made


def scenarios(name: str, rows: int = ROWS, *, every_shape: bool) -> list[Scenario]:
    """What a warm-up of this model runs."""
    runner = server(name, rows).assembly.runner
    padded = padded_prompts(rows, CHUNK, runner.device.prompt_multiple, CONTEXT)
    if not every_shape:
        return [*quick(rows, runner.rules, CHUNK), padded]
    windows = runner.placement.windows
    return [*full(rows, runner.rules, CHUNK, max(windows, default=0)), padded]


@cache
def met_by(name: str, rows: int = ROWS) -> Mapping[str, set[Label]]:
    """What each scenario of the full warm-up meets."""
    runner = server(name, rows).assembly.runner
    bounds = Bounds(rows, MEMORY, CHUNK, 1.0)
    running = ScenarioRunner(runner, bounds, lambda: 0.0, lambda: None)
    found = {}
    with Recorder().on() as recorder:
        for scenario in scenarios(name, rows, every_shape=True):
            recorder.seen = set()
            running.run(scenario)
            found[scenario.name] = recorder.seen
    return found


@cache
def met_when_busy(name: str, rows: int = ROWS) -> frozenset[Label]:
    """What agents meet that come and go, and come again with longer histories."""
    busy = server(name, rows)
    system, project = words(70, "system"), words(50, "project")
    own = (20, 150, 130, 9, 160, 20, 20, 300)
    prompts = [
        [*system, *(project if number in (1, 2) else []), *words(tokens, f"agent {number}")]
        for number, tokens in enumerate(own)
    ]
    with Recorder().on() as recorder:
        busy.serve([Ask(words(1, "alone"), 2)])
        for answers in ((120, 110, 4, 14, 36, 12, 30, 24), (30, 5, 12, 25, 8, 4, 20, 6)):
            asks = [
                Ask(
                    prompt,
                    answers[number],
                    (GREEDY, GREEDY, SEEDED, PENALISED)[number % 4],
                    [(len(system), Reason.SYSTEM)],
                    grammar=AnyToken() if number == len(own) - 1 else None,
                    at=3 * ((number + 1) // 2),
                )
                for number, prompt in enumerate(prompts)
            ]
            told = busy.serve(asks)
            assert [each.error for each in told] == [None] * len(told)
            prompts = [
                [*prompt, *each.tokens, *words((5, 40, 60)[number % 3], f"more {number}")]
                for number, (prompt, each) in enumerate(zip(prompts, told, strict=True))
            ]
    return frozenset(recorder.seen)


def is_shape(label: Label) -> bool:
    """Whether it is no kind of step, but how long something is."""
    return label[0] in ("positions", "window") or label[:2] == ("prefill", "tokens")


@pytest.mark.parametrize("name", NAMES)
def test_serving_meets_nothing_new(name: str) -> None:
    """No kind of step after the quick warm-up, and no shape either after the full one.

    Without any one of the quick warm-up's scenarios it would. Those of numbers of rows count as
    one: with few rows, others have the same shapes.
    """
    met, busy = met_by(name), met_when_busy(name)
    assert busy - union(met) == set()
    kinds = {scenario.name: met[scenario.name] for scenario in scenarios(name, every_shape=False)}
    assert {label for label in busy - union(kinds) if not is_shape(label)} == set()
    needed = {each.lstrip("0123456789 ") for each in kinds}
    if not server(name).assembly.runner.prefills_together:
        needed -= OF_SHARED_CALLS
    for left_out in sorted(needed):
        others = {each: met[each] for each in kinds if not each.endswith(left_out)}
        assert busy & (union(kinds) - union(others)), left_out
    check_shapes(name, union(met))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows(rows: int) -> None:
    """Where fewer run at once than scenarios have, they still meet all that these few do."""
    unmet = met_when_busy("llama", rows) - union(met_by("llama", rows))
    assert unmet == set()


def union(met: Mapping[str, set[Label]]) -> set[Label]:
    """What scenarios met together."""
    return set().union(*met.values())


def check_shapes(name: str, met: set[Label]) -> None:
    """Each number of rows with each of positions was met, and chunks of each order of size."""
    windows = server(name).assembly.runner.placement.windows
    for rows in (2, 3, 4, 6, 8):
        assert {("positions", rows, 64), ("positions", rows, LIMIT)} <= met
        assert {("window", window, rows, window) for window in windows} <= met
    assert {("prefill", "tokens", order + 1) for order in range(7)} <= met
