"""Prices of steps, compared with the memory that MLX allocates."""

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.backends import choose
from umbel.models.backends.cpu import BLOCK
from umbel.models.kv.checkpoints import PackedCheckpoint
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache, flat_arrays
from umbel.models.kv.spans import PackedSpan
from umbel.models.load import memory_probe
from umbel.models.load.memory_probe import Peaks, measure_transients
from umbel.models.memory_profile import (
    GROWTH,
    Held,
    MemoryProfile,
    PlannedChunk,
    Ring,
    StateSizes,
    Transients,
)
from umbel.models.params import Row, SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.runtime import resident_bytes

from .. import zoo
from ..scenario.memory_tools import words, zoo_model
from ..shared import measured_once
from . import batch_fixture
from .steps import run

NAMES = batch_fixture.NAMES
"""Of each kind of state."""

_HEADS = 2 * 2 * 32 * 4
"""Bytes of a token in a layer of attention: keys and values, 2 heads of 32 numbers in fp32."""

_LATENT = (32 + 16) * 4
"""The same in a layer of MLA: a latent and a rotated part."""

_QUANTIZED = 2 * 2 * (32 + 2 * 4)
"""The same with 8 bits a number, and a scale and a bias for each 32."""

RING = Ring(_HEADS, zoo.WINDOW)

SIZES = {
    "llama": (2 * _HEADS, (), 4),
    "qwen3_next": (2 * _HEADS, (), 8),
    "gemma3_text": (2 * _HEADS, (RING, RING), 8),
    "gpt_oss": (2 * _HEADS, (RING, RING), 8),
    "mamba2": (0, (), 6),
    "falcon_h1": (3 * _HEADS, (), 12),
    "deepseek_v3": (3 * _LATENT, (), 6),
    "kimi_linear": (2 * _LATENT, (), 12),
    "longcat_flash": (4 * _LATENT, (), 8),
    "gemma3n": (2 * _HEADS, (RING, RING), 8),
    "gemma4_text": (2 * 2 * _HEADS, (RING, RING), 8),
    "deepseek_v32": (3 * (_LATENT + 2 * 32 * 4), (), 12),
    "gemma2": (4 * _HEADS, (), 8),
    "plamo2": (2 * _HEADS, (), 8),
    "mamba": (0, (), 6),
    "llama4": (_HEADS, (Ring(_HEADS, zoo.WINDOW, spare=GROWTH),) * 3, 8),
    "llama_kv8": (2 * _QUANTIZED, (), 12),
}
"""By the models' configs: bytes of a token, rings, and arrays."""

_RECURRENT = {"qwen3_next", "mamba2", "mamba", "falcon_h1", "kimi_linear", "plamo2"}

CHUNK = 32
LONG = 700
_RUNS = 20
"""At most, to see the highest peak of a piece of work on a busy machine."""

_SHARED_BUFFER = 16 * 1024
"""Bytes by which a buffer may be larger than the array in it before MLX copies."""

_TIGHT = [name for name in NAMES if name != "llama4"]
"""Those whose bounded layers have no spare room; mlx-lm's chunks always have."""

every_model = pytest.mark.parametrize("name", NAMES)

_KINDS = [name for name in NAMES if name not in zoo.TWINS]
"""One of each kind of state. Steps and chunks of all are held to their prices in test_plan_cost."""


@functools.cache
def measured(name: str, *, exact: bool = False) -> ModelRunner:
    """Load a model, as the daemon does; others may have tried out how it runs in batches."""
    loaded = zoo_model(name)
    with measured_once(loaded.model, called={"measure"}):
        return ModelRunner(loaded, exact=exact)


def load(name: str, *, exact: bool = False) -> ModelRunner:
    """Make a model of which nothing was learned since it was loaded."""
    runner = copy.copy(measured(name, exact=exact))
    runner.profile = copy.deepcopy(runner.profile)
    runner.use(runner.rules)  # with a batch of its own
    return runner


def profile(name: str) -> MemoryProfile:
    """Figures of a model that were measured at load."""
    return load(name).profile


