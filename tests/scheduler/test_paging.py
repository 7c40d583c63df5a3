"""The disk as the engine uses it: what goes wrong there is the disk's own."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.cachestore.fakes import KV, NAMESPACE
from tests.cachestore.pager_tools import PagedWorld
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.node import TrieNode, as_tokens, size_in_memory
from umbel.cachestore.paging import page_out
from umbel.cachestore.paging.page_out import _DIRTY_SHARE
from umbel.models.params import SamplingParams
from umbel.scheduler.paging import Paging
from umbel.scheduler.request import Request
from umbel.scheduler.sequence import Sequence


@pytest.fixture
def world(tmp_path: Path) -> Iterator[PagedWorld]:
    """Three nodes, of which the first two are on disk only, and the last in memory only."""
    with PagedWorld(KV, tmp_path / "disk") as made:
        made.serve(range(60))
        made.page_out()
        made.serve(range(100, 130))
        yield made


def paging(world: PagedWorld) -> Paging:
    """State that the engine would use."""
    return Paging(world.pager)


def sequence(end: int) -> Sequence:
    """A request for the beginning of what is on disk."""
    return Sequence(
        Request(
            id="r",
            tenant=NAMESPACE.tenant,
            conversation="c",
            prompt=list(range(end)),
            max_tokens=1,
            sampling=SamplingParams(seed=0),
            deadline=float("inf"),
        )
    )


def broken(*_: object, **__: object) -> None:
    """Raise an error that no code expects."""
    raise ZeroDivisionError("by a mistake")


@pytest.mark.parametrize("where", ["step", "wait_for"])
def test_a_failure_turns_the_disk_off(
    world: PagedWorld, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on, the status says why, and nothing is held for the disk any more."""
    engine, asking = paging(world), sequence(50)
    world.tier.slow = True  # what is being written stays so
    assert engine.page_in(asking)
    engine.step()
    (node,) = [n for trie in world.cache.tries for n in trie.nodes() if n.writers]
    world.cache.evict(0)
    assert node.span is not None, "it is held until it is written"
    read = engine.page_ins
    owner = world.pager if where == "step" else world.pager.page_in
    monkeypatch.setattr(owner, where, broken)
    if where == "step":
        assert engine.step() is False
    assert not engine.page_in(asking)
    told = world.tier.statistics()
    assert (told.state, told.reason) == ("off", "it failed: ZeroDivisionError: by a mistake")
    assert engine.step() is False
    assert engine.page_ins == read
    world.cache.evict(0)
    assert world.cache.tries.size.nbytes == 0
    assert world.cache.ledger.held(Kind.PAGING) == Size()
    assert not world.pager.write_all()


def test_without_a_disk_nobody_waits() -> None:
    """A cache in memory only has nothing to be read."""
    engine = Paging(None)
    assert engine.step() is False
    assert not engine.page_in(sequence(50))
    assert engine.page_ins == 0


def test_nobody_waits_for_ever_for_what_is_paged_out_again(world: PagedWorld) -> None:
    """A sequence asks four times, and makes do then; another one has a count of its own."""
    engine, asking, other = paging(world), sequence(50), sequence(50)
    for _ in range(3):
        assert engine.page_in(asking)
        assert engine.page_in(asking), "it is under way, and is not counted"
        page_in = world.pager.page_in
        while not engine.page_ins or page_in.request(NAMESPACE, asking.tokens).name != "NOTHING":
            assert world.tier.flush(10)
            engine.step()
        world.page_out()
    assert not engine.page_in(asking)
    assert not engine.page_in(asking)
    assert engine.page_in(other)
    del asking, other
    assert not world.pager.page_in._reads, "a count goes with whom it is of"


def test_state_on_disk_is_waited_for(world: PagedWorld) -> None:
    """Until it is in memory; a request for something else is not kept waiting."""
    engine = paging(world)
    assert not engine.page_in(sequence(0))
    asking = sequence(50)
    for _ in range(500):
        if not engine.page_in(asking):
            break
        assert world.tier.flush(10)
        engine.step()
    assert engine.page_ins == 1
    assert world.probe(as_tokens(range(50)).tolist())[1] == 49


class Busy:
    """State that comes step by step, while sequences run.

    Args:
        world: what the engine would use.
    """

    def __init__(self, world: PagedWorld) -> None:
        world.write_all()
        self.world = world
        self.engine = paging(world)
        self._starts = count(1000, 100)

    def writes(self, *, busy: bool = True) -> bool:
        """Add a node, make a step, and return True if a node was handed over in it."""
        start = next(self._starts)
        self.world.serve(range(start, start + 30))
        before = len(self.world.tier.jobs)
        self.engine.step(busy=busy)
        assert self.world.tier.flush(10)
        return len(self.world.tier.jobs) > before

    def set_limit(self, nodes: float) -> None:
        """Make a sixteenth of the budget as large as so many of the nodes."""
        node = next(node for trie in self.world.cache.tries for node in trie.persistence.dirty)
        assert node.span is not None
        nbytes = int(_DIRTY_SHARE * nodes * node.span.nbytes)
        self.world.cache.pool.resize(Size(nbytes, self.world.memory.buffers))


def test_state_is_written_when_the_engine_is_idle(world: PagedWorld) -> None:
    """Not beside sequences that run; then all of it is."""
    made = Busy(world)
    assert not made.writes()
    assert not made.writes()
    assert made.engine.unwritten
    assert made.writes(busy=False)
    assert not made.writes()
    while made.engine.unwritten:
        made.engine.step()
        assert world.tier.flush(10)
    made.engine.step()
    assert not any(trie.persistence.dirty for trie in world.cache.tries)


def test_a_clean_stop_writes_everything(world: PagedWorld) -> None:
    made = Busy(world)
    assert not made.writes()
    world.write_all()
    world.restart()
    world.fetch(range(1000, 1030))
    assert world.probe(range(1000, 1030))[1] == 29


def test_more_than_a_sixteenth_of_the_budget_is_written_beside_requests(world: PagedWorld) -> None:
    made = Busy(world)
    assert not made.writes()
    made.set_limit(3)
    assert not made.writes()
    assert not made.writes()
    assert made.writes()


def test_a_smaller_budget_has_a_smaller_limit(world: PagedWorld) -> None:
    """Though nothing has come since the dirty bytes were counted."""
    made = Busy(world)
    world.tier.slow = True
    assert not made.writes()
    made.set_limit(0.99)
    before = len(world.tier.jobs)
    made.engine.step(busy=True)
    assert len(world.tier.jobs) > before


def test_dirty_bytes_are_counted_after_a_change(
    world: PagedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in each step: a crowd leaves hundreds of nodes, and goes on."""
    made, counted = Busy(world), list[object]()

    def size(node: TrieNode) -> Size:
        counted.append(node)
        return size_in_memory(node)

    monkeypatch.setattr(page_out, "size_in_memory", size)
    for number in range(1, 4):
        assert not made.writes()
        for _ in range(5):
            made.engine.step(busy=True)
        assert len(counted) == number, "each dirty node once"
        counted.clear()
