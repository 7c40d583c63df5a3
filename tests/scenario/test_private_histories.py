"""Agents with long private histories: state is held once, and any budget is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import umbel.models  # noqa: F401  (before mlx.core)
from umbel.cachestore.ledger import Kind

from ..shared import AS_GPU, limited
from .memory_tools import Ask, ServerFixture, Watch, words, zoo_model
from .test_memory import TOLERANCE, check_ledger

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

ROWS = 96
"""Tokens of its own after which a row is packed here, so that longer histories are spans."""
MOST = 1.25
"""What is held for state, rows' room included, as a multiple of what its tokens take."""
ANSWER = 24


def model(name: str, *, host_reads: bool = True) -> "LoadedModel":
    """Make a zoo model that runs as on a GPU, with short rows."""
    return zoo_model(name, device=limited(AS_GPU, row_limit=ROWS, host_reads=host_reads))


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

    def turn(self, after: Callable[[], None] = lambda: None, gap: int = 0) -> None:
        """Have all send their history and read an answer; what they send next is longer."""
        asks = [
            Ask(list(history), ANSWER, tag=str(number), at=gap * number)
            for number, history in enumerate(self.histories)
        ]
        told = self.server.serve(asks, after)
        assert [each.error for each in told] == [None] * len(told)
        for number, each in enumerate(told):
            self.histories[number] += [*each.tokens, *words(9, f"{number} {len(asks)}")]


def tokens(server: ServerFixture) -> int:
    """How many tokens there is state of, wherever it lies; what several read counts once."""
    spans = [node.span for trie in server.assembly.cache.tries for node in trie.nodes()]
    own: list[int] = [
        cache.offset - sum(span.length for span in cache.leased)
        for cache in server.engine._kv_cache.caches.values()
    ]
    return sum(span.length for span in spans if span is not None) + sum(own)


def held(server: ServerFixture) -> int:
    """Bytes that are booked for state."""
    ledger = server.assembly.governor.ledger
    return ledger.held(Kind.KV).nbytes + ledger.held(Kind.TAIL).nbytes


@pytest.mark.parametrize(
    "own",
    [
        pytest.param([1200] * 8, marks=pytest.mark.slow),
        [900, 1000, 1100, 1150, 1200, 1300, 1500, 2000],
    ],
)
def test_private_histories_are_held_once(own: list[int]) -> None:
    """By the books and by the allocator: rows' own room and copies included."""
    server = ServerFixture(model("llama"), 1 << 28, max_batch=8, warmup="quick")
    crowd = Crowd(server, own, shared=400)
    token = server.assembly.runner.profile.sizes.token
    crowd.turn()
    together = 0

    def watch() -> None:
        nonlocal together
        check_ledger(server)
        if len(server.assembly.runner.placement.sequences) < len(own):
            return
        together += 1
        assert held(server) <= MOST * token * tokens(server)
        assert server.active <= MOST * token * tokens(server)

    for _ in range(2):
        crowd.turn(watch)
    assert together > ANSWER


def test_what_one_alone_reads_is_held_once(tmp_path: Path) -> None:
    """It reads its prefix where it lies, also while that is written to disk."""
    server = ServerFixture(model("llama"), 1 << 28, disk=tmp_path, max_batch=8)
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
    """What idle agents left is evicted or paged out for those who run."""
    folder = tmp_path / "d" if disk else None
    loaded = model(name, host_reads=disk != "copied")
    profile = ServerFixture(loaded, 1 << 28, max_batch=8).assembly.runner.profile
    budget = profile.worst_case(450).nbytes + 900 * profile.sizes.token
    server = ServerFixture(loaded, budget, disk=folder, max_batch=8)
    crowd = Crowd(server, [150, 160, 170, 165, 300, 155])
    watch = Watch(server.assembly.runner.resident)
    with watch.on():
        for gap in (0, 3, 0, 7):
            crowd.turn(lambda: check_ledger(server), gap)
            if disk:
                server.save()  # agents rest between turns, and what they left is written
    assert watch.peak <= TOLERANCE * server.budget
    tries = server.assembly.cache.tries
    assert tries.page_outs if disk else tries.evictions
    server.close()