def linear(base: float, token: float, context: float) -> Transients:
    """Peaks of chunks that take so much, and of each token, and of each that they look at."""
    lengths, before = (33, 512), 1024
    near, far = (
        tuple(base + token * n + context * (seen + n) for n in lengths) for seen in (0, before)
    )
    return Transients(lengths, near, far, before)


def transients_of(runner: ModelRunner) -> Transients:
    """Measured peaks of computing."""
    return runner.profile._transients


def prefill(runner: ModelRunner, cache: SequenceCache, tokens: int, chunk: int = CHUNK) -> None:
    """Advance a state in chunks."""
    prompt = words(tokens, tokens)
    for start in range(0, tokens, chunk):
        runner.prefill(prompt[start : start + chunk], cache)


def decode(
    runner: ModelRunner, caches: list[SequenceCache], steps: int = 1, *, may_copy: bool = True
) -> None:
    """Compute and sample a token for each, and wait for it."""
    rows = [
        Row(SamplingParams(seed=number, top_p=0.9), [1, 2], [3]) for number in range(len(caches))
    ]
    for _ in range(steps):
        output = run(runner, caches, [7] * len(caches), may_copy=may_copy)
        assert not output.errors
        runner.sample(output, dict(enumerate(rows))).read()


def step_need(runner: ModelRunner, caches: list[SequenceCache]) -> Held:
    """Price of a step in which each gets a token."""
    return runner.cost(runner.plan(caches))


def chunk_need(runner: ModelRunner, tokens: int, cache: SequenceCache) -> Held:
    """Price of a chunk of a prompt."""
    return runner.cost(runner.plan([], (cache, tokens)))


def shape_of(runner: ModelRunner) -> tuple[int, ...]:
    """Rows and positions of the batch."""
    assert runner.placement.batch is not None
    return runner.placement.batch.shape


def close(runner: ModelRunner, caches: list[SequenceCache]) -> None:
    """Remove them from the batch."""
    for each in caches:
        runner.placement.close(each)


def taken(work: Callable[[], object]) -> int:
    """The most that was active while something was done, over what was before.

    A prefill resets the peak, so the peak before that is noted. Nothing is in MLX's cache:
    a buffer that is reused may be two pages larger than what is asked for, which is nothing beside
    the arrays of a model that is used, and 20 % of those here.
    """
    mx.clear_cache()
    before, begin_anew, peaks = resident_bytes(), mx.reset_peak_memory, [0]

    def noted() -> None:
        peaks.append(mx.get_peak_memory())
        begin_anew()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "reset_peak_memory", noted)
        begin_anew()
        work()
        mx.synchronize()
        noted()
    return max(peaks) - before


def highest(work: Callable[[], object], enough: int) -> int:
    """The highest peak of a few runs, until one is so high.

    How much is active at a time depends on how far launching is ahead of computing: the less, the
    busier the machine. A price holds for the furthest; a single run may be a third below.
    """
    peaks = [taken(work)]
    while max(peaks) < enough and len(peaks) < _RUNS:
        peaks.append(taken(work))
    return max(peaks)


def whole_bytes(cache: SequenceCache) -> int:
    """Bytes of the arrays of rings and recurrent layers."""
    return sum(array.nbytes for leaf in cache.non_trimmable for array in flat_arrays(leaf.state))


@functools.cache
def stored(name: str, tokens: int) -> tuple[list[PackedSpan], PackedCheckpoint | None]:
    """Compute a prompt, and store its state."""
    runner = load(name)
    cache = runner.open()
    prefill(runner, cache, tokens, 256)
    checkpoint = cache.capture() if cache.non_trimmable else None
    span = cache.suffix_span()
    return [] if span is None else [span], checkpoint


def after(runner: ModelRunner, name: str, tokens: int) -> SequenceCache:
    """Make a state that resumes after a stored prompt."""
    return runner.open(tokens, *stored(name, tokens))


# -- state -------------------------------------------------------------------------------


@every_model
def test_sizes_are_those_of_the_config(name: str) -> None:
    """Bytes of a token, rings with their windows, and arrays are what the layers ask for."""
    sizes = profile(name).sizes
    assert (sizes.token, sizes.rings, sizes.arrays) == SIZES[name]
    assert (sizes.fixed > 0) == (name in _RECURRENT)


