"""Stored state: byte-identical when restored (L1), detached, and shared without copies."""

import random
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from umbel.models.errors import UnsupportedCacheError
from umbel.models.kv.checkpoints import PackedCheckpoint
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.spans import PackedSpan

from .. import zoo

HEADS, SIZE, WINDOW = 2, 32, 8


class Stack:
    """Stands for a model whose layers keep their state in the given caches."""

    def __init__(self, *makers: Any) -> None:
        self._makers = makers

    def make_cache(self) -> list[Any]:
        """For mlx-lm's `make_prompt_cache`."""
        return [make() for make in self._makers]


def advance(live: SequenceCache, tokens: list[int], chunk: int = 4) -> None:
    """Advance every leaf as a model would, with keys and values that name their token."""
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        for cache in live.layers:
            _advance(cache, part)
        live.add_tokens(len(part))
        mx.eval(live.arrays())


def _advance(cache: Any, part: list[int]) -> None:
    if isinstance(cache, CacheList):
        for inner in cache.caches:
            _advance(inner, part)
    elif isinstance(cache, ArraysCache):
        for token in part:
            old = cache[0] if cache[0] is not None else mx.zeros((1, SIZE))
            cache[0] = old * 0.5 + token
        cache[1] = mx.full((1, 3), float(part[-1]))
    else:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        ramp = mx.arange(SIZE) * 0.01
        keys = mx.array(part, mx.float32)[None, None, :, None] + ramp
        keys = mx.broadcast_to(keys, (1, HEADS, len(part), SIZE))
        cache.update_and_fetch(keys, -keys)


def ring(keep: int = 0) -> Any:
    """A maker of rotating caches."""
    return lambda: RotatingKVCache(WINDOW, keep)


KINDS: dict[str, list[Any]] = {
    "kv": [KVCache, KVCache],
    "ring": [ring(), ring()],
    "ring with keep": [ring(2)],
    "arrays": [lambda: ArraysCache(2)],
    "chunked": [lambda: ChunkedKVCache(WINDOW)],
    "quantised": [lambda: QuantizedKVCache(group_size=32, bits=8)],
    "list": [lambda: CacheList(ArraysCache(2), KVCache())],
    "everything": [
        KVCache,
        ring(),
        lambda: ArraysCache(2),
        lambda: CacheList(ring(1)(), KVCache()),
        lambda: ChunkedKVCache(WINDOW),
        lambda: QuantizedKVCache(group_size=32, bits=4),
    ],
}
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 3)


def raw(live: SequenceCache) -> list[Any]:
    """All arrays of a live state, whole, as bytes that can be compared."""
    values: list[Any] = []
    for cache in live.layers:
        for leaf in cache.caches if isinstance(cache, CacheList) else [cache]:
            held = leaf.cache if isinstance(leaf, ArraysCache) else leaf.keys_and_values()
            arrays: Any = tree_flatten(list(held))
            values += [np.array(array).tobytes() for _, array in arrays if array is not None]
    return values


def reopened(layout: CacheLayout, live: SequenceCache, spans: list[PackedSpan]) -> SequenceCache:
    """Store a live state and make it live again."""
    span = live.suffix_span()
    if span is not None:
        spans.append(span)
    checkpoint = live.capture() if layout.has_checkpoints else None
    return layout.open(live.offset, spans, checkpoint)


@pytest.mark.parametrize("chunk", [1, 4, 11])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_restored_state_is_byte_identical(kind: str, length: int, chunk: int) -> None:
    """A restored state has the bytes of the one saved, and goes on as it would (L1)."""
    layout = CacheLayout(Stack(*KINDS[kind]))
    live, spans = layout.open(), list[PackedSpan]()
    advance(live, list(range(length)), chunk)
    copy = reopened(layout, live, spans)
    assert copy.offset == live.offset == length
    for more in (1, 1, 5, 1, 1, WINDOW + 3, 1):
        tokens = list(range(live.offset, live.offset + more))
        advance(live, tokens, more)
        advance(copy, tokens, more)
        assert raw(copy) == raw(live)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_state_does_not_change(kind: str) -> None:
    """Stored state stays as it was while live states that were made of it continue."""
    layout = CacheLayout(Stack(*KINDS[kind]))
    live, spans = layout.open(), list[PackedSpan]()
    advance(live, list(range(WINDOW - 2)))
    span = live.suffix_span()
    spans = [] if span is None else [span]
    checkpoint = live.capture() if layout.has_checkpoints else None
    offset = live.offset
    before = raw(layout.open(offset, spans, checkpoint))
    for seed in range(3):
        branch = layout.open(offset, spans, checkpoint)
        advance(branch, [100 + seed] * 13, 1)
        advance(branch, [200 + seed] * 13)
    advance(live, [7] * 20, 1)
    assert raw(layout.open(offset, spans, checkpoint)) == before


def test_spans_cut_and_join() -> None:
    """Any cut joins to the same bytes, and each part restores by itself."""
    layout = CacheLayout(Stack(KVCache, lambda: CacheList(KVCache(), KVCache())))
    live = layout.open()
    advance(live, list(range(40)))
    expected = raw(live)
    span = live.suffix_span()
    assert span is not None
    for at in (1, 13, 39):
        left, right = span.split(at)
        assert (left.length, right.length) == (at, 40 - at)
        assert raw(layout.open(40, [left, right])) == expected
        span = left.merge(right)
        assert raw(layout.open(40, [span])) == expected


