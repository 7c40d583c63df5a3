"""Reads from disk while files, tries and the disk change under them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from umbel.cachestore.disk import tier as disk_tier
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.node import as_tokens
from umbel.cachestore.paging import page_out
from umbel.cachestore.paging.page_in import PageInStatus
from umbel.cachestore.record import Record, RecordKind

from .disk_tools import TIMEOUT
from .fakes import EVERYTHING, HYBRID, KV, NAMESPACE, FakeSpan, conversation
from .pager_tools import PagedWorld, damage, written


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_out, "_REST", 0.0)


def long_world(folder: Path) -> PagedWorld:
    """Put three nodes of one path on disk, and there only."""
    world = PagedWorld(KV, folder, longest=30)
    for end in (30, 60, 90):
        world.serve(range(end))
    world.page_out()
    assert world.ends() == [30, 60, 90]
    assert world.cache.tries.size.nbytes == 0
    return world


def want(world: PagedWorld, end: int) -> PageInStatus:
    return world.pager.page_in.request(NAMESPACE, as_tokens(range(end)))


def drain(world: PagedWorld) -> None:
    assert world.tier.flush(TIMEOUT)
    while world.pager.page_in.ready:
        world.step()
        world.check()


def the_record(world: PagedWorld, start: int, kind: RecordKind = RecordKind.SPAN) -> Record:
    (found,) = (r for r in world.tier.alive.values() if r.start == start and r.kind is kind)
    return found


# -- damage --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("start", [0, 30, 60])
def test_damage_is_a_miss(folder: Path, start: int, how: str) -> None:
    world = long_world(folder)
    damage(world.tier.path(the_record(world, start)), how)
    world.fetch(range(91))
    assert world.ends() == [end for end in (30, 60, 90) if end <= start] if start else True
    assert world.probe(range(91)) == (start, start)
    assert world.tier.flush(TIMEOUT)
    assert len(world.tier.files()) == start // 30
    world.serve(range(91))
    world.write_all()
    world.restart()
    world.fetch(range(92))
    assert world.probe(range(92))[1] == 91
    world.finish()


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_whole_state_costs_no_spans(folder: Path, how: str) -> None:
    world = PagedWorld(HYBRID, folder, interval=20)
    world.serve(range(50))
    world.page_out()
    tokens = world.cache.tries.statistics().stored_tokens
    last = max(end for _, end in written(world, RecordKind.CHECKPOINT))
    damage(world.tier.path(the_record(world, last, RecordKind.CHECKPOINT)), how)
    world.fetch(range(60))
    assert 0 < world.probe(range(60))[1] < last
    assert world.cache.tries.statistics().stored_tokens == tokens == 50
    world.finish()


def test_a_trie_whose_only_node_is_lost_is_dropped(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(30))
    world.page_out()
    damage(world.tier.path(the_record(world, 0)), "flip")
    world.fetch(range(30))
    assert len(world.cache.tries) == 0
    world.finish()


def test_a_file_that_vanishes_after_it_was_verified(folder: Path) -> None:
    world = long_world(folder)
    assert want(world, 91) is PageInStatus.BEGUN
    assert world.tier.flush(TIMEOUT)
    damage(world.tier.path(the_record(world, 30)), "remove")
    drain(world)
    assert world.probe(range(91)) == (30, 30)
    world.finish()


def test_a_file_that_holds_less_than_the_index_says(folder: Path) -> None:
    world = long_world(folder)
    load = world.codec.load_span

    def short(parts: list[tuple[Path, int, int]]) -> FakeSpan:
        read, left = load(parts).split(7)
        left.close()
        return read

    world.codec.load_span = short  # type: ignore[assignment,method-assign]
    world.fetch(range(91))
    assert world.probe(range(91)) == (0, 0)
    assert not world.registry.spans
    world.finish()


# -- changes meanwhile ---------------------------------------------------------------------


def split_it(world: PagedWorld) -> None:
    world.trie.split(world.node(60), 45)


def forget_it(world: PagedWorld) -> None:
    world.cache.pool.forget_persisted(world.cache.tries.files.nbytes - 1)


def clear_it(world: PagedWorld) -> None:
    world.cache.clear()


def compute_it(world: PagedWorld) -> None:
    world.cache.longest = 1000
    world.serve(range(100))


def page_it_out(world: PagedWorld) -> None:
    world.cache.evict(0)


CHANGES = [split_it, forget_it, clear_it, compute_it, page_it_out]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_node_changes_while_it_is_read(
    folder: Path, change: Callable[[PagedWorld], None], steps: int
) -> None:
    """Nothing breaks, nothing false is restored, and asking again brings what there is."""
    world = long_world(folder)
    assert want(world, 91) is PageInStatus.BEGUN
    for _ in range(steps):
        world.step()
    change(world)
    world.check()
    drain(world)
    assert world.fetch(range(91)) <= 2
    known = 0 if change is clear_it else 60 if change is forget_it else 90
    assert world.probe(range(91))[1] >= known
    world.finish()


def test_a_file_that_was_not_verified_is_not_read(folder: Path) -> None:
    world = long_world(folder)
    assert world.fetch(range(31)) == 1
    record = the_record(world, 0)
    assert want(world, 91) is PageInStatus.BEGUN
    world.cache.evict(0)
    damage(world.tier.path(record), "flip")
    drain(world)
    world.fetch(range(91))
    assert world.probe(range(91)) == (0, 0)
    world.finish()


def test_a_whole_state_whose_span_left_meanwhile(folder: Path) -> None:
    world = PagedWorld(HYBRID, folder)
    world.serve(range(30))
    world.write_all()
    holder = next(node for node in world.trie.nodes() if node.checkpoint is not None)
    world.trie.drop_checkpoint(holder)
    assert want(world, 60) is PageInStatus.BEGUN
    world.cache.evict(0)
    assert holder.span is None
    damage(world.tier.path(holder.extents[0].record), "flip")
    drain(world)
    world.fetch(range(60))
    assert world.probe(range(60))[1] == 0
    world.finish()


def test_a_parent_that_leaves_for_its_child(folder: Path) -> None:
    world = long_world(folder)
    world.memory = Size(300, 1000)
    world.restart()
    assert want(world, 91) is PageInStatus.BEGUN
    drain(world)
    assert world.probe(range(91))[1] == 30
    assert world.fetch(range(91)) > 1
    assert world.probe(range(91))[1] == 30
    world.finish()


def test_two_requests_want_the_same(folder: Path) -> None:
    world = long_world(folder)
    assert want(world, 61) is PageInStatus.BEGUN
    assert want(world, 61) is PageInStatus.UNDER_WAY
    assert want(world, 91) is PageInStatus.UNDER_WAY
    drain(world)
    assert world.codec.loads == 2
    assert want(world, 61) is PageInStatus.NOTHING
    assert want(world, 91) is PageInStatus.BEGUN
    drain(world)
    assert world.codec.loads == 3
    assert want(world, 91) is PageInStatus.NOTHING
    assert world.pager.page_in.page_ins == 3
    world.finish()


def test_no_room(folder: Path) -> None:
    world = long_world(folder)
    world.memory = Size(600, 1000)
    world.restart()
    tails = world.cache.ledger.account(Kind.TAIL)
    tails.set(Size(450))
    assert want(world, 91) is PageInStatus.BEGUN
    drain(world)
    assert world.probe(range(91)) == (90, 0)
    assert world.pager.page_in.page_ins == 0
    tails.close()
    assert world.fetch(range(91)) == 1
    assert world.probe(range(91))[1] == 90
    assert world.cache.ledger.total.within(world.cache.pool.limit)
    world.finish()


def test_buffers_are_asked_for(folder: Path) -> None:
    world = long_world(folder)
    world.memory = Size(1 << 20, 5)
    world.restart()
    assert want(world, 91) is PageInStatus.BEGUN
    drain(world)
    assert world.cache.tries.size.buffers == 4
    assert world.cache.ledger.total.within(world.cache.pool.limit)
    world.finish()


# -- the tier ------------------------------------------------------------------------------


def test_a_tier_that_was_closed(folder: Path) -> None:
    world = long_world(folder)
    world.close_tier()
    assert want(world, 91) is PageInStatus.BEGUN
    assert world.pager.page_in.ready
    world.pager.step()
    assert not world.pager.page_in.ready
    assert world.probe(range(91)) == (90, 0)
    world.serve(range(200, 230))
    world.pager.step()
    assert not any(node.writing for node in world.trie.nodes())
    world.cache.clear()
    assert not world.registry.spans


def test_a_disk_that_is_full_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = PagedWorld(EVERYTHING, folder, interval=20)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk_tier, "write_file", full)
        world.serve(range(50))
        world.serve([*range(30), *conversation(2, 40)])
        for _ in range(5):
            world.step()
        assert not world.tier.alive
        world.check()
    world.write_all()
    assert all(node.persisted_end == node.end for node in world.trie.nodes())
    assert not any(node.writing or node.writers for node in world.trie.nodes())
    world.restart()
    assert world.fetch(range(60)) == 1
    assert world.probe(range(60))[1] > 0
    world.finish()


def test_saving_ends_where_the_disk_takes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_out, "_REST", 5.0)
    world = PagedWorld(KV, folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_tier, "write_file", full)
    world.serve(range(50))
    rounds = 0
    while world.pager.write_all():
        assert world.tier.flush(TIMEOUT)
        rounds += 1
        assert rounds < 5
    assert world.trie.persistence.dirty
    world.finish()


def test_a_trie_that_is_gone_when_its_write_is_done(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.tier.slow = True
    world.serve(range(30))
    world.pager.step()
    world.cache.clear()
    assert world.cache.tries.get(NAMESPACE) is None
    world.tier.slow = False
    world.step()
    assert world.tier.flush(TIMEOUT)
    assert world.tier.files() == set()
    world.finish()


def test_path_forgotten_while_its_end_is_written(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.write_all()
    world.serve(range(150))
    world.tier.slow = True
    world.pager.step()
    assert written(world) == [(0, 100), (100, 150)]
    world.cache.pool.forget_persisted(0)
    world.tier.slow = False
    world.write_all()
    world.step()
    assert world.tier.flush(TIMEOUT)
    assert len(world.tier.files()) == len(world.tier.alive)
    world.check()
    world.finish()


@pytest.mark.parametrize("error", [ValueError("broken"), RuntimeError("broken"), MemoryError()])
@pytest.mark.parametrize("kind", ["export_span", "export_checkpoint"])
def test_state_that_cannot_be_exported_stays_in_memory(
    folder: Path, kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are written, the disk tier goes on, and what failed is not tried for ever."""
    world, tried = PagedWorld(HYBRID, folder, interval=20), [0]
    works = getattr(world.codec, kind)

    def fails(state: object, *which: int, **options: bool) -> object:
        tried[0] += 1
        if tried[0] == 1:
            raise error
        return works(state, *which, **options)

    monkeypatch.setattr(world.codec, kind, fails)
    with capture_logs() as logs:
        world.serve(range(50))
        world.serve(conversation(1, 30))
        world.write_all()
    assert [log["event"] for log in logs].count("state cannot be written") == 1
    assert world.pager.page_out.failures == 1
    assert world.tier.statistics().state == "on"
    assert not any(node.writers for trie in world.cache.tries for node in trie.nodes())
    assert written(world)
    world.check()
    world.finish()


@pytest.mark.parametrize("kind", ["load_span", "load_checkpoint"])
def test_file_that_cannot_be_made_sense_of_is_a_miss(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever native code raises over it, the request computes, and the file is dropped."""
    world = PagedWorld(HYBRID, folder, interval=20)
    world.serve(range(50))
    world.page_out()
    before = len(world.tier.files())

    def fails(*_: object) -> object:
        raise RuntimeError("no such axis")

    monkeypatch.setattr(world.codec, kind, fails)
    world.fetch(range(60))
    assert world.probe(range(60))[1] == 0
    assert world.tier.flush(TIMEOUT)
    assert len(world.tier.files()) < before
    assert world.tier.statistics().state == "on"
    monkeypatch.undo()
    world.serve(range(60))
    world.finish()
