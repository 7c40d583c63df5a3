"""What is foretold of a model's memory, held to what MLX really allocates."""

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbel.models import footprint as module
from umbel.models.blocks import BLOCK
from umbel.models.device import device_policy
from umbel.models.footprint import (
    GROWTH,
    Footprint,
    Ring,
    StateSizes,
    Transients,
    measure_transients,
)
from umbel.models.forward import Forward
from umbel.models.layer_states import LayerStack, LiveStates, flat_arrays
from umbel.models.params import Row, SamplingParams
from umbel.models.runtime import resident_bytes
from umbel.models.spans import PackedSpan, WholeCheckpoint

from .. import zoo
from ..scenario.memory_tools import words, zoo_model
from . import party

NAMES = party.NAMES
"""Of each kind of state."""

_HEADS = 2 * 2 * 32 * 4
"""Bytes of a token in a layer of attention: keys and values, 2 heads of 32 numbers in fp32."""

_LATENT = (32 + 16) * 4
"""The same in a layer of MLA: a latent and a rotated part."""

RING = Ring(_HEADS, zoo.WINDOW)

SIZES = {
    "llama": (4 * _HEADS, (), 8),
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
}
"""By the models' configs: bytes of a token, rings, and arrays."""

_RECURRENT = {"qwen3_next", "mamba2", "mamba", "falcon_h1", "kimi_linear", "plamo2"}

CHUNK = 32
LONG = 700
_SHARED_BUFFER = 16 * 1024
"""Bytes by which a buffer may be larger than the array in it before MLX copies."""

_TIGHT = [name for name in NAMES if name != "llama4"]
"""Those whose bounded layers have no spare room; mlx-lm's chunks always have."""

every_model = pytest.mark.parametrize("name", NAMES)


@functools.cache
def measured(name: str, *, exact: bool = False) -> Forward:
    """Load a model, as the daemon does."""
    return Forward(zoo_model(name), exact=exact)


def load(name: str, *, exact: bool = False) -> Forward:
    """Make a model of which nothing was learned since it was loaded."""
    forward = copy.copy(measured(name, exact=exact))
    forward.footprint = copy.deepcopy(forward.footprint)
    return forward


def footprint(name: str) -> Footprint:
    """What was measured of a model when it was loaded."""
    return load(name).footprint


def transients_of(forward: Forward) -> Transients:
    """What was measured of computing."""
    return forward.footprint._transients


def prefill(forward: Forward, states: LiveStates, tokens: int, chunk: int = CHUNK) -> None:
    """Advance a state in chunks."""
    prompt = words(tokens, tokens)
    for start in range(0, tokens, chunk):
        forward.prefill(prompt[start : start + chunk], states)


def decode(forward: Forward, states: list[LiveStates], steps: int = 1) -> None:
    """Feed and choose a token for each, and wait for it."""
    rows = [
        Row(SamplingParams(seed=number, top_p=0.9), [1, 2], [3]) for number in range(len(states))
    ]
    for _ in range(steps):
        fed = forward.feed([(each, 7) for each in states])
        assert not fed.errors
        forward.choose(fed, dict(enumerate(rows))).read()


def taken(work: Callable[[], object]) -> int:
    """The most that was active while something was done, over what was before.

    A prefill begins the peak anew, so what it was before that is noted.
    """
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


def whole_bytes(states: LiveStates) -> int:
    """What the arrays of rings and recurrent layers take."""
    return sum(array.nbytes for leaf in states.wholes for array in flat_arrays(leaf.state))


@functools.cache
def stored(name: str, tokens: int) -> tuple[list[PackedSpan], WholeCheckpoint | None]:
    """Compute a prompt, and store its state."""
    forward = load(name)
    states = forward.open()
    prefill(forward, states, tokens, 256)
    checkpoint = states.capture() if states.wholes else None
    span = states.seal()
    return [] if span is None else [span], checkpoint


def after(forward: Forward, name: str, tokens: int) -> LiveStates:
    """Make a state that resumes after a stored prompt."""
    return forward.open(tokens, *stored(name, tokens))


# -- state -------------------------------------------------------------------------------


@every_model
def test_sizes_are_those_of_the_config(name: str) -> None:
    """Bytes of a token, rings with their windows, and arrays are what the layers ask for."""
    sizes = footprint(name).sizes
    assert (sizes.token, sizes.rings, sizes.arrays) == SIZES[name]
    assert (sizes.fixed > 0) == (name in _RECURRENT)


