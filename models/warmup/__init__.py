"""Steps that are run before the first request, so that none waits for kernels to be compiled.

What a CUDA device has not computed yet it compiles, or loads, when it meets it: the first batch
of four rows took 5 seconds on a machine that had never seen one, and the first rows of which some
share, some do not and some are free 3 more (one H200, 8B shapes). Streams would stand still for
it. In later processes the same steps take a tenth of a second each, because MLX keeps on disk
what it compiled.
"""

import time
from collections.abc import Callable
from functools import partial

import structlog

from ..attention.planned import noted, rooms_of, shapes_of
from ..runner import ModelRunner
from .running import BoundError, Bounds, ScenarioRunner
from .scenarios import COMMON, full, padded_prompts, quick

QUICK_SECONDS, FULL_SECONDS = 60.0, 300.0
"""After these no further step is begun."""

QUICK_CONTEXT, FULL_CONTEXT = 16_384, 32_768
"""Tokens of the longest prompt whose attention is planned; what turns add to longer ones is planned
up to the latter."""

_NO_BOUND = 1 << 62

log = structlog.get_logger()


def longest(runner: ModelRunner) -> int:
    """Tokens of a sequence by which it is found for how many rows there is memory.

    So many a row reads where they lie, if nobody shares them.
    """
    return max(runner.rules.own + 8, 2 * COMMON)


def warm_up(
    runner: ModelRunner,
    max_batch: int,
    *,
    every_shape: bool = False,
    nbytes: int = _NO_BOUND,
    chunk: int = 512,
    context: int = QUICK_CONTEXT,
    clock: Callable[[], float] = time.monotonic,
    go_on: Callable[[], object] = lambda: None,
) -> None:
    """Run every kind of step that serving meets, and leave nothing behind.

    What would exceed a bound is left out, and logged.

    Args:
        runner: of the model. Nothing may run on it.
        max_batch: sequences that run at once.
        every_shape: also compute in every shape that a batch may have.
        nbytes: what state and computing may take together.
        chunk: the most tokens of a prompt that are computed at once.
        context: tokens of the longest prompt that is served.
        clock: seconds, monotonic.
        go_on: called before each step; what it raises ends the warm-up, and leaves nothing behind.
    """
    rows, rules, began = max_batch if runner.batches else 1, runner.rules, clock()
    if every_shape:
        window = max(runner.placement.windows, default=0)
        scenarios, seconds = full(rows, rules, chunk, window), FULL_SECONDS
    else:
        scenarios, seconds = quick(rows, rules, chunk), QUICK_SECONDS
    running = ScenarioRunner(runner, Bounds(rows, nbytes, chunk, began + seconds), clock, go_on)
    left_out: dict[str, list[str]] = {}

    def run(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except BoundError as error:
            left_out.setdefault(str(error), []).append(name)

    with noted() as kinds:
        for scenario in scenarios:
            run(scenario.name, partial(running.run, scenario))
    if planned := [kind for kind in kinds if kind.is_planned]:
        most = min(context, FULL_CONTEXT)
        rooms = rooms_of(most)
        run("attention of one alone", partial(running.plan_decoding, planned, rooms))
        shapes = shapes_of(chunk, most if every_shape else min(context, QUICK_CONTEXT), most)
        run("attention of long prompts", partial(running.plan_attention, planned, shapes))
    multiple = runner.device.prompt_multiple
    if multiple > 1 and runner.prefills_together:
        padded = padded_prompts(rows, chunk, multiple, context)
        run(padded.name, partial(running.run, padded))
    seconds = round(clock() - began, 1)
    log.info("warmed up", steps=running.steps, plans=running.plans, seconds=seconds)
    for bound, names in left_out.items():
        log.warning("not all was warmed up", bound=bound, left_out=names)
