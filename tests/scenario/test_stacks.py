"""Agents whose own histories lie side by side: answered as ever, and held once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import umbel.models  # noqa: F401  (before mlx.core)
from umbel.cachestore.ledger import Kind, Size
from umbel.daemon.model_loader import shrink

from ..models.batch_fixture import STACKED
from ..shared import AS_GPU
from .memory_tools import Ask, ServerFixture, Watch, words, zoo_model
from .test_memory import TOLERANCE, check_ledger

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

ROWS = 96
"""Tokens of its own after which a row is packed here, so that what is longer is soon stacked."""
MOST = 1.25
"""What is held for state, padding included, as a multiple of what its tokens take."""
ANSWER = 24


def model(name: str, *, stacks: bool = True, host_reads: bool = True) -> "LoadedModel":
    """Make a zoo model that runs as on a GPU, with short rows."""
    device = replace(AS_GPU, row_limit=ROWS, stacks=stacks, host_reads=host_reads)
    return zoo_model(name, device=device)


class Crowd:
    """Agents that go on with their conversations, all at once.

    Attributes:
        server: that answers them.
        histories: what each sends next.

    Args:
        own: how many tokens each has of its own at the start.
        shared: how many all of them have in common.
    """

    def __init__(self, server: ServerFixture, own: list[int], shared: int = 120) -> None:
        self.server = server
        self.histories = [words(shared, "shared") + words(n, i) for i, n in enumerate(own)]

    def turn(self, after: Callable[[], None] = lambda: None, gap: int = 0) -> list[list[int]]:
        """Have all send their history and read an answer; what they send next is longer."""
        asks = [
            Ask(list(history), ANSWER, tag=str(number), at=gap * number)
            for number, history in enumerate(self.histories)
        ]
        told = self.server.serve(asks, after)
        assert [each.error for each in told] == [None] * len(told)
        for number, each in enumerate(told):
            self.histories[number] += [*each.tokens, *words(9, f"{number} {len(asks)}")]
        return [each.tokens for each in told]


def stacked(server: ServerFixture) -> int:
    """How many rows are read side by side."""
    return sum(len(stack.slots) for stack in server.assembly.runner.placement.stacks)


def tokens(server: ServerFixture) -> int:
    """How many tokens there is state of, wherever it lies; what several read counts once."""
    spans = [node.span for trie in server.assembly.cache.tries for node in trie.nodes()]
    own = [
        cache.offset - sum(span.length for span in cache.leased)
        for cache in server.engine._kv_cache.caches.values()
    ]
    return sum(span.length for span in spans if span is not None) + sum(own)


def held(server: ServerFixture) -> int:
    """Bytes that are booked for state, padding included."""
    ledger = server.assembly.governor.ledger
    return ledger.held(Kind.KV).nbytes + ledger.held(Kind.TAIL).nbytes


@pytest.mark.parametrize(
    "own",
    [
        pytest.param([1200] * 8, marks=pytest.mark.slow),
        [900, 1000, 1100, 1150, 1200, 1300, 1500, 2000],
    ],
)
def test_what_lies_side_by_side_is_held_once(own: list[int]) -> None:
    """By the books and by the allocator: padding, rows' own room and copies included."""
    server = ServerFixture(model("llama"), 1 << 28, max_batch=8, warmup="quick")
    crowd = Crowd(server, own, shared=400)
    token = server.assembly.runner.profile.sizes.token
    crowd.turn()
    together, most = 0, 0

    def watch() -> None:
        nonlocal together, most
        check_ledger(server)
        if len(server.assembly.runner.placement.sequences) < len(own):
            return
        together += 1
        most = max(most, stacked(server))
        assert held(server) <= MOST * token * tokens(server)
        assert server.active <= MOST * token * tokens(server)

    for _ in range(2):
        crowd.turn(watch)
    assert together > ANSWER
    assert most > len(own) // 2


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_what_one_alone_reads_is_held_once(name: str, tmp_path: Path) -> None:
    """It reads its prefix where it lies, also while that is written to disk."""
    server = ServerFixture(model(name), 1 << 28, disk=tmp_path, max_batch=8)
    crowd = Crowd(server, [1200], shared=400)
    token = server.assembly.runner.profile.sizes.token
    steps = 0

    def watch() -> None:
        nonlocal steps
        check_ledger(server)
        if not any(sequence.output for sequence in server.live.values()):
            return
        steps += 1
        assert held(server) <= MOST * token * tokens(server)
        assert server.active <= MOST * token * tokens(server)

    for _ in range(3):
        crowd.turn(watch)
        server.save()
    assert steps > ANSWER
    server.close()


def test_who_comes_late_is_soon_read_with_the_others() -> None:
    """No row is read apart for longer than it takes to put all of them together."""
    server = ServerFixture(model("llama"), 1 << 28, max_batch=8)
    crowd = Crowd(server, [1200] * 8, shared=400)
    apart: list[int] = []
    together = 0

    def watch() -> None:
        nonlocal together
        rows = len(server.assembly.runner.placement.sequences)
        together += rows == stacked(server) == 8
        apart.append(rows - stacked(server) if rows > 2 else 0)

    crowd.turn()
    crowd.turn(watch, gap=1)
    assert together > ANSWER // 4
    assert max(apart) <= 2
    assert sum(apart) <= 2 * len(crowd.histories) + 2