@pytest.mark.parametrize(("name", "tokens"), batch_fixture.each([1, 300]))
def test_stored_tokens_take_their_bytes(name: str, tokens: int) -> None:
    """A span of so many tokens has that many bytes, and no spare room."""
    runner = load(name)
    cache = runner.open()
    prefill(runner, cache, tokens)
    span = cache.suffix_span()
    assert (0 if span is None else span.nbytes) == runner.profile.kept(tokens)
    assert (span is None) == (name in {"mamba2", "mamba"})


@pytest.mark.parametrize(("name", "tokens"), batch_fixture.each([20, 33, 100, 256, 257]))
def test_a_running_sequence_has_no_more_than_foretold(name: str, tokens: int) -> None:
    """Tails, rings and recurrent layers hold what is estimated, and less spare room at most."""
    runner = load(name)
    sizes = runner.profile.sizes
    cache = runner.open()
    gc.collect()  # what is freed later would be taken for its
    before = resident_bytes()
    prefill(runner, cache, tokens)
    active, held = resident_bytes() - before, cache.held()
    last = (tokens - 1) % CHUNK + 1
    estimated = sizes.suffix(tokens) + sizes.non_trimmable(tokens, last)
    assert held.buffers == sizes.arrays
    assert held.nbytes <= estimated
    assert held.nbytes <= active <= held.nbytes + _SHARED_BUFFER * held.buffers
    ring = sum(ring.token for ring in sizes.rings)
    assert estimated - held.nbytes <= sizes.token * GROWTH + ring * (1 + CHUNK)


@pytest.mark.parametrize(("name", "tokens"), batch_fixture.each([2, 31, 33, 64, 90], _TIGHT))
def test_whole_states_take_what_their_window_holds(name: str, tokens: int) -> None:
    """Before and after a window is full: a ring has no more than a chunk over it."""
    runner = load(name)
    sizes = runner.profile.sizes
    cache = runner.open()
    first = tokens - tokens // 2
    for chunk, offset in ((first, first), (tokens - first, tokens)):
        runner.prefill(words(chunk, offset), cache)
        if chunk > 1:  # a ring that gets a single token makes room for more
            token_each = sum(ring.token for ring in sizes.rings)
            assert 0 <= sizes.non_trimmable(offset, chunk) - whole_bytes(cache) <= token_each
    if cache.non_trimmable:
        stored = sum(ring.token * min(tokens, ring.window) for ring in sizes.rings)
        assert cache.capture().nbytes == stored + sizes.fixed


@pytest.mark.parametrize("name", _TIGHT)
def test_decoding_leaves_a_window_and_no_more(name: str) -> None:
    """After the chunk is forgotten rings hold their windows; recurrent layers never grow."""
    runner = load(name)
    sizes = runner.profile.sizes
    cache = runner.open()
    prefill(runner, cache, 70)
    decode(runner, [cache], 3)
    windows = sum(ring.token * ring.window for ring in sizes.rings)
    assert whole_bytes(cache) == windows + sizes.fixed
    assert whole_bytes(cache) <= sizes.non_trimmable(cache.offset)
    assert sizes.non_trimmable(1 << 20) == sizes.non_trimmable(cache.offset)


def test_what_nobody_uses_is_not_taken_for_weights() -> None:
    """Garbage of the load does not make the default budget smaller at one start than at another."""

    def start() -> int:
        loaded = zoo_model("llama")
        with measured_once(loaded.model):
            return ModelRunner(loaded).resident

    before = start()
    gc.disable()
    try:
        garbage: list[object] = [mx.zeros(1 << 20)]
        mx.eval(garbage[0])
        garbage.append(garbage)
        del garbage
        assert resident_bytes() > before
        assert start() == before
    finally:
        gc.enable()