@pytest.mark.parametrize(("name", "tokens"), party.each([1, 300]))
def test_stored_tokens_take_their_bytes(name: str, tokens: int) -> None:
    """A span of so many tokens has that many bytes, and no spare room."""
    forward = load(name)
    states = forward.open()
    prefill(forward, states, tokens)
    span = states.seal()
    assert (0 if span is None else span.nbytes) == forward.kept_bytes(tokens)
    assert (span is None) == (name in {"mamba2", "mamba"})


@pytest.mark.parametrize(("name", "tokens"), party.each([20, 33, 100, 256, 257]))
def test_a_running_sequence_has_no_more_than_foretold(name: str, tokens: int) -> None:
    """Tails, rings and recurrent layers hold what is foretold, and less spare room at most."""
    forward = load(name)
    sizes = forward.footprint.sizes
    states = forward.open()
    gc.collect()  # what is freed later would be taken for its
    before = resident_bytes()
    prefill(forward, states, tokens)
    active, held = resident_bytes() - before, states.held()
    last = (tokens - 1) % CHUNK + 1
    foretold = sizes.tail(tokens) + sizes.whole(tokens, last)
    assert held.buffers == sizes.arrays
    assert held.nbytes <= foretold
    assert held.nbytes <= active <= held.nbytes + _SHARED_BUFFER * held.buffers
    ring = sum(ring.token for ring in sizes.rings)
    assert foretold - held.nbytes <= sizes.token * GROWTH + ring * (1 + CHUNK)


@pytest.mark.parametrize(("name", "tokens"), party.each([2, 31, 33, 64, 90], _TIGHT))
def test_whole_states_take_what_their_window_holds(name: str, tokens: int) -> None:
    """Before and after a window is full: a ring has no more than a chunk over it."""
    forward = load(name)
    sizes = forward.footprint.sizes
    states = forward.open()
    first = tokens - tokens // 2
    for chunk, offset in ((first, first), (tokens - first, tokens)):
        forward.prefill(words(chunk, offset), states)
        if chunk > 1:  # a ring that gets a single token makes room for more
            token_each = sum(ring.token for ring in sizes.rings)
            assert 0 <= sizes.whole(offset, chunk) - whole_bytes(states) <= token_each
    if states.wholes:
        stored = sum(ring.token * min(tokens, ring.window) for ring in sizes.rings)
        assert states.capture().nbytes == stored + sizes.fixed


@pytest.mark.parametrize("name", _TIGHT)
def test_decoding_leaves_a_window_and_no_more(name: str) -> None:
    """After the chunk is forgotten rings hold their windows; recurrent layers never grow."""
    forward = load(name)
    sizes = forward.footprint.sizes
    states = forward.open()
    prefill(forward, states, 70)
    decode(forward, [states], 3)
    windows = sum(ring.token * ring.window for ring in sizes.rings)
    assert whole_bytes(states) == windows + sizes.fixed
    assert whole_bytes(states) <= sizes.whole(states.offset)
    assert sizes.whole(1 << 20) == sizes.whole(states.offset)


def test_what_nobody_uses_is_not_taken_for_weights() -> None:
    """Garbage of the load does not make the default budget smaller at one start than at another."""
    before = Forward(zoo_model("llama")).resident
    gc.disable()
    try:
        garbage: list[object] = [mx.zeros(1 << 20)]
        mx.eval(garbage[0])
        garbage.append(garbage)
        del garbage
        assert resident_bytes() > before
        assert Forward(zoo_model("llama")).resident == before
    finally:
        gc.enable()


# -- computing ---------------------------------------------------------------------------


