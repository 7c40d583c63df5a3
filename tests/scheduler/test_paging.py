"""The disk as the engine uses it: what goes wrong there is the disk's own."""

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.cachestore.fakes import KV, NAMESPACE
from tests.cachestore.pager_tools import PagedWorld
from tests.fakes import FakeClock
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.node import TrieNode, as_tokens, size_in_memory
from umbel.cachestore.paging import page_out
from umbel.cachestore.paging.page_out import _LITTLE, _PAUSE
from umbel.cachestore.pins import Pins
from umbel.models.params import SamplingParams
from umbel.scheduler.paging import _CALM, _LONG_PATIENCE, _PATIENCE, Paging
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
    """What the engine would use."""
    return Paging(world.pager, Pins(world.cache, NAMESPACE.fingerprint, world.tier))


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
    """Fail in a way that nobody foresaw."""
    raise ZeroDivisionError("by a mistake")


@pytest.mark.parametrize("where", ["step", "wait_for"])
def test_a_failure_turns_the_disk_off(
    world: PagedWorld, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on, the status says why, and nothing is held for the disk any more."""
    engine, asking = paging(world), sequence(50)
    world.tier.slow = True  # what is being written stays so
    assert engine.wait_for(asking, NAMESPACE)
    engine.step()
    (node,) = [n for trie in world.cache.tries for n in trie.nodes() if n.writers]
    world.cache.evictor.evict(0)
    assert node.span is not None, "it is held until it is written"
    read = engine.page_ins
    monkeypatch.setattr(world.pager, where, broken)
    if where == "step":
        assert engine.step() is False
    assert not engine.wait_for(asking, NAMESPACE)
    told = world.tier.statistics()
    assert (told.state, told.reason) == ("off", "it failed: ZeroDivisionError: by a mistake")
    assert engine.step() is False
    assert engine.page_ins == read
    world.cache.evictor.evict(0)
    assert world.cache.tries.size.nbytes == 0
    assert world.cache.ledger.held(Kind.PAGING) == Size()
    assert not world.pager.write_all()


def test_without_a_disk_nobody_waits(world: PagedWorld) -> None:
    """A cache in memory only has nothing to be read."""
    engine = Paging(None, Pins(world.cache, NAMESPACE.fingerprint, None))
    assert engine.step() is False
    assert not engine.wait_for(sequence(50), NAMESPACE)
    assert engine.page_ins == 0


def test_nobody_waits_for_ever_for_what_is_paged_out_again(world: PagedWorld) -> None:
    """A sequence asks four times, and makes do then; another one has a count of its own."""
    engine, asking, other = paging(world), sequence(50), sequence(50)
    for _ in range(3):
        assert engine.wait_for(asking, NAMESPACE)
        assert engine.wait_for(asking, NAMESPACE), "it is under way, and is not counted"
        while (
            not engine.page_ins or world.pager.request(NAMESPACE, asking.tokens).name != "NOTHING"
        ):
            assert world.tier.flush(10)
            engine.step()
        world.page_out()
    assert not engine.wait_for(asking, NAMESPACE)
    assert not engine.wait_for(asking, NAMESPACE)
    assert engine.wait_for(other, NAMESPACE)
    del asking, other
    assert not world.pager._retries._begun, "a count goes with whom it is of"


def test_state_on_disk_is_waited_for(world: PagedWorld) -> None:
    """Until it is in memory; a request for something else is not kept waiting."""
    engine = paging(world)
    assert not engine.wait_for(sequence(0), NAMESPACE)
    asking = sequence(50)
    for _ in range(500):
        if not engine.wait_for(asking, NAMESPACE):
            break
        assert world.tier.flush(10)
        engine.step()
    assert engine.page_ins == 1
    assert world.probe(as_tokens(range(50)).tolist())[1] == 49


class Disturbed:
    """State that comes step by step, beside one who decodes.

    Args:
        world: what the engine would use.
    """

    def __init__(self, world: PagedWorld) -> None:
        self.clock = FakeClock()
        self.world = world
        pins = Pins(world.cache, NAMESPACE.fingerprint, world.tier)
        self.engine = Paging(world.pager, pins, self.clock)
        self._starts = count(1000, 100)

    def goes(
        self,
        *,
        after: float = 0.0,
        stirs: bool = True,
        others: bool = True,
        several: bool = False,
    ) -> bool:
        """Whether something is handed over in a step, before which something new has come."""
        self.clock.advance(after)
        start = next(self._starts)
        self.world.serve(range(start, start + 30))
        before = len(self.world.tier.jobs)
        self.engine.step(stirs=stirs, others=others, several=several)
        assert self.world.tier.flush(10)
        return len(self.world.tier.jobs) > before


def test_what_is_written_waits_for_a_calm_moment(world: PagedWorld) -> None:
    """While some come or end it waits, but not for long; then all goes, until it is calm."""
    world.write_all()
    made = Disturbed(world)
    assert made.goes(stirs=False)
    assert not made.goes()
    assert not made.goes(after=0.9 * _CALM, stirs=False)
    assert made.goes(after=0.2 * _CALM, stirs=False)
    steps = [made.goes(after=0.9 * _CALM) for _ in range(math.ceil(3 * _PATIENCE / _CALM))]
    waited = steps.index(True)
    assert 0.9 * _PATIENCE <= waited * 0.9 * _CALM <= 1.1 * _PATIENCE
    assert all(steps[waited:])
    assert made.goes(after=2 * _CALM, stirs=False)
    assert not made.goes()


def test_what_is_being_written_pauses(world: PagedWorld) -> None:
    """Until it is calm, or has waited for long; nothing is asked of the writer otherwise."""
    world.write_all()
    made, pauses = Disturbed(world), world.tier.pauses
    assert made.goes(stirs=False)
    assert pauses == []
    world.tier.slow = True  # what was handed over is being written
    assert made.goes(after=2 * _CALM, stirs=False)
    for _ in range(2):
        made.engine.step(stirs=True, others=True)
    assert pauses == [_PAUSE, _PAUSE]
    made.clock.advance(_PATIENCE)
    made.engine.step(stirs=True, others=True)
    assert pauses == [_PAUSE, _PAUSE, 0]
    made.clock.advance(2 * _CALM)
    made.engine.step(others=True)
    made.engine.step(stirs=True, others=True)
    made.engine.step(others=False)
    assert pauses[3:] == [_PAUSE, 0]


def test_the_wait_ends_where_all_is_written(world: PagedWorld) -> None:
    """What comes long after that waits as long as if it were the first, though it is never calm."""
    world.write_all()
    made = Disturbed(world)
    assert made.goes(stirs=False)
    for _ in range(2):
        made.engine.step(stirs=True, others=True)
        made.clock.advance(0.4 * _PATIENCE)
    assert not made.goes()
    assert not made.goes(after=0.5 * _PATIENCE)
    assert made.goes(after=0.6 * _PATIENCE)


@pytest.mark.parametrize(
    ("told", "patience"),
    [
        ({"stirs": True, "several": False}, _PATIENCE),
        ({"stirs": False, "several": True}, _LONG_PATIENCE),
    ],
)
def test_the_wait_begins_with_what_is_to_be_written(
    world: PagedWorld, told: dict[str, bool], patience: float
) -> None:
    """What comes of a long prompt waits as long as others', and so does a later turn of a crowd."""
    world.write_all()
    made = Disturbed(world)
    for _ in range(3):
        made.engine.step(others=True, **told)
        made.clock.advance(patience)
    assert not made.goes(**told)
    assert not made.goes(after=0.9 * patience, **told)
    assert made.goes(after=0.2 * patience, **told)


def test_what_is_written_waits_for_a_crowd_to_rest(world: PagedWorld) -> None:
    """In calm moments, too, but not for long; then it goes in these, until fewer run."""
    world.write_all()
    made = Disturbed(world)
    calm = 2 * _CALM
    assert not made.goes(after=calm, stirs=False, several=True)
    assert not made.goes(after=0.9 * _LONG_PATIENCE, stirs=False, several=True)
    assert made.goes(after=0.2 * _LONG_PATIENCE, stirs=False, several=True)
    assert not made.goes(several=True), "somebody came"
    assert made.goes(after=calm, stirs=False, several=True)
    assert made.goes(after=calm, stirs=False), "one is left"
    while world.pager.pending:
        made.engine.step()
        assert world.tier.flush(10)
    made.engine.step()
    assert not made.goes(after=calm, stirs=False, several=True)
    assert made.goes(stirs=False, others=False, several=True), "memory is short"


def test_a_crowd_that_never_rests_has_its_state_written(world: PagedWorld) -> None:
    """Though one of two ends again and again, and another comes before it is calm."""
    world.write_all()
    made = Disturbed(world)
    written = []
    for _ in range(12):
        assert not made.goes(several=True)
        made.engine.step(stirs=True, others=True)  # one is left
        made.clock.advance(0.6 * _CALM)
        made.engine.step(stirs=True, others=True, several=True)
        written.append(made.goes(after=0.1 * _LONG_PATIENCE, stirs=False, several=True))
    assert written == [False] * 9 + [True] * 3, "in calm moments after that time"


def test_what_is_being_written_goes_on_beside_a_crowd(world: PagedWorld) -> None:
    """In calm moments: pins and what is to be deleted wait behind it."""
    world.write_all()
    made, pauses = Disturbed(world), world.tier.pauses
    world.tier.slow = True  # what was handed over is being written
    assert made.goes(stirs=False)
    assert not made.goes(stirs=False, several=True)
    assert pauses == []
    made.engine.step(stirs=True, others=True, several=True)
    made.clock.advance(2 * _CALM)
    made.engine.step(others=True, several=True)
    assert pauses == [_PAUSE, 0]


def test_nothing_is_held_back_where_nobody_waits(world: PagedWorld) -> None:
    """The writer would keep nobody waiting; and nobody might come for a long time."""
    world.write_all()
    made = Disturbed(world)
    assert not made.goes()
    assert made.engine.unwritten
    assert made.goes(others=False)
    assert not made.goes()
    while made.engine.unwritten:
        made.engine.step()
        assert world.tier.flush(10)
    made.engine.step()
    assert not any(trie.persistence.dirty for trie in world.cache.tries)


def test_much_does_not_wait(world: PagedWorld) -> None:
    """What is not on disk is lost where memory is needed: little of the budget waits."""
    world.write_all()
    made = Disturbed(world)
    assert not made.goes()
    (node,) = (node for trie in world.cache.tries for node in trie.persistence.dirty)
    assert node.span is not None
    world.cache.pool.resize(Size(3 * _LITTLE * node.span.nbytes, world.memory.buffers))
    assert not made.goes()
    assert not made.goes()
    assert made.goes()


def test_little_of_a_budget_is_much_of_a_smaller_one(world: PagedWorld) -> None:
    """Though nothing has come since it was counted; then the writer does not pause either."""
    world.write_all()
    made = Disturbed(world)
    world.tier.slow = True
    assert not made.goes()
    (node,) = (node for trie in world.cache.tries for node in trie.persistence.dirty)
    assert node.span is not None
    world.cache.pool.resize(Size(_LITTLE * node.span.nbytes - 1, world.memory.buffers))
    before = len(world.tier.jobs)
    for _ in range(2):
        made.engine.step(stirs=True, others=True)
    assert len(world.tier.jobs) > before
    assert world.tier.pauses == []


def test_what_waits_is_counted_where_it_changed(
    world: PagedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in each step: a crowd leaves hundreds of nodes, and goes on."""
    world.write_all()
    made, counted = Disturbed(world), list[object]()

    def size(node: TrieNode) -> Size:
        counted.append(node)
        return size_in_memory(node)

    monkeypatch.setattr(page_out, "size_in_memory", size)
    for number in range(1, 4):
        assert not made.goes(several=True)
        for _ in range(5):
            made.engine.step(others=True, several=True)
        assert len(counted) == number, "as many as wait, once"
        counted.clear()