# -- computing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "within", "step"),
    [
        *itertools.product([BLOCK, 1 << 30], [0, 4], [1 << 30]),
        (1 << 30, 40, 2 * BLOCK),
    ],
)
def test_probes_are_fitted(
    block: int, within: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of a peak is a chunk's, a token's, the context's or a pair's is told apart."""
    loaded = zoo_model("llama")
    if loaded.backend.block is None:
        block, within = 1 << 30, 0  # nothing is cut there

    def peak(peaks: object, tokens: int, context: int) -> int:
        del peaks
        seen, beyond = context + tokens, max(0, min(tokens, step) - BLOCK)
        each = 200 + 5 * min(tokens, block)
        return 500_000 + 3000 * tokens + each * seen + within * beyond**2

    monkeypatch.setattr(Peaks, "once", peak)
    found = measure_transients(loaded.layout, None, loaded.backend.block)
    near = [(tokens, 0) for tokens in (1, 32, 33, 256)]
    for tokens, context in [*near, (100, 77), (128, 5000), (300, 1000)]:
        real = peak(None, tokens, context)
        assert 1.25 * real <= found.estimate(tokens, context) <= 1.25 * 1.3 * real
        assert found.worst_case(tokens, context) == found.estimate(tokens, context)
    real = peak(None, 2048, 7)  # a chunk that is longer than all that were measured
    assert real <= found.estimate(2048, 7) <= 2.5 * real


def test_long_chunks_are_tried_where_none_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = zoo_model("llama")
    tried: list[tuple[int, int]] = []

    def peak(peaks: object, tokens: int, context: int) -> int:
        del peaks
        tried.append((tokens, context))
        ahead = 1500 * tokens if tokens < 128 else 2600 * tokens - 140_000
        return 500_000 + ahead + 130 * (context + tokens)

    monkeypatch.setattr(Peaks, "once", peak)
    fitted = measure_transients(loaded.layout, None, None)
    assert max(tokens for tokens, _ in tried) >= 512
    assert max(context for _, context in tried) >= 2048
    for tokens, context in itertools.product((33, 256, 1024, 2048), (0, 8000, 16_000)):
        real = peak(None, tokens, context)
        assert real <= fitted.estimate(tokens, context) < 1.5 * real


def test_a_slow_probe_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that takes seconds for a chunk, launching is ahead as far as it can be.

    Not in the first run, in which it is the host that takes seconds.
    """
    loaded, runs, now = zoo_model("llama"), list[int](), itertools.count(step=3.0)

    def peak(peaks: Peaks, tokens: int, context: int) -> int:
        del peaks
        runs.append(tokens)
        return 500_000 + 3000 * tokens + 200 * (tokens + context) + 20_000 * (len(runs) % 5)

    monkeypatch.setattr(Peaks, "once", peak)
    monkeypatch.setattr(
        memory_probe,
        "time",
        SimpleNamespace(process_time=lambda: 0.0, monotonic=now.__next__),
    )
    measure_transients(loaded.layout, None, None)
    assert len(runs) == 2 * 4


@pytest.mark.parametrize(("each", "count"), [(0.15, 3), (0.09, 6), (0.05, 6), (0.01, 12)])
def test_a_short_probe_is_run_several_times(
    each: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a run seems to take of the processor: its peak may be low by chance."""
    loaded, runs, now = zoo_model("llama"), itertools.count(), itertools.count()

    def peak(peaks: object, tokens: int, context: int) -> int:
        del peaks, tokens, context
        return 1_000_000 - 50_000 * next(runs)  # none is as high as another

    monkeypatch.setattr(Peaks, "once", peak)
    clock = SimpleNamespace(process_time=lambda: each * next(now), monotonic=lambda: 0.0)
    monkeypatch.setattr(memory_probe, "time", clock)
    assert Peaks(loaded.layout, None)(16, 0) == 1_000_000
    assert next(runs) == count


@pytest.mark.parametrize("often", [3, 8])
def test_a_probe_that_computed_at_once_is_run_again(
    often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk takes more the further its launch is ahead; the highest peak seen is fitted."""
    loaded, times = zoo_model("llama"), itertools.count(1)

    def peak(peaks: Peaks, tokens: int, context: int) -> int:
        del peaks
        full = 500_000 + 3000 * tokens + 200 * (tokens + context)
        number = next(times)
        part = 20 if number % often == 0 else 10 + number % 7
        return full * part // 20

    monkeypatch.setattr(Peaks, "once", peak)
    fitted = measure_transients(loaded.layout, None, loaded.backend.block)
    expected = 1.25 * (500_000 + 3000 * 100 + 200 * 177 + 2**16)
    assert fitted.estimate(100, 77) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize(("name", "chunk"), batch_fixture.each([32, 300, 512]))
def test_no_chunk_takes_more_than_foretold(name: str, chunk: int) -> None:
    """From the first to the last of a long prompt, whatever the chunks' length."""
    runner = load(name)
    cache, prompt = runner.open(), words(LONG, chunk)
    for start in range(0, LONG, chunk):
        tokens = prompt[start : start + chunk]
        need = chunk_need(runner, len(tokens), cache).nbytes
        assert taken(functools.partial(runner.prefill, tokens, cache)) <= need


@every_model
def test_no_chunk_longer_than_the_measured_takes_more(name: str) -> None:
    """Masks and scores of a whole chunk grow faster than its tokens."""
    runner = load(name)
    cache = runner.open()
    need = chunk_need(runner, 1024, cache).nbytes
    assert taken(functools.partial(runner.prefill, words(1024, 1024), cache)) <= need


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_5", "qwen3_next", "falcon_h1"])
def test_no_first_chunk_takes_more_than_foretold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrences go in steps: a token more than some, and all of one, are no exceptions."""
    runner = load(name)
    for chunk in (17, 33, 65, 97, 161, 200, 256):
        monkeypatch.setattr(transients_of(runner), "_seen", {})  # nothing is learned yet
        cache = runner.open()
        need = chunk_need(runner, chunk, cache).nbytes
        assert taken(functools.partial(runner.prefill, words(chunk, chunk), cache)) <= need


@pytest.mark.parametrize(("name", "chunk"), batch_fixture.each([32, 300, 512]))
def test_little_more_than_a_chunk_takes_is_foretold(name: str, chunk: int) -> None:
    runner, prompt = load(name), words(LONG, chunk)[:chunk]
    need = chunk_need(runner, chunk, runner.open()).nbytes
    peak = highest(lambda: runner.prefill(prompt, runner.open()), need // 3 + 1)
    assert peak <= need < 3 * peak, "most of it would be idle"


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize("context", [40, LONG])
def test_a_chunk_after_what_is_leased_takes_no_more_than_foretold(name: str, context: int) -> None:
    """Reading stored keys takes memory too, though none of them is the sequence's own."""
    runner = load(name)
    cache, prompt = after(runner, name, context), words(64, context)
    need = chunk_need(runner, 64, cache).nbytes
    assert need < chunk_need(runner, 65, cache).nbytes
    assert taken(lambda: runner.prefill(prompt, cache)) <= need


@pytest.mark.parametrize(("name", "context"), batch_fixture.each([40, 246, LONG]))
def test_no_lone_step_takes_more_than_foretold(name: str, context: int) -> None:
    """Also the step with which the suffix grows, and that which puts its keys in one piece."""
    runner = load(name)
    cache = after(runner, name, context) if context == LONG else runner.open()
    prefill(runner, cache, 10 if context == LONG else context, 256)
    for _ in range(12):
        need = step_need(runner, [cache]).nbytes
        assert taken(lambda: decode(runner, [cache])) <= need


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize("count", [2, 8])
def test_no_row_computes_with_more_than_foretold(name: str, count: int) -> None:
    """A step that leaves the rows as they are needs what it computes with, for each row."""
    runner = load(name)
    caches = [after(runner, name, 40 + 9 * number) for number in range(count)]
    decode(runner, caches, 2)
    for _ in range(4):
        offset = max(each.offset for each in caches)
        need = runner.profile.compute(count, offset) + count * runner.profile.sizes.fixed
        assert need <= step_need(runner, caches).nbytes
        assert taken(lambda: decode(runner, caches)) <= need
    close(runner, caches)


@pytest.mark.parametrize("name", ["gemma2", "plamo2"])
@pytest.mark.parametrize("context", [0, LONG])
def test_what_rows_put_together_is_foretold(name: str, context: int) -> None:
    """In each layer all that rows look at, each its own and what they share; and not much less."""
    runner = load(name)
    caches = [after(runner, name, context) if context else runner.open() for _ in range(5)]
    for number, each in enumerate(caches):
        prefill(runner, each, 20 if context else 300 + 20 * number, 256)
    peaks, needs = [], []
    for _ in range(12):
        needs.append(step_need(runner, caches).nbytes)
        peaks.append(taken(lambda: decode(runner, caches)))
        assert peaks[-1] <= needs[-1]
    assert needs[-1] < 4 * max(peaks[1:]), "most of it would be idle"
    close(runner, caches)


@functools.cache
def wide(name: str, **more: int) -> ModelRunner:
    """Load a model whose window is longer than what a cache grows by."""
    layout = CacheLayout(model := zoo.make(name, **more))
    text = SimpleNamespace(vocab_size=zoo.VOCAB_SIZE)
    return ModelRunner(
        cast("Any", SimpleNamespace(model=model, layout=layout, text=text, backend=choose()))
    )


WIDE = {
    "gemma3_text": {"sliding_window": 600},
    "gpt_oss": {"sliding_window": 600},
    "llama4": {"attention_chunk_size": 300},
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("tokens", [9, 270, 420, 700])
def test_windows_that_grow_are_foretold(name: str, tokens: int) -> None:
    """A ring that is not full grows by hundreds of tokens with a single one."""
    runner = wide(name, **WIDE[name])
    cache = runner.open()
    gc.collect()
    before = resident_bytes()
    prefill(runner, cache, tokens, 90)
    for step in range(20):
        need = step_need(runner, [cache]).nbytes
        held = cache.held().nbytes
        assert taken(lambda: decode(runner, [cache])) <= need, step
        assert cache.held().nbytes <= held + need
    assert resident_bytes() - before <= runner.profile.worst_case(tokens + 20).nbytes
    single = runner.open()
    prefill(runner, single, tokens, 90)
    need = chunk_need(runner, 1, single).nbytes
    assert taken(lambda: prefill(runner, single, 1)) <= need


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2", "falcon_h1"])
def test_exact_steps_compute_with_all_their_rows(name: str) -> None:
    """However few are in use, recurrent states of the others are there too."""
    runner = load(name, exact=True)
    caches = [runner.open() for _ in range(3)]
    for each in caches:
        prefill(runner, each, 39)
    for some in (caches[:1], caches):
        step_need(runner, some)
        decode(runner, some)  # its keys were joined
        need = step_need(runner, some).nbytes
        assert taken(functools.partial(decode, runner, some)) <= need


@pytest.mark.parametrize("name", _KINDS)
def test_rows_that_widen_are_foretold(name: str) -> None:
    """Also the step in which all rows are copied, because one of them has grown."""
    runner = load(name)
    caches = [runner.open() for _ in range(5)]
    for number, each in enumerate(caches):
        prefill(runner, each, 20 + 10 * number)
    shapes = set()
    for step in range(80):
        need = step_need(runner, caches).nbytes
        assert taken(lambda: decode(runner, caches)) <= need, step
        shapes.add(shape_of(runner))
    assert len(shapes) > (not runner.profile.sizes.fixed), "nothing widened"
    close(runner, caches[1:])
    need = step_need(runner, caches[:1]).nbytes
    assert taken(lambda: decode(runner, caches[:1])) <= need, "it leaves the batch"


# -- a start -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "context"), batch_fixture.each([2, 40, LONG]))
def test_the_promise_is_kept(name: str, context: int) -> None:
    """A prompt alone, in short chunks, and the first tokens of its answer take no more."""
    runner = load(name)
    worst_case = runner.profile.worst_case(context)
    assert worst_case.buffers >= runner.profile.sizes.arrays

    def start() -> None:
        cache = runner.open()
        prefill(runner, cache, context - 1, runner.profile.least_chunk)
        decode(runner, [cache], 12)

    enough = worst_case.nbytes // 3 + 1 if context == LONG else 0
    peak = highest(start, enough)
    assert peak <= worst_case.nbytes
    assert peak >= enough, "most of the budget would be idle"


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_promise_is_kept_where_keys_are_joined(name: str) -> None:
    """An exact sequence reads a copy of its keys, and what it leases is stored beside that."""
    load(name)  # computes what is leased: it is measured now, and not while memory is watched
    runner = load(name, exact=True)
    runner.profile.least_chunk = 64
    context = 340

    def start() -> None:
        cache = after(runner, name, 300)
        prefill(runner, cache, context - 301)
        decode(runner, [cache], 3)

    worst_case = runner.profile.worst_case(context).nbytes
    assert taken(start) <= worst_case
    plain = copy.copy(runner.profile)
    plain._contiguous = False
    assert worst_case - plain.worst_case(context).nbytes == plain.sizes.suffix(context)


@pytest.mark.parametrize(("name", "known"), batch_fixture.each([40, LONG]))
def test_what_is_known_is_not_needed_again(name: str, known: int) -> None:
    """A start from stored state takes what is estimated, and that is less than all of it.

    Where its keys may be put in one piece, the step asks for more.
    """
    runner = load(name)
    cache = after(runner, name, known)
    need = runner.profile.start(101, known + 101).nbytes
    spared = runner.profile.start(known + 101, known + 101).nbytes - need
    assert spared == runner.profile.kept(known)

    def start() -> None:
        prefill(runner, cache, 100)
        decode(runner, [cache], 12, may_copy=False)

    assert taken(start) <= need


@every_model
def test_a_longer_context_is_promised_more(name: str) -> None:
    """Each token more takes something, and never less than its own keys and values."""
    known = profile(name)
    worst_cases = [known.worst_case(context).nbytes for context in range(1, 1200)]
    steps = [more - less for less, more in itertools.pairwise(worst_cases)]
    assert min(steps) >= max(1, known.sizes.token)


def test_a_token_takes_something_whatever_was_measured() -> None:
    """Of a recurrent model a longer context may be seen to take nothing, or half a byte."""
    near = transients_of(load("mamba")).near
    fitted = replace(transients_of(load("mamba")), far=tuple(peak + 200 for peak in near))
    known = MemoryProfile(profile("mamba").sizes, fitted, 99, contiguous=False, multiple=1)
    for context in (1, 2, 3, 1000):
        assert known.longest_context(known.worst_case(context).nbytes) == context


@every_model
@given(budget=st.integers(0, 1 << 34))
def test_the_longest_context_is_the_longest_that_fits(name: str, budget: int) -> None:
    """Its worst case is within the budget, and that of one token more is not."""
    known = profile(name)
    longest = known.longest_context(budget)
    assert longest == 0 or known.worst_case(longest).nbytes <= budget
    assert known.worst_case(longest + 1).nbytes > budget


@every_model
def test_a_budget_of_a_promise_holds_its_context(name: str) -> None:
    """Exactly; a byte less holds a token less, and too little holds none."""
    known = profile(name)
    for context in (1, 2, 33, 4096, 1 << 17):
        worst_case = known.worst_case(context).nbytes
        assert known.longest_context(worst_case) == context
        assert known.longest_context(worst_case - 1) == context - 1
    assert known.longest_context(0) == 0


# -- learning ----------------------------------------------------------------------------


@every_model
def test_a_higher_peak_raises_the_forecast(name: str) -> None:
    """Of every chunk and step, by as much as that one was too low, and a quarter more."""
    runner = load(name)
    learned, cache = runner.profile, runner.open()
    worst_case, context = learned.worst_case(500), learned.longest_context(1 << 28)
    before = transients_of(runner).estimate(64, 500)
    chunk, step, start = (
        learned.prefill(PlannedChunk(64, cache.offset, 0)).nbytes,
        learned.compute(3, 500),
        learned.start(64, 500).nbytes,
    )
    learned.observe(64, 500, 2 * before)
    assert transients_of(runner).estimate(64, 500) == pytest.approx(1.25 * 2 * before, abs=2)
    assert learned.prefill(PlannedChunk(64, cache.offset, 0)).nbytes > chunk
    assert learned.compute(3, 500) > step
    assert learned.start(64, 500).nbytes > start
    assert learned.worst_case(500) == worst_case, "what was admitted by it is served"
    assert learned.longest_context(1 << 28) == context


def test_a_short_chunk_does_not_raise_a_long_one_by_its_share() -> None:
    """It lacked few bytes: these are what the long one may lack, too."""
    transients = linear(0.0, 1e6, 1e5)
    short, long = transients.estimate(31, 100), transients.estimate(2048, 16_000)
    transients.observe(31, 100, 3 * short)
    assert transients.estimate(31, 100) == pytest.approx(1.25 * 3 * short, rel=1e-6)
    assert transients.estimate(8, 20) > 2 * transients.worst_case(8, 20)
    assert 0 < transients.estimate(2048, 16_000) - long <= 1.25 * 3 * short


def test_a_long_chunk_raises_short_ones_by_its_share() -> None:
    """Not by its bytes, which would be many times what a short one takes."""
    transients = linear(0.0, 1e6, 1e5)
    short, long = transients.estimate(31, 100), transients.estimate(2048, 16_000)
    transients.observe(2048, 16_000, 2 * long)
    assert transients.estimate(2048, 16_000) == pytest.approx(1.25 * 2 * long, rel=1e-6)
    assert transients.estimate(31, 100) == pytest.approx(1.25 * 2 * short, rel=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.integers(0, 1 << 15), st.integers(0, 1 << 34)),
        max_size=20,
    )
)
def test_what_was_seen_is_foretold(seen: list[tuple[int, int, int]]) -> None:
    """Whatever comes after it, within the bound; and a larger chunk is never foretold less."""
    transients = linear(1e5, 1e5, 1e4)
    for tokens, context, peak in seen:
        transients.observe(tokens, context, peak)
    for tokens, context, peak in seen:
        most = 8 / 1.25 * transients.worst_case(tokens, context)
        assert transients.estimate(tokens, context) >= min(peak, most) - 8
        assert transients.estimate(tokens, context) <= transients.estimate(tokens + 1, context)
        assert transients.estimate(tokens, context) <= transients.estimate(tokens, context + 9)


def test_a_lower_peak_changes_nothing() -> None:
    transients = linear(1e6, 1e4, 100.0)
    transients.observe(32, 100, 3 * transients.estimate(32, 100))
    raised = transients.estimate(77, 900)
    for peak in (0, 1, transients.estimate(32, 100) // 2):
        transients.observe(32, 100, peak)
        assert transients.estimate(77, 900) == raised


def test_one_odd_peak_does_not_stop_everything() -> None:
    """However high it was, the forecast grows to eight times what was fitted."""
    transients = linear(1e6, 1e4, 100.0)
    before = transients.worst_case(32, 100)
    transients.observe(32, 100, 1 << 50)
    assert transients.estimate(32, 100) == pytest.approx(8 / 1.25 * before, abs=8)
    assert transients.worst_case(32, 100) == before


def test_a_prefill_is_learned_from() -> None:
    """Where too little was estimated, the next chunk's forecast holds the one before it."""
    runner = load("llama")
    runner.profile._transients = linear(1e5, 0.0, 0.0)
    cache, again = runner.open(), runner.open()
    low = chunk_need(runner, 128, cache).nbytes
    peak = taken(lambda: prefill(runner, cache, 128, 128))
    assert low < peak <= chunk_need(runner, 128, again).nbytes


@given(
    st.integers(0, 5000),
    st.integers(1, 600),
    st.lists(st.builds(Ring, st.integers(1, 900), st.integers(1, 300), st.just(0)), max_size=4),
)
def test_more_tokens_never_take_less(tokens: int, chunk: int, rings: list[Ring]) -> None:
    """Non-trimmable states grow to their windows and a chunk, and then no more."""
    sizes = StateSizes(64, tuple(rings), 1000, 8, 1)
    now, then = sizes.non_trimmable(tokens, chunk), sizes.non_trimmable(tokens + 1, chunk)
    assert 1000 <= now <= then
    full = 1000 + sum(ring.token * (ring.window + chunk) for ring in rings)
    assert then <= full
    assert sizes.non_trimmable(10_000, chunk) == full