@pytest.mark.parametrize("target", [0, 1, 5, WINDOW])
def test_ring_rewinds_before_it_wraps(target: int) -> None:
    """A ring that has not wrapped restores any earlier offset as if it had stopped there."""
    layout = CacheLayout(Stack(ring(), ring(2)))
    live, short = layout.open(), layout.open()
    advance(live, list(range(WINDOW)))
    advance(short, list(range(target)), 3)
    checkpoint = live.capture()
    assert checkpoint.rewinds_to(target)
    rewound = layout.open(target, (), checkpoint)
    for part in ([50], [51, 52, 53], [54] * 9):
        advance(rewound, part)
        advance(short, part)
        assert raw(rewound) == raw(short)


def test_what_does_not_rewind() -> None:
    """A wrapped ring, a recurrent state and a chunk restore their own offset only."""
    for kind, length in (("ring", WINDOW + 1), ("arrays", 3), ("chunked", 3), ("everything", 3)):
        live = CacheLayout(Stack(*KINDS[kind])).open()
        advance(live, list(range(length)))
        checkpoint = live.capture()
        assert not checkpoint.rewinds_to(length - 1)
        assert not checkpoint.rewinds_to(length + 1)


def test_recurrent_state_keeps_its_type() -> None:
    """State that a model keeps in fp32 stays fp32, beside keys of another type."""
    layout = CacheLayout(Stack(lambda: ArraysCache(2)))
    live = layout.open()
    live.layers[0][0] = mx.zeros((1, 4), mx.float32)
    live.layers[0][1] = mx.zeros((1, 4), mx.bfloat16)
    live.add_tokens(1)
    copy = layout.open(1, (), live.capture())
    assert [slot.dtype for slot in copy.layers[0].cache] == [mx.float32, mx.bfloat16]


def test_bytes_are_their_own() -> None:
    """Stored state holds what it says it holds, and closing it frees that."""
    layout = CacheLayout(Stack(*[KVCache] * 4, *[ring()] * 4, *[lambda: ArraysCache(2)] * 4))
    live = layout.open()
    advance(live, list(range(3000)), 500)
    mx.synchronize()
    base = mx.get_active_memory()
    span, checkpoint = live.suffix_span(), live.capture()
    assert span is not None
    held = span.nbytes + checkpoint.nbytes
    assert abs(mx.get_active_memory() - base - held) < 0.03 * held + 64 * 1024
    left, right = span.split(1000)
    del span
    assert abs(mx.get_active_memory() - base - held) < 0.03 * held + 64 * 1024
    left.close()
    assert mx.get_active_memory() - base < right.nbytes + checkpoint.nbytes + 128 * 1024
    right.close()
    checkpoint.close()
    assert abs(mx.get_active_memory() - base) < 128 * 1024


def test_few_buffers() -> None:
    """Layers are packed: the number of arrays does not grow with that of layers."""
    layout = CacheLayout(Stack(*[KVCache] * 20, *[ring()] * 20, *[lambda: ArraysCache(2)] * 20))
    live = layout.open()
    advance(live, list(range(9)))
    span = live.suffix_span()
    assert span is not None
    assert len(span.arrays) == 8
    assert len(live.capture().arrays) == 3


def test_sixteen_states_share_one_prefix() -> None:
    """Sixteen sequences over one 4,000-token prefix take less than 5 % of one copy more."""
    model = zoo.make("llama")
    layout = CacheLayout(model)
    live = layout.open()
    rng = random.Random(0)  # noqa: S311  (not a secret)
    tokens = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(4000)]
    for start in range(0, 4000, 500):
        model(mx.array([tokens[start : start + 500]]), cache=live.layers)
        live.add_tokens(500)
        mx.eval(live.arrays())
    span = live.suffix_span()
    assert span is not None
    del live
    mx.clear_cache()
    base = mx.get_active_memory()
    states = [layout.open(4000, [span]) for _ in range(16)]
    mx.eval([state.arrays() for state in states])
    assert mx.get_active_memory() - base < 0.05 * span.nbytes
    assert all(state.offset == 4000 for state in states)


def test_unknown_cache_is_refused() -> None:
    """A layer with a cache of an unknown kind is named when the model is loaded."""
    with pytest.raises(UnsupportedCacheError, match="ConcatenateKVCache"):
        CacheLayout(Stack(KVCache, ConcatenateKVCache))
    with pytest.raises(UnsupportedCacheError, match="ConcatenateKVCache"):
        CacheLayout(Stack(lambda: CacheList(KVCache(), ConcatenateKVCache())))

    class Odd(KVCache):  # type: ignore[misc]  # mlx-lm is untyped
        """A subclass may mean anything."""

    with pytest.raises(UnsupportedCacheError, match="Odd"):
        CacheLayout(Stack(Odd))


@pytest.mark.parametrize("name", [*zoo.NAMES, *zoo.QUANTIZED])
def test_real_layers_restore_byte_for_byte(name: str) -> None:
    """The same with what real models write: capture, restore, capture gives equal bytes."""
    model = zoo.make(name)
    layout = CacheLayout(model)
    live, spans = layout.open(), list[PackedSpan]()
    rng = random.Random(name)  # noqa: S311  (not a secret)
    for length in (64, 36, 1, 1):
        model(mx.array([[rng.randrange(zoo.VOCAB_SIZE) for _ in range(length)]]), cache=live.layers)
        live.add_tokens(length)
        mx.eval(live.arrays())
    copy = reopened(layout, live, spans)
    for leaf in live.non_trimmable:
        if isinstance(leaf, ChunkedKVCache):
            leaf.maybe_trim_front()  # as the model's next runner would
    assert raw(copy) == raw(live)
    if layout.has_checkpoints:
        assert _bytes(copy.capture()) == _bytes(live.capture())


def _bytes(checkpoint: PackedCheckpoint) -> list[bytes]:
    return [np.array(array).tobytes() for array in checkpoint.arrays]
