"""Cost of a look-up, a lease, a restore and a close, by the size of the trie.

    uv run python benchmarks/prefix_cache.py [--entries 1000] [--length 32000]

Times are the medians of many runs; compare them within one run only. mlx-lm's prompt cache
is measured beside it on the case that its search is worst at: a stored entry of the same
length that parts from the prompt early.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from pretended import Pretended

from umbel.cachestore.node import Tokens, as_tokens
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.cachestore.tries import Namespace
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.spans import PackedSpan

NAMESPACE = Namespace("tenant")
VOCABULARY = 50_000


def median_ms(fn: Callable[[], Any], runs: int = 51) -> float:
    """Time a call; the median in milliseconds."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def filled(entries: int, length: int, rng: np.random.Generator) -> tuple[PrefixCache, list[Tokens]]:
    """Fill a cache with long prompts that share their first tenth."""
    cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=1 << 62)
    shared = rng.integers(0, VOCABULARY, length // 10, np.int32)
    prompts = []
    for _ in range(entries):
        own = rng.integers(0, VOCABULARY, length - len(shared), np.int32)
        prompts.append(np.concatenate([shared, own]))
        lease = cache.begin(NAMESPACE, prompts[-1])
        lease.close(prompts[-1], Pretended(length - lease.cached, 0))
    return cache, prompts


def look_up(length: int, sizes: list[int], rng: np.random.Generator) -> None:
    """Look-up, lease and close against the number of entries."""
    print(f"\nprompts of {length} tokens: ms")
    columns = ("entries", "look-up", "of a list", "lease + close", "close, 64 new")
    print("".join(f"{column:>14}" for column in columns))
    for entries in sizes:
        cache, prompts = filled(entries, length, rng)
        print(f"{entries:14}", *_costs(cache, prompts[entries // 2], rng), sep="")


def _costs(cache: PrefixCache, prompt: Tokens, rng: np.random.Generator) -> Iterator[str]:
    trie, listed = dict(cache.tries.items())[NAMESPACE], prompt.tolist()
    for call in (
        lambda: trie.match(prompt),
        lambda: trie.match(as_tokens(listed)),
        lambda: cache.begin(NAMESPACE, prompt).close(),
        lambda: _extend(cache, prompt, rng),
    ):
        yield f"{median_ms(call):14.3f}"


def _extend(cache: PrefixCache, prompt: Tokens, rng: np.random.Generator) -> None:
    longer = np.concatenate([prompt, rng.integers(0, VOCABULARY, 64, np.int32)])
    lease = cache.begin(NAMESPACE, longer)
    lease.close(longer, Pretended(len(longer) - lease.cached, 0))


def against_mlx_lm(length: int, rng: np.random.Generator) -> None:
    """The same look-up in mlx-lm's prompt cache, in turn with ours."""
    stored = rng.integers(0, VOCABULARY, length, np.int32)
    prompt = stored.copy()
    prompt[50:] = rng.integers(0, VOCABULARY, length - 50, np.int32)
    cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=1 << 62)
    cache.begin(NAMESPACE, stored).close(stored, Pretended(length, 0))
    theirs = LRUPromptCache()
    model = tiny()
    state = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=state)
    theirs.insert_cache("model", stored.tolist(), state)
    listed = prompt.tolist()
    ours_ms = median_ms(lambda: cache.begin(NAMESPACE, prompt).close())
    theirs_ms = median_ms(lambda: theirs.fetch_nearest_cache("model", listed), runs=5)
    print(f"\none stored entry that parts from the prompt after 50 of {length} tokens: ms")
    print(f"umbel {ours_ms:.3f}   mlx-lm {theirs_ms:.1f}   ratio {theirs_ms / ours_ms:.0f}")


def tiny() -> Any:
    """A small random llama."""
    arguments = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
    }
    return llama.Model(llama.ModelArgs.from_dict(arguments))


def restore(lengths: list[int]) -> None:
    """Match, lease and make live, with real state, against the length of the prefix."""
    model = tiny()
    layout = CacheLayout(model)
    print("\nreal state, 8 layers: match + lease + make live, per prefix length: ms")
    first = None
    for length in lengths:
        live = layout.open()
        tokens = np.random.default_rng(length).integers(0, 512, length, np.int32)
        for start in range(0, length, 400):
            part = mx.array(tokens[None, start : start + 400])
            model(part, cache=live.layers)
            live.add_tokens(part.shape[1])
            mx.eval(live.arrays())
        cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=1 << 62)
        cache.begin(NAMESPACE, tokens).close(tokens, live.suffix_span())
        prompt = np.append(tokens, np.int32(1))
        before = mx.get_active_memory()
        ms = median_ms(partial(_resume, layout, cache, prompt), 301)
        first = first or ms
        grown = mx.get_active_memory() - before
        print(f"{length:8} {ms:9.3f}   {ms / first:5.2f}x of the first   {grown} bytes kept")


def _resume(layout: CacheLayout, cache: PrefixCache, prompt: Tokens) -> None:
    with cache.begin(NAMESPACE, prompt) as lease:
        spans = [span for span in lease.spans() if isinstance(span, PackedSpan)]
        layout.open(lease.cached, spans)


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--length", type=int, default=32_000)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes = sorted({1, max(1, arguments.entries // 10), arguments.entries})
    look_up(arguments.length, sizes, rng)
    against_mlx_lm(arguments.length, rng)
    restore([400, 4000])


if __name__ == "__main__":
    main()
