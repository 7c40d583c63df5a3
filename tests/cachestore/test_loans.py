"""State written where it lies: in memory until it is written, counted, and bounded."""

from pathlib import Path

import pytest

from umbel.cachestore.ledger import Kind, Size

from .disk_tools import TIMEOUT
from .fakes import KV, conversation
from .pager_tools import PagedWorld, written


def paging(world: PagedWorld) -> int:
    return world.cache.ledger.held(Kind.PAGING).nbytes


def test_what_is_written_where_it_lies_is_counted_whole(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(1000))
    world.write_all()
    world.serve(range(1500))
    copied = world.registry.copied
    world.tier.slow = True
    world.pager.step()
    assert written(world)[-1] == (1000, 1500)
    assert (world.registry.copied, paging(world)) == (copied, 0)
    world.begin([*range(700), 777]).fail()
    world.trie.join([world.node(700), world.node(1500)])
    assert paging(world) == 4 * 1500
    world.check()
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    world.finish()


def test_copy_beside_a_lent_storage_is_counted(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    kept = world.begin([*range(60), 777])
    world.tier.slow = True
    world.pager.step()
    world.cache.clear()
    assert world.ends() == [60]
    assert world.cache.tries.size.nbytes == 4 * 60
    assert paging(world) == 4 * 100
    world.check()
    kept.fail()
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    world.finish()


def test_neighbours_in_a_lent_storage_are_not_evicted(folder: Path) -> None:
    world = PagedWorld(KV, folder, queue=1)
    world.serve(range(100))
    world.begin([*range(60), 777]).fail()
    world.tier.slow = True
    world.pager.step()
    assert written(world) == [(0, 60)]
    lower = world.node(100)
    assert not lower.writers
    assert lower.writing, "it lies in the same storage"
    assert world.cache.pool.evictable() == Size()
    world.cache.evict(0)
    assert world.ends() == [60, 100]
    world.tier.slow = False
    world.write_all()
    assert not lower.writing
    world.page_out()
    assert world.cache.tries.size == Size()
    world.finish()


def test_no_more_is_lent_than_may_wait(folder: Path) -> None:
    world = PagedWorld(KV, folder, queue=8000)
    for number in range(1, 4):
        world.serve(conversation(number, 500))
    world.write_all()
    for number in range(1, 4):
        world.serve(conversation(number, 800))
    world.tier.slow = True
    for _ in range(3):
        world.pager.step()
    assert written(world)[3:] == [(500, 800), (500, 800)]
    world.tier.slow = False
    world.write_all()
    assert written(world)[3:] == [(500, 800)] * 3
    world.finish()


def test_a_storage_is_lent_once(folder: Path) -> None:
    """To however many it is lent, it is in memory once; and until the last of them is done."""
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    world.begin([*range(60), 777]).fail()
    world.tier.slow = True
    world.pager.step()
    assert written(world) == [(0, 60), (60, 100)]
    world.trie.join([world.node(60), world.node(100)])
    assert paging(world) == 4 * 100
    world.tier.slow = False
    assert world.tier.flush(TIMEOUT)
    first, second = world.tier.completed()
    world.pager.page_out._take(first)
    assert paging(world) == 4 * 100
    world.pager.page_out._take(second)
    assert paging(world) == 0
    world.write_all()
    world.finish()


def test_lent_storage_stays_lent_after_join(folder: Path) -> None:
    world = PagedWorld(KV, folder, longest=40)
    world.serve(range(40))
    world.write_all()
    world.serve(range(100))
    (storage,) = [s for s in world.registry.storages if s.tokens[-1] == 99]
    world.tier.slow = True
    world.pager.step()
    assert world.node(100).writing
    world.trie.join([world.node(40), world.node(100)])
    assert paging(world) == 4 * storage.length
    world.check()
    world.tier.slow = False
    world.write_all()
    assert paging(world) == 0
    assert storage.loan is None
    world.finish()


@pytest.mark.parametrize("how", ["fails", "refused", "given up"])
def test_failed_write_ends_the_loan(folder: Path, how: str) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(100))
    span = world.node(100).span
    assert span is not None
    world.codec.poisoned = how == "fails"
    if how == "refused":
        world.close_tier()
    world.tier.slow = True
    world.pager.step()
    assert (span.storage.loan is None) == (how == "refused")
    world.tier.slow = False
    if how == "given up":
        world.pager.give_up("a test")
    else:
        world.tier.flush(TIMEOUT)
        for written in world.tier.completed():
            world.pager.page_out._take(written)
    assert span.storage.loan is None
    assert not world.node(100).writing
    assert world.cache.pool.evictable().nbytes == 400
    world.cache.clear()
    assert world.cache.ledger.total == Size()
    world.close_tier()
