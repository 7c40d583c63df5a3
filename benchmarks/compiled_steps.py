"""A crowd on the engine itself, with compiled steps and without, in turns in one process.

    uv run python benchmarks/compiled_steps.py             # a GPU, Llama-3.1-8B's shapes

32 agents share a prompt of 7,903 tokens, of which the first five are those of others, too, as a
chat template's are. Each asks its next question when its answer has ended. No HTTP, no disk:
what is compared are steps. Random weights; every second run compiles no step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from newcomers import Driver
from percentiles import percentile
from recorder import loop
from shapes import SHAPES, make, on_cpu, tokens

from umbel.models.kv import compiled_step
from umbel.models.load.device import GPU
from umbel.models.runner import ModelRunner
from umbel.models.warmup import warm_up

TEMPLATE, QUESTION = 5, 64
STALL, CHUNK = 0.2, 2048


@dataclass
class Crowd:
    """What is asked.

    Attributes:
        agents: that talk at once.
        turns: of each.
        shared: tokens that all prompts begin with.
        answer: tokens of each answer.
    """

    agents: int
    turns: int
    shared: int
    answer: int


@dataclass
class Result:
    """One run.

    Attributes:
        compiled: whether steps were.
        wall_s: of all turns.
        gap_ms: between two tokens of one stream, the median.
        slow_gap_ms: that nine of ten are below.
        longest_gap_ms: of all.
        step_ms: median of the steps without a prompt.
        steps: how many there were.
        traced: how many of them were traced.
        loop_ms: what a loop of Python took beside them, the median; see `recorder.py`.
    """

    compiled: bool
    wall_s: float
    gap_ms: float
    slow_gap_ms: float
    longest_gap_ms: float
    step_ms: float
    steps: int
    traced: int
    loop_ms: float


@contextmanager
def counting_traces() -> Iterator[list[int]]:
    """Count the steps that are traced."""
    counted: list[int] = []
    trace: Callable[..., list[mx.array]] = compiled_step._traced  # noqa: SLF001  (its only place)

    def traced(*given: Any) -> list[mx.array]:
        counted.append(len(counted))
        return trace(*given)

    compiled_step._traced = traced  # type: ignore[assignment]  # noqa: SLF001  (as above)
    try:
        yield counted
    finally:
        compiled_step._traced = trace  # noqa: SLF001  (as above)


def talk(runner: ModelRunner, vocab_size: int, crowd: Crowd, *, compiled: bool) -> Result:
    """Have all agents talk to their last turn."""
    after = GPU.compile_after if compiled else 0
    runner.use(replace(runner.rules, compile_after=after))
    driver = Driver(runner, max_stall=STALL, prefill_chunk=CHUNK)
    template = tokens(TEMPLATE, vocab_size, seed=1)
    driver.ask([*template, *tokens(QUESTION, vocab_size, seed=2)], 2)
    driver.drain()
    shared = [*template, *tokens(crowd.shared - TEMPLATE, vocab_size, seed=3)]

    def question(agent: int, turn: int) -> list[int]:
        return tokens(QUESTION, vocab_size, seed=100 + agent * crowd.turns + turn)

    live = {}
    for agent in range(crowd.agents):
        sequence = driver.ask([*shared, *question(agent, 0)], crowd.answer)
        live[sequence.request.id] = agent, 1, sequence
    times, calm, loops = [], [], []
    start = time.perf_counter()
    with counting_traces() as traced:
        while live:
            computed = driver.engine.statistics().prefill_tokens
            times.append(driver.step())
            if driver.engine.statistics().prefill_tokens == computed:
                calm.append(times[-1])
            if len(times) % 20 == 1:
                loops.append(loop())
            for name in [name for name in live if name in driver.ended]:
                agent, turn, sequence = live.pop(name)
                if turn < crowd.turns:
                    said = [*sequence.request.prompt, *sequence.output]
                    sequence = driver.ask([*said, *question(agent, turn)], crowd.answer)
                    live[sequence.request.id] = agent, turn + 1, sequence
    wall = time.perf_counter() - start
    gaps = [gap * 1e3 for each in driver.gaps.values() for gap in each]
    return Result(
        compiled,
        wall,
        statistics.median(gaps),
        percentile(gaps, 0.9),
        max(gaps),
        1e3 * statistics.median(calm),
        len(times),
        len(traced),
        1e3 * statistics.median(loops),
    )


def main(arguments: list[str] | None = None) -> list[Result]:
    """Run the crowd four times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small" if on_cpu() else "8b")
    parser.add_argument("--agents", type=int, default=6 if on_cpu() else 32)
    parser.add_argument("--turns", type=int, default=2 if on_cpu() else 3)
    parser.add_argument("--shared", type=int, default=303 if on_cpu() else 7903)
    parser.add_argument("--answer", type=int, default=16 if on_cpu() else 128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    crowd = Crowd(options.agents, options.turns, options.shared, options.answer)
    _, runner = make(options.shape)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    if runner.overlaps:
        warm_up(runner, crowd.agents)  # as the daemon does by default
    print(f"{options.shape}, {mx.default_device()}, {crowd}")
    print("| steps | wall, s | gap p50, ms | p90 | longest | step without a prompt, ms | steps "
          "| traced | loop, ms |\n|---|" + "---:|" * 8)  # fmt: skip
    found = []
    for _ in range(options.rounds):
        for compiled in (True, False):
            one = talk(runner, vocab_size, crowd, compiled=compiled)
            found.append(one)
            figures = [one.wall_s, one.gap_ms, one.slow_gap_ms, one.longest_gap_ms, one.step_ms]
            cells = [f"{figure:.2f}" for figure in figures]
            cells += [str(one.steps), str(one.traced), f"{one.loop_ms:.2f}"]
            name = "compiled" if compiled else "as they are"
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1))
    return found


if __name__ == "__main__":
    main()
