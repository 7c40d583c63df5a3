"""The budget holds at every moment, and what fits it is served."""

import gc
import time
from collections import Counter
from pathlib import Path
from re import findall
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest

from umbel.cachestore.disk import tier as disk_tier
from umbel.cachestore.disk.files import write_file
from umbel.cachestore.ledger import Kind
from umbel.cachestore.node import as_tokens
from umbel.daemon.config import Settings
from umbel.daemon.errors import StartError
from umbel.models.backends import choose
from umbel.models.kv.layout import CacheLayout
from umbel.scheduler.errors import ContextLengthExceededError, UnavailableError
from umbel.scheduler.limits import Admission
from umbel.scheduler.request import FinishReason

from .. import zoo
from ..shared import limited, shared_model
from .memory_tools import Ask, ServerFixture, Watch, agents, loners, replaced, words, zoo_model

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

_QUICK = [("llama", False), ("llama", True), ("mamba2", False), ("gemma3_text", True)]
EVERY = zoo.params(zoo.each((False, True)), _QUICK)

TOLERANCE = 1.05
_SHARED_BUFFER = 16 * 1024
"""Bytes by which a buffer may be larger than the array in it before MLX copies."""


def promised(
    name: str, tokens: int, *, exact: bool = False, model: "LoadedModel | None" = None
) -> int:
    """A budget that holds one request of so many tokens, and a quarter more.

    What steps take is measured once a model, and not the same each time: a test with a model of
    its own names it.
    """
    probe = ServerFixture(model or zoo_model(name), 1 << 30, exact=exact)
    return probe.assembly.runner.profile.worst_case(tokens).nbytes * 20 // 16


def check_budget(server: ServerFixture, asks: list[Ask]) -> None:
    """Serve requests; nothing that was ever active is beyond the budget, and all are served."""
    watch = Watch(server.assembly.runner.resident)
    with watch.on():
        told = server.serve(asks, lambda: check_ledger(server))
    assert watch.samples > 0
    assert watch.peak >= watch.seen
    assert watch.peak <= TOLERANCE * server.budget
    assert [t.error for t in told] == [None] * len(told)
    assert [len(t.tokens) for t in told] == [ask.tokens for ask in asks]
    server.check_rest()


def check_ledger(server: ServerFixture) -> None:
    """The active bytes between two steps are the ledger's."""
    mx.synchronize()
    ledger = server.assembly.cache.ledger
    slack = 0.03 * server.booked + _SHARED_BUFFER * ledger.total.buffers
    assert server.active <= server.booked + slack
    written = ledger.held(Kind.PAGING).nbytes  # perhaps, and the cache does not know it yet
    assert server.active >= server.booked - written - slack


