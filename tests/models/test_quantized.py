"""Quantised keys and values: attention to them is mlx-lm's own, however they are cut and shared."""

from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache

from umbel.models.attention.binding import Attention
from umbel.models.attention.rows import BatchedQuantizedLayer, Step
from umbel.models.backends import choose
from umbel.models.backends.base import METAL, Backend
from umbel.models.errors import NotBatchableError, UnsupportedCacheError
from umbel.models.kv.batch_cache import BatchCache
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.length_classes import LengthClasses
from umbel.models.kv.spans import PackedSpan, in_one, pack_suffix, runs_of
from umbel.models.kv.token_layer import QuantizedTokenLayerCache
from umbel.models.load.loader import _try_quantized
from umbel.models.params import KVQuantization
from umbel.models.step_plan import Arrange, ClassShape, Seat

from .. import zoo

HEADS, KV_HEADS, SIZE, GROUP = 6, 2, 64, 32
SCALE = SIZE**-0.5
DEVICES = (choose(), replace(METAL, compiles=False))
TOLERANCE = 1e-5

Pair = tuple[mx.array, mx.array]

by_bits = pytest.mark.parametrize("bits", [4, 8])
by_device = pytest.mark.parametrize("device", DEVICES)


def random_pair(tokens: int) -> Pair:
    """Keys and values of a sequence."""
    shape = (1, KV_HEADS, tokens, SIZE)
    return mx.random.normal(shape), mx.random.normal(shape) * 3 + 1


def held(pair: Pair, bits: int) -> tuple[mx.array, ...]:
    """The six tensors that are kept of it."""
    return tuple(t for x in pair for t in mx.quantize(x, group_size=GROUP, bits=bits))


def part(pair: Pair, start: int, stop: int) -> Pair:
    """Some of its tokens."""
    keys, values = pair
    return keys[:, :, start:stop], values[:, :, start:stop]


def span(pair: Pair, start: int, stop: int, bits: int) -> PackedSpan:
    """Some of its tokens, packed."""
    return pack_suffix([[(tensor,) for tensor in held(part(pair, start, stop), bits)]])


def expected(queries: mx.array, pair: Pair, bits: int) -> mx.array:
    """mlx-lm's attention of a sequence alone."""
    cache = QuantizedKVCache(group_size=GROUP, bits=bits)
    keys, values = cache.update_and_fetch(*pair)
    output: mx.array = base.scaled_dot_product_attention(
        queries + 0, keys, values, cache=cache, scale=SCALE, mask=None
    )
    return output


@by_bits
@by_device
def test_rows_attend_as_each_alone(bits: int, device: Backend) -> None:
    """Over what they share and their own, in one batch, in two length classes."""
    mx.random.seed(bits)
    lengths = (90, 71, 57, 9)  # tokens of each row, the step's included; the last is unused
    common = random_pair(50)
    pairs = [random_pair(length) for length in lengths]
    for row in (0, 1):
        joined = zip(common, part(pairs[row], 50, lengths[row]), strict=True)
        keys, values = (mx.concatenate(list(both), axis=2) for both in joined)
        pairs[row] = keys, values
    leased = [span(common, 0, 20, bits), span(common, 20, 50, bits)]
    step = Step(device)
    step.shared = [(runs_of(leased), mx.array([0, 1]))]
    rows = LengthClasses()
    layer = BatchedQuantizedLayer(step, rows, 0, KVQuantization(bits, GROUP))
    rows.arrange(4, [ClassShape(32, 1, 32, ()), ClassShape(64, 2, 64, ())], {})
    for row, (start, seat) in enumerate([(50, Seat(64, 0)), (50, Seat(32, 0)), (0, Seat(64, 1))]):
        own = part(pairs[row], start, lengths[row] - 1)
        rows.put(row, seat, [[tensor] for tensor in held(own, bits)])
    rows.begin_step()
    newest = [part(pair, length - 1, length) for pair, length in zip(pairs, lengths, strict=True)]
    keys, values = (mx.concatenate(list(each), axis=0) for each in zip(*newest, strict=True))
    queries = mx.random.normal((4, HEADS, 1, SIZE))
    fetched, _ = layer.update_and_fetch(keys, values)
    output = layer.attend(queries, fetched, SCALE, None)
    for row in range(3):
        alone = expected(queries[row : row + 1], pairs[row], bits)
        assert mx.abs(output[row] - alone[0]).max() < TOLERANCE, row
    layer.end_step()
    rows.end_step([0, 1, 2])
    kept = held(part(pairs[1], 50, lengths[1]), bits)
    taken = [in_one(parts) for parts in rows.newest(1, lengths[1] - 50)]
    assert all(map(mx.array_equal, taken, kept))


