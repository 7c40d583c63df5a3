"""Conversations of many lengths, with attention in a few shapes and in the shape of each turn.

    uv run python benchmarks/attention_plans.py            # a GPU, Llama-3.1-8B's shapes

On CUDA MLX plans attention for each shape that it meets (`models/backends/cuda/planned.py`). Each
conversation begins with a prompt of another length, computed chunk by chunk, and each of its turns
brings another number of tokens. Both ways compute the same; their shapes differ, so that neither
finds plans of the other. Random weights.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from shapes import SHAPES, make, on_cpu, tokens

from umbel.models.backends.base import Backend
from umbel.models.backends.cuda import CUDA, Cuda
from umbel.models.backends.prepare import prepare
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.spans import PackedSpan
from umbel.models.runner import ModelRunner

TURN = 20, 400
"""Tokens that a turn brings: at least, and below."""


class Unplanned(Cuda):
    """CUDA's operations, but attention as MLX computes it: in each shape."""

    attend = Backend.attend


UNPLANNED = Unplanned()


@dataclass
class Result:
    """Times of conversations, one way of attention.

    Attributes:
        few: whether attention was padded to a few shapes.
        wall_s: of all.
        chunk_ms: a chunk of the prompts, the median.
        first_ms: a turn of the first conversation, the median.
        last_ms: of the last one.
    """

    few: bool
    wall_s: float
    chunk_ms: float
    first_ms: float
    last_ms: float


def talk(
    runner: ModelRunner, vocab_size: int, lengths: list[int], chunk: int
) -> tuple[list[float], list[float]]:
    """Compute a prompt and what each turn adds to it.

    Returns:
        Milliseconds of the prompt's chunks, and of each turn's call.
    """
    length, *turns = lengths
    prompt, cache = tokens(length, vocab_size, seed=length), runner.open()
    chunks = [timed(runner, prompt[at : at + chunk], cache) for at in range(0, length, chunk)]
    spans, calls = [stored(cache)], []
    for turn in turns:
        cache = runner.open(cache.offset, spans)
        calls.append(timed(runner, tokens(turn, vocab_size, seed=turn), cache))
        spans = [*spans, stored(cache)]
    return chunks, calls


def stored(cache: SequenceCache) -> PackedSpan:
    """Copy what a sequence has computed into a span."""
    return cast("PackedSpan", cache.suffix_span())


def timed(runner: ModelRunner, part: list[int], cache: Any) -> float:
    """Milliseconds until a chunk is computed."""
    start = time.perf_counter()
    runner.prefill(part, cache)
    return 1e3 * (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> list[Result]:
    """Compute the same conversations both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small" if on_cpu() else "8b")
    parser.add_argument("--conversations", type=int, default=2 if on_cpu() else 6)
    parser.add_argument("--turns", type=int, default=3 if on_cpu() else 20)
    parser.add_argument("--most", type=int, default=600 if on_cpu() else 16_000, help="tokens")
    parser.add_argument("--chunk", type=int, default=256 if on_cpu() else 2048)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    model, runner = make(options.shape)
    vocab_size, backend = SHAPES[options.shape]["vocab_size"], runner.backend
    rng = random.Random(0)  # noqa: S311  (not a secret)
    conversations = [
        [rng.randrange(options.most // 2, options.most)]
        + [rng.randrange(*TURN) for _ in range(options.turns)]
        for _ in range(options.conversations)
    ]
    print(
        f"{options.shape}, {mx.default_device()}, {options.conversations} × {options.turns} turns"
    )
    print("| attention | all, s | chunk, median, ms | turn, first conversation, median, ms "
          "| last |\n|---|" + "---:|" * 4)  # fmt: skip
    found = []
    for few in (True, False):
        prepare(model, CUDA if few else UNPLANNED)
        talk(runner, vocab_size, [options.chunk, *TURN], options.chunk)  # kernels are loaded
        start = time.perf_counter()
        times = [talk(runner, vocab_size, each, options.chunk) for each in conversations]
        wall = time.perf_counter() - start
        chunk = statistics.median(ms for chunks, _ in times for ms in chunks)
        first, last = (statistics.median(calls) for _, calls in (times[0], times[-1]))
        found.append(one := Result(few, wall, chunk, first, last))
        name = "in few shapes" if few else "in each shape"
        cells = [one.wall_s, one.chunk_ms, one.first_ms, one.last_ms]
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)
    prepare(model, backend)
    if options.out:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1))
    return found


if __name__ == "__main__":
    main()
