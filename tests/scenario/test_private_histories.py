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

ALONE = 1.25
"""The same for a sequence that runs alone."""
ANSWER = 24


def model(name: str, *, host_reads: bool = True) -> "LoadedModel":
    """Make a zoo model that runs as on a GPU."""
    return zoo_model(name, device=limited(AS_GPU, host_reads=host_reads))


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

    def turn(
        self, after: Callable[[], None] = lambda: None, gap: int = 0, answer: int = ANSWER
    ) -> None:
        """Send every agent's history and read an answer; the next history is longer."""
        asks = [
            Ask(list(history), answer, tag=str(number), at=gap * number)
            for number, history in enumerate(self.histories)
        ]
        told = self.server.serve(asks, after)
        assert [each.error for each in told] == [None] * len(told)
        for number, each in enumerate(told):
            self.histories[number] += [*each.tokens, *words(9, f"{number} {len(asks)}")]


def tails(server: ServerFixture) -> int:
    """Bytes that are recorded for running sequences."""
    return server.assembly.cache.ledger.held(Kind.TAIL).nbytes


@pytest.mark.parametrize(
    ("own", "most"),
    [
        pytest.param([1200] * 8, 1.5, marks=pytest.mark.slow),
        ([300, 450, 700, 900, 1100, 1700, 2500, 4000], 1.5),
        # One class of rows that are little longer than half of its longest one.
        pytest.param([1060, 1070, 1080, 1090, 1100, 1110, 1120, 2000], 2.0, marks=pytest.mark.slow),
    ],
)
def test_rows_are_little_longer_than_histories(own: list[int], most: float) -> None:
    """Bytes of running rows, room included, are at most a multiple of what their tokens take."""
    server = ServerFixture(model("llama"), 1 << 28, max_batch=8, warmup="quick")
    crowd = Crowd(server, own, shared=400)
    placement, token = server.assembly.runner.placement, server.assembly.runner.profile.sizes.token
    together = 0

    def watch() -> None:
        nonlocal together
        check_ledger(server)
        if len(placement.sequences) < len(own):
            return
        together += 1
        rows = placement.own
        assert rows is not None
        assert tails(server) <= most * token * sum(map(rows.length, placement.sequences))

    for _ in range(2):
        crowd.turn(watch, answer=40)
    assert together > ANSWER


def test_a_sequence_that_runs_alone_is_copied_once(tmp_path: Path) -> None:
    """Its keys lie in one piece, also while its prefix is written to disk."""
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
        for cache in server.engine._kv_cache.caches.values():
            assert tails(server) <= ALONE * token * cache.offset

    for _ in range(3):
        crowd.turn(watch)
        server.save()
    assert steps > ANSWER
    server.close()


def test_copies_in_the_trie_are_given_back_where_memory_is_short() -> None:
    """No sequence is preempted for state that a row has copied; it is stored at the end."""
    loaded = model("llama")
    profile = ServerFixture(loaded, 1 << 28, max_batch=8).assembly.runner.profile
    # Rows of 4 x 600 tokens beside the smaller buffer that they are copied from, and not as much
    # again in the trie.
    budget = profile.worst_case(600).nbytes + 6500 * profile.sizes.token
    server = ServerFixture(loaded, budget, max_batch=8)
    crowd = Crowd(server, [580, 590, 595, 600], shared=20)
    placement, token, least = server.assembly.runner.placement, profile.sizes.token, 1 << 62

    def watch() -> None:
        nonlocal least
        check_ledger(server)
        if len(placement.sequences) == len(crowd.histories):
            stored = server.assembly.cache.ledger.held(Kind.KV).nbytes // token
            least = min(least, stored)

    for _ in range(2):
        crowd.turn(watch)
    assert server.preemptions == 0
    assert least < 2000


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
    """State of idle agents is evicted or paged out for the running ones."""
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