@pytest.mark.parametrize(("name", "disk"), EVERY)
def test_the_budget_holds(name: str, *, disk: bool, tmp_path: Path) -> None:
    """Long prompts, forks and a crowd stay within budget, and the ledger is right throughout."""
    server = ServerFixture(
        zoo_model(name), promised(name, 420), disk=tmp_path / "d" if disk else None
    )
    long = min(server.limit, 420)
    base = words(long - 20, "base")
    forks = [Ask([*base[:at], *words(long - at - 16, at)], 12) for at in (10, long // 2, long - 30)]
    check_budget(server, [Ask(base, 16), *forks, Ask(base, 16)])
    check_budget(server, agents(6, user=(40, 130), answer=(20, 50), every=3))
    server.close()


@pytest.mark.parametrize("host_reads", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize(
    "name", ["llama", *[pytest.param(n, marks=pytest.mark.slow) for n in ("falcon_h1", "mamba2")]]
)
def test_the_budget_holds_on_a_slow_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, host_reads: bool
) -> None:
    """State that waits for the disk is counted: evicted state, and copies as on CUDA."""

    def write_slowly(*args: Any) -> tuple[int, bytes]:
        time.sleep(0.1)
        return write_file(*args)

    monkeypatch.setattr(disk_tier, "write_file", write_slowly)
    model = zoo_model(name, device=limited(choose(), host_reads=host_reads))
    server = ServerFixture(model, promised(name, 420, model=model), disk=tmp_path)
    check_budget(server, agents(6, user=(40, 130), answer=(20, 50), every=3))
    server.close()
    assert server.assembly.pager is not None
    assert server.assembly.pager.tier.statistics().writes > 0


@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_the_budget_holds_for_longer(name: str, times: int) -> None:
    """The same with several budgets, prompts of a thousand tokens and many at once."""
    server = ServerFixture(zoo_model(name), times * promised(name, 1200))
    check_budget(server, loners(3 * times, (1000, 300, 700), (100, 200, 50), every=5))
    check_budget(server, agents(4 * times, system=500, user=(100, 400), answer=(100,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3_text"])
def test_long_answers_end_within_the_budget(name: str) -> None:
    """A long answer's state becomes stored state without a second copy of it all."""
    server = ServerFixture(zoo_model(name), promised(name, 1100))
    check_budget(server, loners(2, (9,), (min(server.limit, 1100) - 9,)))


@pytest.mark.slow
def test_the_budget_holds_for_a_real_model(smollm2: "LoadedModel") -> None:
    """SmolLM2, with agents that have more to remember than there is room for."""
    measured = Settings().measured_folder  # by daemons: it takes longer than the rest of this
    server = ServerFixture(smollm2, "80 MiB", prefill_chunk=256, measured=measured)
    asks = [
        Ask([*words(150, "s"), *words(100 + 75 * i, i)], 12 + 4 * i, at=2 * i) for i in range(4)
    ]
    check_budget(server, asks)


def test_rows_that_are_not_needed_any_more_are_given_up() -> None:
    """After a crowd, a few go on; the memory of the others' rows is free."""
    server = ServerFixture(zoo_model("llama"), 1 << 28)
    asks = [Ask(words(5, i), 12 if i > 1 else 60) for i in range(16)]
    check_budget(server, asks)


def test_nobody_is_preempted_so_that_a_batch_can_shrink() -> None:
    """Fewer rows are a copy. Where that does not fit, all go on, and rows are given up later."""
    server = ServerFixture(zoo_model("llama"), 1 << 28)
    names = [server.send(Ask(words(5, i), 40 if i < 8 else 12)) for i in range(9)]
    server.until(lambda: server.told[names[8]].reason is not None)
    placement, runner = server.assembly.runner.placement, server.assembly.runner
    rows = placement.rows
    decode = [server.cache_of(name) for name in names[:8]]
    steady = runner.cost(runner.plan(decode, may_copy=False)).nbytes
    assert steady < runner.cost(runner.plan(decode)).nbytes
    server.assembly.cache.clear()
    server.allow((server.booked + steady) * 16 // 15 + 64)
    server.step()
    assert (server.preemptions, placement.rows) == (0, rows)
    server.allow(server.budget)
    server.step()
    assert placement.rows < rows
    server.until(lambda: server.idle)
    assert [server.told[name].error for name in names] == [None] * 9


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_exact_rows_keep_nothing_of_each_other(name: str) -> None:
    """A recurrent state that is a row of a step's does not keep the other rows in memory."""
    server = ServerFixture(zoo_model(name), 1 << 28, exact=True)
    check_budget(server, loners(2, (100, 30), (12, 6)))


def test_what_is_restored_is_freed_without_a_collector() -> None:
    """No cycle holds what a request was given: evicted state is gone at once."""
    server = ServerFixture(zoo_model("gemma3_text"), 1 << 28)
    asks = agents(3, user=(60,), answer=(5,))
    gc.collect()
    gc.disable()
    try:
        for ask in [*asks, *asks]:
            server.serve([ask])
        server.assembly.cache.clear()
        mx.synchronize()
        assert server.assembly.cache.tries.size.nbytes == 0
        assert server.active <= _SHARED_BUFFER
    finally:
        gc.enable()


def counted() -> Counter[str]:
    """Count what there is of umbel's own objects and of MLX's: other threads have theirs."""
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(k.__qualname__ for k in kinds if k.__module__.startswith(("umbel", "mlx")))


def test_four_hundred_requests_leave_no_object() -> None:
    """Neither request, nor state, nor batch is in a cycle: with the collector off none stays."""
    server = ServerFixture(zoo_model("gemma3_text"), 1 << 28, max_batch=8)

    def serve(count: int, seed: int) -> None:
        # Twenty conversations: what is remembered of each is one thing, and stays.
        asks = [
            Ask(words(6, (seed, number)), 2 + number % 3, tag=str(number % 20))
            for number in range(count)
        ]
        for start in range(0, count, 20):
            server.serve(asks[start : start + 20])
            server.assembly.cache.clear()
        for kept in (server.live, server.told, server.paces):
            kept.clear()

    serve(100, 0)
    gc.collect()
    gc.disable()
    try:
        before = counted()
        serve(400, 1)
        more = counted() - before
    finally:
        gc.enable()
    assert sum(more.values()) < 8, more.most_common(5)


# -- admission ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("llama", False),
        ("mamba2", True),
        *[
            pytest.param(name, exact, marks=pytest.mark.slow)
            for name in ("gemma3_text", "qwen3_next", "llama4", "deepseek_v3")
            for exact in (False, True)
        ],
    ],
)
def test_what_the_context_allows_is_served_whatever_is_cached(name: str, *, exact: bool) -> None:
    """However much of it is known, and however full the cache is, it is not refused."""
    server = ServerFixture(zoo_model(name), promised(name, 300, exact=exact), exact=exact)
    long = min(server.limit, 300)
    base = words(long - 8, "base")
    for at in (long - 8, 0, long - 8, 10, long // 2, long - 8, long - 12, long - 8):
        (told,) = server.serve([Ask([*base[:at], *words(long - 8 - at, at)], 8)])
        assert told.error is None, at
        assert len(told.tokens) == 8
    server.check_rest()


@pytest.mark.parametrize(
    ("prompt", "answer", "window"),
    [
        (40, 12, 512),
        pytest.param(40, 12, 1024, marks=pytest.mark.slow),
        pytest.param(380, 30, 512, marks=pytest.mark.slow),
        (380, 30, 1024),
    ],
)
def test_long_windows_are_part_of_the_promise(window: int, prompt: int, answer: int) -> None:
    """Rings of hundreds of tokens, and checkpoints of them, within a budget of one request."""
    model = shared_model(
        "gemma3_text", sliding_window=window, num_hidden_layers=12, sliding_window_pattern=6
    )
    loaded = replaced(zoo_model("gemma3_text"), model=model, layout=CacheLayout(model))
    probe = ServerFixture(loaded, 1 << 30).assembly.runner.profile
    server = ServerFixture(loaded, probe.worst_case(prompt + answer).nbytes * 20 // 16)
    asks = [Ask(words(prompt, number), answer) for number in range(3)]
    check_budget(server, [asks[0], *asks])


def test_who_does_not_fit_waits() -> None:
    """Of two that do not fit together the second starts when the first has ended."""
    server = ServerFixture(zoo_model("llama"), promised("llama", 300))
    names = [server.send(ask) for ask in loners(2, (250,), (40,))]
    server.until(lambda: server.told[names[0]].reason is not None)
    assert server.told[names[1]].cached is None
    server.until(lambda: server.idle)
    assert [server.told[name].reason for name in names] == [FinishReason.LENGTH] * 2


def test_a_budget_too_small_is_refused_with_both_figures() -> None:
    """The message says what there is and what it takes; with that, it starts."""
    with pytest.raises(StartError, match=r"cache_bytes: 100000 bytes hold no request") as failed:
        ServerFixture(zoo_model("llama"), 100_000)
    needed = int(str(failed.value).split("it takes ")[1].split()[0])
    assert ServerFixture(zoo_model("llama"), needed * 11 // 10).limit >= 32


def test_the_context_is_what_the_budget_holds() -> None:
    """More budget, more context, up to the model's."""
    limits = [ServerFixture(zoo_model("llama"), f"{mib} MiB").limit for mib in (2, 3, 6, 100)]
    assert limits == sorted(set(limits))
    assert limits[-1] == 4096


def test_short_of_memory_nobody_hangs() -> None:
    """While the system is short, requests end well or hear when to come back; then all is well."""
    server = ServerFixture(zoo_model("llama"), "24 MiB")
    asks = loners(6, (60, 300), (30, 80))
    names = [server.send(ask) for ask in asks]
    server.until(lambda: all(len(server.live[name].output) > 2 for name in names[:3]))
    server.assembly.cache.pool.shrink(0.25)
    server.until(lambda: server.idle)
    for name, ask in zip(names, asks, strict=True):
        told = server.told[name]
        if told.error is None:
            assert len(told.tokens) == ask.tokens
        else:
            assert isinstance(told.error, UnavailableError)
            assert told.error.retry_after > 0
            need, usable = [int(word) for word in str(told.error).split() if word.isdigit()]
            assert need > usable
    server.check_rest()
    server.assembly.cache.pool.shrink(1.0)
    assert all(told.error is None for told in server.serve(asks))


@pytest.mark.parametrize(
    "spare", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))], ids="{}_8th".format
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_none_is_refused_for_a_batch_that_has_become_too_large(name: str, spare: int) -> None:
    """A budget that holds one request serves a crowd in a batch of many rows."""
    server = ServerFixture(zoo_model(name), 1 << 26, max_batch=24)
    asks = loners(24, (60,), (80,))
    names = [server.send(ask) for ask in asks]
    server.until(lambda: all(len(server.live[name].output) > 2 for name in names))
    need = server.assembly.runner.profile.worst_case(60 + 80).nbytes
    server.allow(need * (8 + spare) // 8 * 16 // 15)
    server.until(lambda: server.idle)
    assert [server.told[name].error for name in names] == [None] * len(names)
    assert [len(server.told[name].tokens) for name in names] == [80] * len(names)
    assert server.preemptions <= 3 * len(asks)
    server.check_rest()


def test_what_pins_hold_is_said() -> None:
    """A request that fits only without pins is told so, and is served without them."""
    server = ServerFixture(zoo_model("llama"), promised("llama", 300))
    kept, long = words(140, "kept"), words(server.limit - 8, "long")
    server.serve([Ask([*kept, 1], 1)])
    assert server.assembly.cache.pins.pin("t", "kept", as_tokens(kept), operator=True).held == 140
    (refused,) = server.serve([Ask(long, 8)])
    assert isinstance(refused.error, UnavailableError)
    need, usable, pinned = [int(word) for word in findall(r"\d+", str(refused.error))]
    assert pinned == server.assembly.cache.pins.held_by("t") > 0
    assert need <= usable < need + pinned
    (other,) = server.serve([Ask(long, 8, tenant="other")])
    assert isinstance(other.error, UnavailableError)
    assert "pins" not in str(other.error)
    assert server.assembly.cache.pins.unpin("t", "kept")
    (told,) = server.serve([Ask(long, 8)])
    assert (told.error, len(told.tokens)) == (None, 8)


def test_what_can_never_fit_is_told_in_bytes() -> None:
    """The refusal says what the prompt would take, and what there is for it."""
    server = ServerFixture(zoo_model("llama"), promised("llama", 300))
    admission = Admission(server.limit, server.assembly.bound)
    assert admission.answer_length(server.limit - 1, None) == 1
    with pytest.raises(ContextLengthExceededError) as refused:
        admission.answer_length(server.limit, None)
    need, usable = [int(n) for n in findall(r"(\d+)(?: bytes| of cache_bytes)", str(refused.value))]
    assert usable == server.assembly.cache.pool.limit.nbytes < need
    assert need == server.assembly.runner.profile.worst_case(server.limit + 1).nbytes


def test_memory_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    """State that the disk tier is about to let go of is no reason to refuse."""
    server = ServerFixture(zoo_model("llama"), promised("llama", 300), disk=tmp_path / "disk")
    server.serve([Ask(words(280, "first"), 4)])
    for trie in server.assembly.cache.tries:
        for node in trie.nodes():
            node.writers["held"] = node.end  # type: ignore[index]
    name = server.send(Ask(words(280, "second"), 4))
    for _ in range(5):
        server.step()
    assert server.told[name].reason is None
    for trie in server.assembly.cache.tries:
        for node in trie.nodes():
            node.writers.clear()
    server.until(lambda: server.idle)
    assert server.told[name].error is None
    server.close()


# -- fairness ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("llama", 200, marks=pytest.mark.nightly),
        pytest.param("qwen3_next", 80, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 80, marks=pytest.mark.nightly),
    ],
)
def test_many_conversations_through_a_budget_of_two(name: str, count: int) -> None:
    """Every answer is right, and they start in the order in which they came."""
    asks = loners(count, (40, 90, 25), (6, 10))
    expected = ServerFixture(zoo_model(name), 1 << 30).serve(asks)
    server = ServerFixture(zoo_model(name), 2 * promised(name, 130))
    told = server.serve(asks)
    assert [t.error for t in told] == [None] * count
    assert [t.tokens for t in told] == [t.tokens for t in expected]
    assert [t.order for t in told] == sorted(t.order for t in told)
    server.check_rest()