@pytest.mark.parametrize(
    "host_reads",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["in place", "copied"],
)
def test_what_is_written_to_disk_is_held_once_then(tmp_path: Path, *, host_reads: bool) -> None:
    """What was lent when it was put side by side is counted twice no longer than that."""
    loaded = model("llama", host_reads=host_reads)
    server = ServerFixture(loaded, 1 << 28, disk=tmp_path, max_batch=8)
    server.serve([Ask(words(400, "shared"), 1)])
    crowd = Crowd(server, [900, 1000, 1100, 1150, 1200, 1300, 1500, 2000], shared=400)
    placement, tries = server.assembly.runner.placement, server.assembly.cache.tries
    steps, checked, lent = 0, 0, 0

    def watch() -> None:
        nonlocal steps, checked, lent
        check_ledger(server)
        spans = [node.span for trie in tries for node in trie.nodes()]
        lent += any(span is not None and span.storage.loan is not None for span in spans)
        together = len(placement.sequences) == len(crowd.histories)
        steps = steps + 1 if together else 0
        if steps > 2 and placement.batch is not None:  # all was written before the last one
            copied = {s for stack in placement.batch.stacks._stacks for s in stack._copied}
            checked += 1
            assert all(storage.lodged for storage in copied if storage.parts)
        if together:
            server.save()

    for _ in range(3):
        crowd.turn(watch)
    assert checked > ANSWER // 2
    assert bool(lent) == host_reads
    server.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n == "llama_kv8" else []) for n in STACKED],
)
def test_answers_are_those_without_stacks(name: str) -> None:
    """Whoever comes, goes, comes back or is written to disk meanwhile, and under any budget."""
    answers, rows = [], list[int]()
    for stacks in (True, False):
        server = ServerFixture(model(name, stacks=stacks), 1 << 28, max_batch=8)
        crowd = Crowd(server, [150, 160, 170, 165, 300])

        def watch(server: ServerFixture = server) -> None:
            rows.append(stacked(server))
            check_ledger(server)

        answers.append([crowd.turn(watch, gap) for gap in (0, 0, 5)])
        assert any(rows)
        server.check_rest()
    assert answers[0] == answers[1]


# Each kind of state, and each way to the disk and without one: how state gets there is not the
# model's, so not each with each.
@pytest.mark.parametrize(
    ("name", "disk"),
    [
        ("llama", ""),
        ("llama", "in place"),
        pytest.param("llama", "copied", marks=pytest.mark.slow),
        ("deepseek_v3", "in place"),
        pytest.param("llama_kv8", "copied", marks=pytest.mark.slow),
    ],
)
def test_a_tight_budget_holds(name: str, disk: str, tmp_path: Path) -> None:
    """Stacks are given up for those who come, and what lay there is evicted or paged out."""
    folder = tmp_path / "d" if disk else None
    loaded = model(name, host_reads=disk != "copied")
    profile = ServerFixture(loaded, 1 << 28, max_batch=8).assembly.runner.profile
    budget = profile.worst_case(450).nbytes + 900 * profile.sizes.token
    server = ServerFixture(loaded, budget, disk=folder, max_batch=8)
    crowd = Crowd(server, [150, 160, 170, 165, 300, 155])
    watch, rows = Watch(server.assembly.runner.resident), list[int]()

    def note() -> None:
        check_ledger(server)
        rows.append(stacked(server))

    with watch.on():
        for gap in (0, 3, 0, 7):
            crowd.turn(note, gap)
    assert watch.peak <= TOLERANCE * server.budget
    assert any(rows)
    evictor = server.assembly.cache.evictor
    assert evictor.page_outs if disk else evictor.evictions
    server.close()


@pytest.mark.parametrize("how", ["pressure", "disk"])
def test_what_is_idle_in_a_stack_makes_room(how: str, tmp_path: Path) -> None:
    """For what is read back from disk, and for the system; those who run are answered as ever."""
    server = ServerFixture(model("llama"), 1 << 24, disk=tmp_path / "d", max_batch=8)
    crowd = Crowd(server, [300, 310, 320, 305, 315])
    crowd.turn()
    server.save()  # what is being written does not move
    asks = [Ask(list(h), 8 if n == 2 else 60) for n, h in enumerate(crowd.histories)]
    names = [server.send(ask) for ask in asks]
    runner = server.assembly.runner
    stacks = runner.placement.batch.stacks if runner.placement.batch is not None else None
    assert stacks is not None

    def one_is_idle() -> bool:
        server.save()  # nor is it evicted
        return stacks.idle and len(runner.placement.sequences) == len(asks) - 1

    server.until(one_is_idle)
    governor, before = server.assembly.governor, server.assembly.cache.tries.size.nbytes
    if how == "disk":
        assert server.assembly.pager is not None
        need = governor.room + server.assembly.cache.evictor.evictable() + Size(1)
        assert not governor.make_room(need)
        assert server.assembly.pager._page_in._make_room(need)
    else:
        shrink(server.memory, [server.assembly], 0.5)
    assert not stacks.idle
    assert server.assembly.cache.tries.size.nbytes < before
    check_ledger(server)
    governor.pool.shrink(1.0)
    server.until(lambda: server.idle)
    answers = [server.told[name] for name in names]
    assert [told.error for told in answers] == [None] * len(asks)
    plain = ServerFixture(model("llama", stacks=False), 1 << 28, max_batch=8)
    assert [told.tokens for told in answers] == [told.tokens for told in plain.serve(asks)]
    server.close()
