"""Cost of holding an answer to a grammar: a mask a step and row, and compiling a schema.

1. Following a token and computing the next mask, for 1, 8 and 32 rows on two threads, as the engine
   does, with the embedded model's vocabulary and with a made-up one of 150,000 tokens; beside it a
   step's choice of tokens with and without masks.
2. Compiling: the vocabulary once, a new schema, and one that is known.
3. The embedded model's decode steps with and without a grammar for every row, in turn.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from umbel.cachestore.ledger import Size
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.models.load.loader import load
from umbel.models.params import Mask, Matcher, Row, SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.sampling import sample
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import JSONObject, JSONSchema
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.grammar.matcher import Grammar
from umbel.scheduler.engine import Engine
from umbel.scheduler.kv_cache_manager import KVCacheManager
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, Request
from umbel.scheduler.sequence import Sequence

ROWS = (1, 8, 32)
STEPS = 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "pattern": "^[A-Z][a-z ]+$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
LARGE = {
    "type": "object",
    "properties": {f"part {i}": PERSON for i in range(300)},
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 100_000}
"""No answer to it ends while it is measured."""


def main() -> None:
    """Measure, and print it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to a file")
    options = parser.parse_args()
    loaded = load("smollm2")
    figures: dict[str, Any] = {
        "masks": [
            *masks("SmolLM2", loaded.text),
            *masks("made up", TextCodec(cast("Any", synthetic(150_000)))),
        ],
        "compile": compiling(loaded.text),
    }
    runner = ModelRunner(loaded)
    grammar = GrammarCompiler(loaded.text).compile(JSONSchema(ENDLESS))
    figures["steps"] = [steps(runner, grammar, rows) for rows in (1, 8)]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def synthetic(size: int) -> SimpleNamespace:
    """A byte-level vocabulary of so many tokens: letters, and words that are made up of them."""
    rng = random.Random(0)  # noqa: S311  (not a secret)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    while len(vocabulary) < size - 1:
        word = "".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9)))
        vocabulary.setdefault(rng.choice(["", "Ġ"]) + word, len(vocabulary))
    vocabulary["<end>"] = len(vocabulary)
    fast = Tokenizer(BPE(vocabulary, []))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    end = {vocabulary["<end>"]}
    return SimpleNamespace(backend_tokenizer=fast, eos_token_ids=end, has_chat_template=False)


def masks(name: str, codec: TextCodec) -> list[dict[str, Any]]:
    """Time a step's masks, and the choice with and without them."""
    grammar = GrammarCompiler(codec).compile(JSONSchema(ENDLESS))
    table = []
    print(f"\n{name}, {codec.vocab_size:,} tokens\n")
    print("| rows | masks of a step, ms | of a row, µs | choice, ms | with masks, ms | ratio |")
    print("|---:|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        rng = random.Random(1)  # noqa: S311  (not a secret)
        matchers = [grammar.matcher() for _ in range(rows)]
        now = [matcher.mask() for matcher in matchers]
        took = []
        with ThreadPoolExecutor(2) as threads:
            for _ in range(STEPS):
                tokens = [_allowed(mask, rng) for mask in now]
                began = time.perf_counter()
                now = list(threads.map(_follow, matchers, tokens))
                took.append(time.perf_counter() - began)
        free, masked = _choices(codec.vocab_size, now)
        step = statistics.median(took)
        figures = {
            "vocabulary": codec.vocab_size, "rows": rows, "masks_ms": step * 1e3,
            "row_us": step / rows * 1e6, "choice_ms": free * 1e3, "masked_ms": masked * 1e3,
        }  # fmt: skip
        table.append(figures)
        print(
            f"| {rows} | {step * 1e3:.2f} | {step / rows * 1e6:.0f} "
            f"| {free * 1e3:.2f} | {masked * 1e3:.2f} | {masked / free:.2f} |"
        )
    return table


def _allowed(mask: Mask, rng: random.Random) -> int:
    tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(rng.choice(tokens))


def _follow(matcher: Matcher, token: int) -> Mask:
    matcher.consume(token)
    return matcher.mask()


def _choices(vocab_size: int, now: list[Mask]) -> tuple[float, float]:
    logits = mx.random.normal((len(now), vocab_size), key=mx.random.key(0))
    params = SamplingParams(seed=0, temperature=0.7)
    bare = [Row(params, [], []) for _ in now]
    held = [Row(params, [], [], mask) for mask in now]
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(15):
        for rows, times in zip((bare, held), took, strict=True):
            times.append(timed(lambda rows=rows: sample(logits, rows, vocab_size).read()))  # type: ignore[misc]
    return statistics.median(took[0]), statistics.median(took[1])


def compiling(codec: TextCodec) -> dict[str, float]:
    """Time the vocabulary, new schemas and known ones."""
    compiler = GrammarCompiler(codec)
    figures = {"vocabulary": timed(lambda: compiler.compile(JSONObject()))}
    for name, schema in (("small", PERSON), ("large", LARGE)):
        fresh = (JSONSchema(schema | {"title": str(i)}) for i in itertools.count())
        figures[f"{name}, new"] = _median(lambda fresh=fresh: compiler.compile(next(fresh)), 9)  # type: ignore[misc]
        known = JSONSchema(schema)
        compiler.compile(known)
        figures[f"{name}, known"] = _median(lambda known=known: compiler.compile(known), 51)  # type: ignore[misc]
    print("\n| compiling | ms |\n|---|---:|")
    for name, seconds in figures.items():
        print(f"| {name} | {seconds * 1e3:.3f} |")
    return figures


def steps(runner: ModelRunner, grammar: Grammar, rows: int) -> dict[str, Any]:
    """Time decode steps of answers with and without a grammar, in turn."""
    took: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(3):
        for name, each in (("without", None), ("with", grammar)):
            took[name] += _decode(runner, rows, each)
    medians = {name: statistics.median(times) for name, times in took.items()}
    ratio = medians["with"] / medians["without"]
    if rows == 1:
        print("\n| rows | step, ms | with a grammar, ms | ratio |\n|---:|---:|---:|---:|")
    print(
        f"| {rows} | {medians['without'] * 1e3:.1f} | {medians['with'] * 1e3:.1f} | {ratio:.3f} |"
    )
    return {"rows": rows, "ratio": ratio} | medians


def _decode(runner: ModelRunner, rows: int, grammar: Grammar | None) -> list[float]:
    cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=1 << 40)
    cache.pool.resize(Size(1 << 40, 1 << 40))
    queue, ended = ConversationQueue(64), 0

    def publish(events: Any) -> None:
        nonlocal ended
        ended += sum(
            isinstance(event, Finished) for _, event in cast("list[tuple[Any, Event]]", events)
        )

    engine = Engine(
        runner,
        KVCacheManager(runner, cache, interval=8192),
        MemoryPlanner(cache.pool, runner),
        queue,
        publish,
        eos_ids=frozenset(),
        prefill_chunk=512,
        max_batch=64,
    )
    for number in range(rows):
        sampling = SamplingParams(seed=number, temperature=0.7)
        request = Request(
            id=f"r{number}", tenant="t", conversation=f"c{number}", max_tokens=24,
            prompt=list(range(100 + number, 140 + number)), sampling=sampling,
            deadline=float("inf"), grammar=grammar,
        )  # fmt: skip
        queue.put(Sequence(request))
    times = []
    while ended < rows:
        times.append(timed(engine.step))
    return times[-20:-1]  # all rows decode by then


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _median(work: Callable[[], Any], count: int) -> float:
    return statistics.median(timed(work) for _ in range(count))


if __name__ == "__main__":
    main()
