"""Cost of a newcomer for decoding sequences: joining a batch, and a long prompt.

Drives the engine itself over a model with random weights.

1. A batch of 8 with contexts of their own decodes; a ninth joins whose context is cached, so
   that joining is all it costs, and leaves again. The slowest of its first four steps, and of the
   four from its last on, is compared with the steps just before it came, time and again: soon after
   the one before it left, and later.
2. Eight streams decode over a shared prefix; 32 requests (`--arrivals`) come at once, with 70
   tokens of their own each after it. The time until all of them have their first token is
   compared with steady steps of all: so many of them each has cost, and so many are the streams'
   gaps.
3. Four streams decode; a long prompt arrives. The longest gap between two tokens of one stream
   is compared with the stall bound and a steady step.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from shapes import SHAPES, make, on_cpu, tokens

from umbel.cachestore.ledger import Size
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.models.params import SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.warmup import warm_up
from umbel.scheduler.engine import Engine
from umbel.scheduler.kv_cache_manager import KVCacheManager
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, Request, TokenEvent
from umbel.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

JOINS = 8
STREAMS, OWN = 8, 70
ROUNDS = 3
PAUSES = (10, 100)


class Driver:
    """An engine that is stepped by hand, and the times of what came out of it."""

    def __init__(self, runner: ModelRunner, *, max_stall: float, prefill_chunk: int) -> None:
        self._queue = ConversationQueue(64)
        self._numbers = itertools.count()
        cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=1 << 40)
        cache.pool.resize(Size(1 << 40, 1 << 40))
        self.gaps: dict[str, list[float]] = {}
        self.begun: set[str] = set()
        self.ended: set[str] = set()
        self._last: dict[str, float] = {}
        self.engine = Engine(
            runner,
            KVCacheManager(runner, cache, interval=8192),
            MemoryPlanner(cache.pool, runner),
            self._queue,
            self._publish,
            eos_ids=frozenset(),
            prefill_chunk=prefill_chunk,
            max_batch=64,
            max_stall=max_stall,
        )

    def ask(self, prompt: list[int], answer: int) -> Sequence:
        """Send a request."""
        name = f"r{next(self._numbers)}"
        sampling = SamplingParams(seed=0, temperature=0.0)
        sequence = Sequence(
            Request(
                id=name,
                tenant="t",
                conversation=name,
                prompt=prompt,
                max_tokens=answer,
                sampling=sampling,
                deadline=float("inf"),
            )
        )
        self._queue.put(sequence)
        return sequence

    def step(self) -> float:
        """Do a step; returns its seconds."""
        start = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - start

    def drain(self) -> None:
        """Step until nothing is left."""
        while self.engine.step():
            pass

    def _publish(self, events: Any) -> None:
        now = time.perf_counter()
        pair: tuple[Sequence, Event]
        for pair in events:
            sequence, event = pair
            name = sequence.request.id
            if isinstance(event, Finished):
                self.ended.add(name)
            elif isinstance(event, TokenEvent):
                self.begun.add(name)
                if name in self._last:
                    self.gaps.setdefault(name, []).append(now - self._last[name])
                self._last[name] = now


def join(runner: ModelRunner, vocab_size: int, context: int, pause: int) -> dict[str, Any]:
    """Measure the steps around a newcomer's first, time and again.

    Each is compared with the steps just before it: the machine is not equally fast all the time.

    Args:
        runner: the model.
        vocab_size: of it.
        context: tokens of each sequence.
        pause: steps from one newcomer's last to the next one's first.
    """
    driver = Driver(runner, max_stall=0.2, prefill_chunk=2048)
    prompts = [tokens(context, vocab_size, seed=i) for i in range(9)]
    driver.ask(prompts[8], 1)
    driver.drain()  # its state is cached now
    for prompt in prompts[:8]:
        driver.ask(prompt, 10_000)
    while len(driver.gaps) < len(prompts) - 1:
        driver.step()
    steady, ratios, left = [], [], []
    for _ in range(JOINS):
        before = [driver.step() for _ in range(pause)]
        steady.append(statistics.median(before[-10:]))
        guest = driver.ask(prompts[8], 12)
        ratios.append(max(driver.step() for _ in range(4)) / steady[-1])
        last = 0.0
        while guest.request.id not in driver.ended:
            last = driver.step()
        left.append(max(last, *[driver.step() for _ in range(3)]) / steady[-1])
    return {
        "pause": pause,
        "steady_ms": statistics.median(steady) * 1e3,
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "ratio_of_leaving": statistics.median(left),
        "ratios_of_leaving": [round(ratio, 2) for ratio in left],
    }


def arrive(runner: ModelRunner, vocab_size: int, shared: int, count: int) -> dict[str, Any]:
    """Measure how requests come at once, computed together and one by one, in turns.

    Args:
        runner: the model.
        vocab_size: of it.
        shared: tokens of the prefix that all read.
        count: requests that come.
    """
    driver = Driver(runner, max_stall=0.2, prefill_chunk=2048)
    prefix = tokens(shared, vocab_size, seed=1)
    driver.ask(prefix, 1)
    driver.drain()
    for seed in range(STREAMS):
        driver.ask([*prefix, *tokens(OWN, vocab_size, seed=100 + seed)], 1 << 20)
    while len(driver.gaps) < STREAMS:
        driver.step()
    seeds = itertools.count(1000)
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS + 1):
        guests = [[*prefix, *tokens(OWN, vocab_size, seed=next(seeds))] for _ in range(count)]
        rounds.append(arrival(driver, guests))
    found = {
        name: round(statistics.median(one[name] for one in rounds[1:]), 2) for name in rounds[0]
    }
    return {"shared": shared, **found}


def arrival(driver: Driver, prompts: list[list[int]]) -> dict[str, float]:
    """Submit requests at once beside streams, and wait until they end."""
    driver.gaps.clear()
    guests = {driver.ask(prompt, 30).request.id for prompt in prompts}
    start, steps = time.perf_counter(), 0
    while not guests <= driver.begun:
        driver.step()
        steps += 1
    wall = time.perf_counter() - start
    gaps = [gap for name in driver.gaps.keys() - guests for gap in driver.gaps[name]]
    steady = statistics.median(driver.step() for _ in range(10))
    while not guests <= driver.ended:
        driver.step()
    return {
        "until_all_began_ms": wall * 1e3,
        "steps": steps,
        "steady_ms": steady * 1e3,
        "each_in_steps": wall / len(prompts) / steady,
        "median_gap_in_steps": statistics.median(gaps) / steady,
        "longest_gap_in_steps": max(gaps) / steady,
    }


def stall(
    runner: ModelRunner, vocab_size: int, long: int, bound: float, chunk: int
) -> dict[str, float]:
    """Measure the longest gap of streams while a long prompt is computed."""
    driver = Driver(runner, max_stall=bound, prefill_chunk=chunk)
    streams = [driver.ask(tokens(500, vocab_size, seed=i), 100_000) for i in range(4)]
    while len(driver.gaps) < len(streams):
        driver.step()
    prompt = tokens(long, vocab_size, seed=99)  # no stream shall wait for this
    steady = statistics.median(driver.step() for _ in range(30))
    driver.gaps.clear()
    guest = driver.ask(prompt, 1)
    start = time.perf_counter()
    while guest.request.id not in driver.ended:
        driver.step()
    gaps = [gap for name in driver.gaps for gap in driver.gaps[name]]
    return {
        "prompt_tokens": long,
        "prefill_chunk": chunk,
        "bound_ms": bound * 1e3,
        "steady_step_ms": steady * 1e3,
        "longest_gap_ms": max(gaps) * 1e3,
        "median_gap_ms": statistics.median(gaps) * 1e3,
        "prefill_s": time.perf_counter() - start,
    }


def main() -> None:
    """Run all three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small" if on_cpu() else "8b")
    parser.add_argument("--context", type=int, default=1000 if on_cpu() else 8000)
    parser.add_argument("--long", type=int, default=4000 if on_cpu() else 32_000)
    parser.add_argument("--arrivals", type=int, default=6 if on_cpu() else 32)
    parser.add_argument("--only", choices=["join", "arrive", "stall"], help="one of the three")
    parser.add_argument("--stall-ms", type=float, default=200)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    _, runner = make(options.shape)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    bound = options.stall_ms / 1e3
    if runner.overlaps:
        warm_up(runner, 32, chunk=512)  # as the daemon does by default
    parts: dict[str, Callable[[], Any]] = {
        "join": lambda: [join(runner, vocab_size, options.context, pause) for pause in PAUSES],
        "arrive": lambda: arrive(runner, vocab_size, options.context, options.arrivals),
        "stall": lambda: [stall(runner, vocab_size, options.long, bound, c) for c in (512, 2048)],
    }
    chosen = [options.only] if options.only else list(parts)
    found = {"device": str(mx.default_device()), **{name: parts[name]() for name in chosen}}
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