@by_bits
@by_device
def test_a_single_token_reads_segments_where_they_lie(bits: int, device: Backend) -> None:
    """Nothing is joined: what stands for the join is NaNs here."""
    pair = random_pair(80)
    cache = QuantizedTokenLayerCache(
        QuantizedKVCache(group_size=GROUP, bits=bits),
        [held(part(pair, 0, 13), bits), held(part(pair, 13, 60), bits)],
    )
    cache.update_and_fetch(*part(pair, 60, 79))
    cache.poison_joined = True
    queries = mx.random.normal((1, HEADS, 1, SIZE))
    keys, values = cache.update_and_fetch(*part(pair, 79, 80))
    output = Attention(device)(queries, keys, values, cache, SCALE, None)
    assert mx.abs(output - expected(queries, pair, bits)).max() < TOLERANCE


@pytest.mark.parametrize("left_behind", [mx.nan, mx.inf])
def test_what_a_row_held_before_is_wiped(left_behind: float) -> None:
    """Scales and biases weigh, also those of tokens that are masked."""
    layout = CacheLayout(zoo.make("llama"), KVQuantization(8, 32))
    batch = BatchCache(layout.open().layers, choose())
    assert batch.own is not None
    shapes = (ClassShape(64, 1, 64, ()),)
    batch.arrange(Arrange(1, (), True, (), shapes, {}, 0))
    tensors = held((mx.zeros((1, 2, 3, 32)), mx.zeros((1, 2, 3, 32))), 8) * 2
    left = [[t if t.dtype == mx.uint32 else t + left_behind] for t in tensors]
    batch.put(0, Seat(64, 0), left, [])
    batch.put(0, Seat(64, 0), [], [])
    assert all(not t.any() for t in batch.own.arrays())


def test_a_model_that_attends_by_itself_is_no_batch() -> None:
    """Gathered keys are plain arrays."""
    layout = CacheLayout(zoo.make("llama"), KVQuantization(8, 32))
    with pytest.raises(NotBatchableError, match="attends by itself"):
        BatchCache(layout.open().layers, choose(), mask_axes=4)


def test_layers_are_quantised_as_asked() -> None:
    """All of them, and the setting goes with each."""
    cache = CacheLayout(zoo.make("llama"), KVQuantization(4, 32)).open()
    assert [layer.quantization for layer in cache.layers] == [KVQuantization(4, 32)] * 2


@pytest.mark.parametrize(
    ("architecture", "kept_in"),
    [
        ("gemma3_text", "RotatingKVCache"),
        ("qwen3_next", "ArraysCache"),
        ("llama4", "ChunkedKVCache"),
        ("deepseek_v32", "CacheList"),
        ("mamba2", "ArraysCache"),
    ],
)
def test_other_state_is_refused(architecture: str, kept_in: str) -> None:
    """The message says which, and what to do."""
    with pytest.raises(UnsupportedCacheError, match=rf"{kept_in}.*serve it without kv_bits"):
        CacheLayout(zoo.make(architecture), KVQuantization(8, 32))


@pytest.mark.parametrize(
    ("architecture", "group_size", "why"),
    [
        ("deepseek_v3", 32, "tuple"),
        ("gemma2", 32, "tuple"),
        ("llama", 64, "group"),
    ],
)
def test_attention_that_cannot_read_it_is_refused(
    architecture: str, group_size: int, why: str
) -> None:
    """MLA, soft caps, and heads of fewer numbers than a group: found out at load."""
    rotated = {"qk_rope_head_dim": 32} if architecture == "deepseek_v3" else {}  # as its latents
    model: Any = zoo.make(architecture, **rotated)
    layout = CacheLayout(model, KVQuantization(8, group_size))
    with pytest.raises(UnsupportedCacheError, match=rf"(?s){why}.*serve it without kv_bits"):
        _try_quantized(model, layout)


def test_attention_that_can_is_not() -> None:
    """Plain attention reads it."""
    model: Any = zoo.make("qwen3")
    _try_quantized(model, CacheLayout(model, KVQuantization(4, 32)))
