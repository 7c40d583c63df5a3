"""Decode steps over a shared prefix: umbel's batch, and mlx-lm's batch cache, in one run.

A model with random weights decodes greedily for several rows that share a prefix. One row is
compared with mlx-lm's `generate_step`, more with its `BatchKVCache`, which holds the prefix
once for each row.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache
from shapes import SHAPES, make, on_cpu, tokens

from umbel.models.backends.prepare import prepare, restore
from umbel.models.kv.spans import PackedSpan
from umbel.models.params import Row, SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.runtime import launch
from umbel.models.sampling import ForwardOutput, NextToken

GREEDY = SamplingParams(seed=0, temperature=0.0)
WARM_UP = 16
TABLE = {
    "8b": [
        *((1, 2048), (8, 2048), (32, 1024), (32, 2048), (8, 16384), (32, 16384)),
        *((64, 16384), (32, 65536)),
    ],
    "small": [(1, 2048), (4, 512), (8, 512), (16, 512), (16, 2048)],
}


@dataclass
class Result:
    """One way of decoding, at one size.

    Attributes:
        step_ms: median time of a step.
        kv_bytes: what keys and values take, the prefix included; None if it did not fit.
        tokens: `[rows][WARM_UP]`, the first that were chosen.
    """

    step_ms: float
    kv_bytes: int
    tokens: list[list[int]]


def prefix(runner: ModelRunner, length: int, vocab_size: int) -> PackedSpan:
    """Compute the shared prefix, once."""
    cache = runner.open()
    prompt = tokens(length, vocab_size)
    for start in range(0, length, 2048):
        runner.prefill(prompt[start : start + 2048], cache)
    return cast("PackedSpan", cache.suffix_span())


def umbel_steps(runner: ModelRunner, span: PackedSpan, first: list[int]) -> Iterator[list[int]]:
    """Decode as the engine does: the next step is launched before the last one is read."""
    caches = [runner.open(span.length, [span]) for _ in first]
    rows = {i: Row(GREEDY, [], []) for i in range(len(first))}
    tokens: list[NextToken] = list(first)

    def step() -> ForwardOutput:
        return runner.run(runner.plan(caches), caches, tokens)

    sampled = runner.sample(step(), rows)
    try:
        while True:
            tokens = [sampled.pending(place) for place in rows]
            output = step()
            yield [token.id for token in sampled.read()]
            sampled = runner.sample(output, rows)
    finally:
        for cache in caches:
            runner.placement.close(cache)


def batch_steps(model: Any, span: PackedSpan, first: list[int]) -> Iterator[list[int]]:
    """Decode with mlx-lm's batch cache, a step ahead as its generators do."""
    caches = []
    for index in range(len(model.layers)):
        single = KVCache()
        single.keys, single.values = span.layer(index)
        single.offset = span.length
        caches.append(KVCache.merge([single] * len(first)))
        mx.eval(caches[-1].state)
    chosen = mx.argmax(model(mx.array(first)[:, None], cache=caches)[:, -1], axis=-1)
    launch(chosen)
    while True:
        ahead = mx.argmax(model(chosen[:, None], cache=caches)[:, -1], axis=-1)
        launch(ahead)
        yield cast("list[int]", chosen.tolist())
        chosen = ahead


def single_steps(model: Any, span: PackedSpan, first: list[int]) -> Iterator[list[int]]:
    """Decode one stream with mlx-lm's `generate_step`."""
    caches = []
    for index in range(len(model.layers)):
        single = KVCache()
        keys, values = span.layer(index)
        single.keys, single.values = mx.contiguous(keys), mx.contiguous(values)
        single.offset = span.length
        caches.append(single)
    mx.eval([cache.state for cache in caches])
    for token, _ in generate_step(mx.array(first), model, max_tokens=-1, prompt_cache=caches):
        yield [int(token)]


def measure(steps: Callable[[], Iterator[list[int]]], count: int, held: int) -> Result | None:
    """Run some steps; None if they do not fit into memory.

    Args:
        steps: starts decoding.
        count: steps that are timed.
        held: bytes of the prefix that are held anyway and belong to what is measured.
    """
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    try:
        running = steps()
        chosen = [next(running) for _ in range(WARM_UP)]
        times = []
        for _ in range(count):
            start = time.perf_counter()
            next(running)
            times.append(time.perf_counter() - start)
        mx.synchronize()  # what a step that runs computes with is no cache
        used = mx.get_active_memory() - before + held
        running.close()  # type: ignore[attr-defined]
    except RuntimeError as error:  # what MLX raises when an allocation fails
        print(f"    {str(error)[:100]}", flush=True)
        return None
    by_row = [list(row) for row in zip(*chosen, strict=True)]
    return Result(statistics.median(times) * 1e3, used, by_row)


def compare(
    model: Any, runner: ModelRunner, rows: int, span: PackedSpan, count: int
) -> dict[str, Any]:
    """Measure both, in turn, twice where that is cheap; the better run counts."""
    first = tokens(rows, model.args.vocab_size, seed=1)
    theirs = single_steps if rows == 1 else batch_steps
    results: dict[str, list[Result]] = {"umbel": [], "mlx-lm": []}
    for _ in range(3 if rows == 1 else 1):
        ways = (
            ("umbel", lambda: umbel_steps(runner, span, first), span.nbytes),
            ("mlx-lm", lambda: theirs(model, span, first), 0),
        )
        for name, steps, held in ways:
            if name == "umbel":
                prepare(model, runner.backend)
            else:
                restore(model)
            result = measure(steps, count, held)
            if result is not None:
                results[name].append(result)
    best = {n: min(r, key=lambda x: x.step_ms) if r else None for n, r in results.items()}
    return {"rows": rows, "shared": span.length, **{n: r and asdict(r) for n, r in best.items()}}


def line(found: dict[str, Any]) -> str:
    """Write one row of the table."""
    ours, theirs = found["umbel"], found["mlx-lm"]
    rows = found["rows"]
    cells = [f"{rows} × {found['shared']:,}"]
    for way in (theirs, ours):
        cells.append(f"{way['step_ms']:.2f}" if way else "out of memory")
        cells.append(f"{rows / way['step_ms'] * 1e3:,.0f}" if way else "–")
    cells.append(f"{theirs['step_ms'] / ours['step_ms']:.2f}" if theirs else "–")
    cells += [f"{way['kv_bytes'] / 2**30:.2f}" if way else "–" for way in (theirs, ours)]
    cells.append(f"{ours['kv_bytes'] / theirs['kv_bytes']:.1%}" if theirs else "–")
    if theirs:
        pairs = [
            (a, b)
            for x, y in zip(ours["tokens"], theirs["tokens"], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        cells.append(f"{sum(a == b for a, b in pairs) / len(pairs):.0%}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small" if on_cpu() else "8b")
    parser.add_argument("--steps", type=int, default=20 if on_cpu() else 60)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    model, runner = make(options.shape)
    vocab_size = SHAPES[options.shape]["vocab_size"]
    print(
        f"{options.shape}, {mx.default_device()}, weights {mx.get_active_memory() / 2**30:.1f} GiB"
    )
    print("| rows × shared | mlx-lm, ms | tok/s | umbel, ms | tok/s | ratio "
          "| mlx-lm, KV GiB | umbel | share | same tokens |")  # fmt: skip
    print("|---|" + "---:|" * 9, flush=True)
    found = []
    for rows, shared in TABLE[options.shape]:
        prepare(model, runner.backend)
        span = prefix(runner, shared, vocab_size)
        found.append(compare(model, runner, rows, span, options.steps))
        span.close()
        print(line(found[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