@pytest.mark.parametrize("within", [0, 4])
@pytest.mark.parametrize("block", [BLOCK, 1 << 30])
def test_probes_are_fitted(block: int, within: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of a peak is a chunk's, a token's, the context's or a pair's is told apart."""
    loaded = zoo_model("llama")
    if loaded.device.fused:
        block, within = 1 << 30, 0  # nothing is cut there, and longer chunks are not tried

    def peak(stack: object, feed: object, tokens: int, context: int) -> int:
        del stack, feed
        seen, beyond = context + tokens, max(0, tokens - BLOCK)
        each = 200 + 5 * min(tokens, block)
        return 500_000 + 3000 * tokens + each * seen + within * beyond**2

    monkeypatch.setattr(module, "_peak", peak)
    fitted = measure_transients(loaded.stack, None, loaded.device)
    for tokens, context in ((1, 0), (32, 0), (100, 77), (128, 5000), (300, 1000), (2048, 7)):
        measured_now = peak(None, None, tokens, context) + 2**16
        assert fitted.expected(tokens, context) == pytest.approx(1.25 * measured_now, abs=2)
        assert fitted.promised(tokens, context) == fitted.expected(tokens, context)


def test_a_probe_that_computed_at_once_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk takes more the further its launch is ahead; the highest peak seen is fitted."""
    loaded, times = zoo_model("llama"), itertools.count(1)

    def peak(stack: object, feed: object, tokens: int, context: int) -> int:
        del stack, feed
        full = 500_000 + 3000 * tokens + 200 * (tokens + context)
        return full if next(times) % 3 == 0 else full // 2

    monkeypatch.setattr(module, "_peak", peak)
    fitted = measure_transients(loaded.stack, None, loaded.device)
    expected = 1.25 * (500_000 + 3000 * 100 + 200 * 177 + 2**16)
    assert fitted.expected(100, 77) == pytest.approx(expected, abs=2)


def test_a_mask_of_a_whole_chunk_is_foretold() -> None:
    """What llama4 makes of a chunk's own pairs at once is not cut with its attention."""
    forward = load("llama4")
    assert (transients_of(forward).within > 0) == (not device_policy().fused)
    assert transients_of(load("llama")).within == 0


@pytest.mark.parametrize(("name", "chunk"), party.each([32, 300, 512]))
def test_no_chunk_takes_more_than_foretold(name: str, chunk: int) -> None:
    """From the first to the last of a long prompt, whatever the chunks' length."""
    forward = load(name)
    states, prompt = forward.open(), words(LONG, chunk)
    for start in range(0, LONG, chunk):
        tokens = prompt[start : start + chunk]
        need = forward.chunk_need(len(tokens), states).nbytes
        peak = taken(functools.partial(forward.prefill, tokens, states))
        assert peak <= need
        assert start or need < 3 * peak, "most of it would be idle"


@pytest.mark.parametrize(("name", "context"), party.each([40, LONG]))
def test_a_chunk_after_what_is_leased_takes_no_more_than_foretold(name: str, context: int) -> None:
    """Reading stored keys takes memory too, though none of them is the sequence's own."""
    forward = load(name)
    states, prompt = after(forward, name, context), words(64, context)
    need = forward.chunk_need(64, states).nbytes
    assert need < forward.chunk_need(65, states).nbytes
    assert taken(lambda: forward.prefill(prompt, states)) <= need


@pytest.mark.parametrize(("name", "context"), party.each([40, 246, LONG]))
def test_no_lone_step_takes_more_than_foretold(name: str, context: int) -> None:
    """Also the step with which the tail grows. To join its keys a sequence asks for more."""
    forward, asked = load(name), [0]

    def may_join(nbytes: int) -> bool:
        asked.append(nbytes)
        return True

    forward._may_join = may_join
    states = after(forward, name, context) if context == LONG else forward.open()
    prefill(forward, states, 10 if context == LONG else context, 256)
    for _ in range(12):
        need = forward.step_need([states]).nbytes
        asked.clear()
        peak = taken(lambda: decode(forward, [states]))
        assert peak <= need + sum(asked)


@pytest.mark.parametrize(("name", "count"), party.each([2, 8]))
def test_no_row_computes_with_more_than_foretold(name: str, count: int) -> None:
    """A step that leaves the rows as they are needs what it computes with, for each row."""
    forward = load(name)
    states = [after(forward, name, 40 + 9 * number) for number in range(count)]
    decode(forward, states, 2)
    for _ in range(4):
        offset = max(each.offset for each in states)
        need = forward.footprint.compute(count, offset) + count * forward.footprint.sizes.fixed
        assert need <= forward.step_need(states).nbytes
        assert taken(lambda: decode(forward, states)) <= need
    for each in states:
        each.close()


@pytest.mark.parametrize("name", ["gemma2", "plamo2"])
@pytest.mark.parametrize("context", [0, LONG])
def test_what_rows_put_together_is_foretold(name: str, context: int) -> None:
    """In each layer all that rows look at, each its own and what they share; and not much less."""
    forward = load(name)
    states = [after(forward, name, context) if context else forward.open() for _ in range(5)]
    for number, each in enumerate(states):
        prefill(forward, each, 20 if context else 300 + 20 * number, 256)
    peaks, needs = [], []
    for _ in range(12):
        needs.append(forward.step_need(states).nbytes)
        peaks.append(taken(lambda: decode(forward, states)))
        assert peaks[-1] <= needs[-1]
    assert needs[-1] < 4 * max(peaks[1:]), "most of it would be idle"
    for each in states:
        each.close()


@functools.cache
def wide(name: str, **more: int) -> Forward:
    """Load a model whose window is longer than what a cache grows by."""
    stack = LayerStack(model := zoo.make(name, **more))
    text = SimpleNamespace(vocab_size=zoo.VOCAB_SIZE)
    return Forward(
        cast("Any", SimpleNamespace(model=model, stack=stack, text=text, device=device_policy()))
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
    forward = wide(name, **WIDE[name])
    states = forward.open()
    gc.collect()
    before = resident_bytes()
    prefill(forward, states, tokens, 90)
    for step in range(20):
        need = forward.step_need([states]).nbytes
        held = states.held().nbytes
        assert taken(lambda: decode(forward, [states])) <= need, step
        assert states.held().nbytes <= held + need
    assert resident_bytes() - before <= forward.promise(tokens + 20).nbytes
    single = forward.open()
    prefill(forward, single, tokens, 90)
    need = forward.chunk_need(1, single).nbytes
    assert taken(lambda: prefill(forward, single, 1)) <= need


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "mamba2", "falcon_h1"])
def test_exact_steps_compute_with_all_their_rows(name: str) -> None:
    """However few are in use, recurrent states of the others are there too."""
    forward = load(name, exact=True)
    states = [forward.open() for _ in range(3)]
    for each in states:
        prefill(forward, each, 39)
    for some in (states[:1], states):
        forward.step_need(some)
        decode(forward, some)  # its keys were joined
        need = forward.step_need(some).nbytes
        assert taken(functools.partial(decode, forward, some)) <= need


