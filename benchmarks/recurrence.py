"""Prompts through the gated delta rule on a CPU: in chunks, and by mlx-lm's loop, in turn.

1. One layer's rule alone, in the shapes of models.
2. The prefill of a model like Qwen3.5-0.8B with four layers, of which three have the rule: through
   `ModelRunner`, with the one and with the other.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from mlx_lm.models import gated_delta, qwen3_5
from shapes import tokens as made_up

from umbel.models.binding import bind
from umbel.models.chunked_delta import chunked_delta
from umbel.models.kv.layout import CacheLayout
from umbel.models.load.device import CPU
from umbel.models.runner import ModelRunner

LAYERS = {  # heads of keys and of values, whether each channel has a gate
    "Qwen3.5-0.8B": (16, 16, False),
    "Qwen3-Next": (16, 32, False),
    "Kimi Linear": (32, 32, True),
}
SIZE = 128
"""Of keys and values, in all of these."""

MODEL = {
    "model_type": "qwen3_5",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 8192,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": SIZE,
    "linear_value_head_dim": SIZE,
    "full_attention_interval": 4,
}
WAYS = {"loop": replace(CPU, recurrence_chunks=False), "chunks": CPU}


def main() -> None:
    """Measure, and print it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 80, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to a file")
    options = parser.parse_args()
    if mx.default_device() != mx.Device(mx.cpu):
        parser.error("it compares ways of a CPU, and MLX has another device here")
    layers = [layer(name, tokens, options.rounds) for name in LAYERS for tokens in options.tokens]
    show("one layer's rule", layers)
    runner, model = make()
    prompts = [prefill(runner, model, tokens, options.rounds) for tokens in options.tokens]
    show("prefill of four layers", prompts)
    if options.json:
        options.json.write_text(json.dumps({"layers": layers, "prefill": prompts}, indent=1))


def layer(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Time the rule alone, and look at how far the two are apart."""
    key_heads, heads, by_channel = LAYERS[name]
    mx.random.seed(0)
    normal = mx.random.normal
    q, k = gated_delta.normalize_qk(
        *(normal((1, tokens, key_heads, SIZE)) for _ in range(2)), inv_scale=SIZE**-0.5, eps=1e-6
    )
    gates = mx.random.uniform(0.8, 1, (1, tokens, heads, *([SIZE] if by_channel else [])))
    given = (
        *(q, k, normal((1, tokens, heads, SIZE)), gates),
        *(mx.sigmoid(normal((1, tokens, heads))), mx.zeros((1, heads, SIZE, SIZE))),
    )
    mx.eval(given)
    outputs: dict[str, mx.array] = {}

    def compute(way: str) -> None:
        function = chunked_delta if way == "chunks" else gated_delta.gated_delta_ops
        outputs[way], state = function(*given)
        mx.eval(outputs[way], state)

    took = in_turn(compute, rounds)
    apart = mx.abs(outputs["loop"] - outputs["chunks"]).max() / mx.abs(outputs["loop"]).max()
    return {"name": name, "tokens": tokens, **took, "apart": apart.item()}


def make() -> tuple[ModelRunner, Any]:
    """Make the model."""
    mx.random.seed(0)
    model: Any = qwen3_5.TextModel(qwen3_5.TextModelArgs.from_dict(MODEL))
    model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    text = SimpleNamespace(vocab_size=MODEL["vocab_size"])
    loaded = SimpleNamespace(model=model, layout=CacheLayout(model), text=text, device=CPU)
    return ModelRunner(cast("Any", loaded)), model


def prefill(runner: ModelRunner, model: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Time a prompt in the device's chunks."""
    prompt = made_up(tokens, cast("int", MODEL["vocab_size"]))

    def compute(way: str) -> None:
        bind(model, WAYS[way])
        cache = runner.open()
        for start in range(0, tokens, CPU.prefill_chunk):
            runner.prefill([(prompt[start : start + CPU.prefill_chunk], cache)])

    return {"name": "Qwen3.5-0.8B", "tokens": tokens, **in_turn(compute, rounds)}


def in_turn(compute: Callable[[str], None], rounds: int) -> dict[str, float]:
    """Time both ways, one after the other; medians in ms."""
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, times in took.items():
            began = time.perf_counter()
            compute(way)
            times.append((time.perf_counter() - began) * 1e3)
    return {way: statistics.median(times) for way, times in took.items()}


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    print(f"\n{title}, ms\n\n| shape | tokens | loop | chunks | ratio | apart |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        apart = f"{row['apart']:.0e}" if "apart" in row else ""
        print(
            f"| {row['name']} | {row['tokens']:,} | {row['loop']:.1f} | {row['chunks']:.1f} "
            f"| {row['loop'] / row['chunks']:.1f} | {apart} |"
        )


if __name__ == "__main__":
    main()