@pytest.mark.parametrize("name", party.NAMES)
def test_rows_that_widen_are_foretold(name: str) -> None:
    """Also the step in which all rows are copied, because one of them has grown."""
    forward = load(name)
    states = [forward.open() for _ in range(5)]
    for number, each in enumerate(states):
        prefill(forward, each, 20 + 10 * number)
    shapes = set()
    for step in range(80):
        need = forward.step_need(states).nbytes
        assert taken(lambda: decode(forward, states)) <= need, step
        shapes.add(forward._open_rows().shape)
    assert len(shapes) > (not forward.footprint.sizes.fixed), "nothing widened"
    for each in states[1:]:
        each.close()
    need = forward.step_need(states[:1]).nbytes
    assert taken(lambda: decode(forward, states[:1])) <= need, "it stands up"


# -- a start -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "context"), party.each([2, 40, LONG]))
def test_the_promise_is_kept(name: str, context: int) -> None:
    """A prompt alone, in short chunks, and the first tokens of its answer take no more."""
    forward = load(name)
    promise = forward.promise(context)
    assert promise.buffers >= forward.footprint.sizes.arrays

    def start() -> None:
        states = forward.open()
        prefill(forward, states, context - 1, forward.footprint.least_chunk)
        decode(forward, [states], 12)

    peak = taken(start)
    assert peak <= promise.nbytes
    assert context < LONG or promise.nbytes < 3 * peak, "most of the budget would be idle"


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_promise_is_kept_where_keys_are_joined(name: str) -> None:
    """An exact sequence reads a copy of its keys, and what it leases is stored beside that."""
    forward = load(name, exact=True)
    forward.footprint.least_chunk = 64
    context = 340

    def start() -> None:
        states = after(forward, name, 300)
        prefill(forward, states, context - 301)
        decode(forward, [states], 3)

    promise = forward.promise(context).nbytes
    assert taken(start) <= promise
    plain = copy.copy(forward.footprint)
    plain._joins = False
    assert promise - plain.promise(context).nbytes == plain.sizes.tail(context)


@pytest.mark.parametrize(("name", "known"), party.each([40, LONG]))
def test_what_is_known_is_not_needed_again(name: str, known: int) -> None:
    """A start from stored state takes what is foretold, and that is less than all of it.

    To join its keys a sequence asks for more.
    """
    forward, asked = load(name), [0]

    def may_join(nbytes: int) -> bool:
        asked.append(nbytes)
        return True

    forward._may_join = may_join
    states = after(forward, name, known)
    need = forward.start_need(101, known + 101).nbytes
    spared = forward.start_need(known + 101, known + 101).nbytes - need
    assert spared == forward.kept_bytes(known)

    def start() -> None:
        prefill(forward, states, 100)
        decode(forward, [states], 12)

    assert taken(start) <= need + sum(asked)


@every_model
def test_a_longer_context_is_promised_more(name: str) -> None:
    """Each token more takes something, and never less than its own keys and values."""
    foretold = footprint(name)
    promises = [foretold.promise(context).nbytes for context in range(1, 1200)]
    steps = [more - less for less, more in itertools.pairwise(promises)]
    assert min(steps) >= max(1, foretold.sizes.token)


@settings(deadline=None)  # models are loaded
@given(st.sampled_from(party.NAMES), st.integers(0, 1 << 34))
def test_the_longest_context_is_the_longest_that_fits(name: str, budget: int) -> None:
    """Its promise is within the budget, and that of one token more is not."""
    foretold = footprint(name)
    longest = foretold.longest_context(budget)
    assert longest == 0 or foretold.promise(longest).nbytes <= budget
    assert foretold.promise(longest + 1).nbytes > budget


@every_model
def test_a_budget_of_a_promise_holds_its_context(name: str) -> None:
    """Exactly; a byte less holds a token less, and too little holds none."""
    foretold = footprint(name)
    for context in (1, 2, 33, 4096, 1 << 17):
        promise = foretold.promise(context).nbytes
        assert foretold.longest_context(promise) == context
        assert foretold.longest_context(promise - 1) == context - 1
    assert foretold.longest_context(0) == 0


# -- learning ----------------------------------------------------------------------------


@every_model
def test_a_higher_peak_raises_the_forecast(name: str) -> None:
    """Of every chunk and step, by as much as that one was too low, and a quarter more."""
    forward = load(name)
    learned, states = forward.footprint, forward.open()
    promise, context = learned.promise(500), learned.longest_context(1 << 28)
    before = transients_of(forward).expected(64, 500)
    chunk, step, start = (
        learned.chunk(64, states).nbytes,
        learned.compute(3, 500),
        learned.start(64, 500).nbytes,
    )
    learned.observe(64, 500, 2 * before)
    assert transients_of(forward).expected(64, 500) == pytest.approx(1.25 * 2 * before, abs=2)
    assert learned.chunk(64, states).nbytes > chunk
    assert learned.compute(3, 500) > step
    assert learned.start(64, 500).nbytes > start
    assert learned.promise(500) == promise, "what was admitted by it is served"
    assert learned.longest_context(1 << 28) == context


def test_a_lower_peak_changes_nothing() -> None:
    """What was seen once may come again."""
    transients = Transients(1e6, 1e4, 100.0, 1.0)
    transients.observe(32, 100, 3 * transients.expected(32, 100))
    raised = transients.expected(77, 900)
    for peak in (0, 1, transients.expected(32, 100) // 2):
        transients.observe(32, 100, peak)
        assert transients.expected(77, 900) == raised


def test_one_odd_peak_does_not_stop_everything() -> None:
    """However high it was, the forecast grows to eight times what was fitted."""
    transients = Transients(1e6, 1e4, 100.0, 1.0)
    before = transients.promised(32, 100)
    transients.observe(32, 100, 1 << 50)
    assert transients.expected(32, 100) == pytest.approx(8 / 1.25 * before, abs=8)
    assert transients.promised(32, 100) == before


def test_a_prefill_is_learned_from() -> None:
    """Where too little was foretold, the next chunk's forecast holds the one before it."""
    forward = load("llama")
    forward.footprint._transients = Transients(1e5, 0.0, 0.0, 0.0)
    states, again = forward.open(), forward.open()
    low = forward.chunk_need(128, states).nbytes
    peak = taken(lambda: prefill(forward, states, 128, 128))
    assert low < peak <= forward.chunk_need(128, again).nbytes


@given(
    st.integers(0, 5000),
    st.integers(1, 600),
    st.lists(st.builds(Ring, st.integers(1, 900), st.integers(1, 300), st.just(0)), max_size=4),
)
def test_more_tokens_never_take_less(tokens: int, chunk: int, rings: list[Ring]) -> None:
    """Whole states grow to their windows and a chunk, and then no more."""
    sizes = StateSizes(64, tuple(rings), 1000, 8)
    now, then = sizes.whole(tokens, chunk), sizes.whole(tokens + 1, chunk)
    assert 1000 <= now <= then
    full = 1000 + sum(ring.token * (ring.window + chunk) for ring in rings)
    assert then <= full
    assert sizes.whole(10_000, chunk) == full
