"""The budget is kept at every moment, and no more is evicted for it than must be."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from umbel.cachestore.ledger import Kind, Size, max_copy_bytes
from umbel.cachestore.node import as_tokens
from umbel.cachestore.pool import MemoryPool
from umbel.cachestore.prefix_cache import PrefixCache

from .conftest import MakeWorld
from .fakes import (
    KV,
    NAMESPACE,
    PLENTY,
    RECURRENT,
    STACKS,
    FakeSpan,
    Registry,
    Stack,
    World,
    conversation,
)
from .pager_tools import PagedWorld

BUDGET = Size(1600, 1000)


def pool_of(world: World, nbytes: int = 1600, buffers: int = 1000) -> MemoryPool:
    world.cache.pool.resize(Size(nbytes, buffers))
    return world.cache.pool


def test_room_for_a_copy_is_kept(make_world: MakeWorld) -> None:
    pool = pool_of(make_world(KV))
    step = pool.ledger.account(Kind.TRANSIENT)
    assert pool.limit.nbytes + max_copy_bytes(1600) == 1600
    assert not pool.reserve(step, Size(1501))
    assert pool.reserve(step, Size(1500))
    assert pool.ledger.total == Size(1500)
    assert pool.reserve(step, Size(1400)), "what the last step reserved is given back first"
    assert pool.ledger.total == Size(1400)
    step.close()
    assert pool.ledger.total == Size()


@pytest.mark.parametrize("need", [1, 7, 399, 400, 401, 900])
def test_little_more_is_evicted_than_is_needed(make_world: MakeWorld, need: int) -> None:
    world = make_world(KV)
    pool = pool_of(world)
    for number in range(3):
        world.serve(conversation(number, 124))
    before = world.cache.tries.size.nbytes
    assert pool.room.nbytes == 1500 - before == 12
    assert pool.make_room(Size(12)), "there is room already"
    assert world.cache.tries.size.nbytes == before
    assert pool.make_room(Size(12 + need))
    assert need <= before - world.cache.tries.size.nbytes < need + 4, "a token is the least"
    world.check()


def test_nothing_is_evicted_in_vain(make_world: MakeWorld) -> None:
    world = make_world(KV)
    pool = pool_of(world)
    step = pool.ledger.account(Kind.TRANSIENT)
    world.serve(conversation(0, 100))
    world.serve(conversation(1, 200))
    lease = world.begin(conversation(1, 201))
    before = world.cache.tries.size.nbytes
    assert not pool.make_room(Size(1500 - 800 + 1))
    assert not pool.reserve(step, Size(1500 - 800 + 1))
    assert not pool.fits(Size(1500 - 800 + 1))
    assert world.cache.tries.size.nbytes == before
    assert pool.make_room(Size(1500 - 800))
    assert lease.cached == 200
    assert world.cache.tries.size.nbytes == 800
    lease.fail()


def test_buffers_count_as_bytes_do(make_world: MakeWorld) -> None:
    world = make_world(KV)
    pool = pool_of(world, PLENTY, 10)
    for number in range(5):
        world.serve(conversation(number, 50))
    assert pool.room.buffers == 0
    assert pool.make_room(Size(0, 3))
    assert world.cache.tries.size.buffers == 6
    assert not pool.make_room(Size(0, 11))
    assert world.cache.tries.size.buffers == 6


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
@given(
    st.lists(
        st.tuples(st.sampled_from(["serve", "begin", "end", "aside", "tail"]), st.integers(0, 900)),
        max_size=25,
    )
)
def test_the_limit_is_kept(stack: Stack, steps: list[tuple[str, int]]) -> None:
    world = World(stack)
    pool = pool_of(world)
    tails, step = pool.ledger.account(Kind.TAIL), pool.ledger.account(Kind.TRANSIENT)
    for what, size in steps:
        if what == "serve" and pool.make_room(Size(4 * (size % 60) + 400, 20)):
            world.serve(conversation(size % 7, 1 + size % 60))
        elif what == "begin":
            world.begin(conversation(size % 7, 1 + size % 60))
        elif what == "end" and world.sequences:
            world.sequences[0].fail()
        elif what == "tail":
            tails.close()
            if pool.make_room(Size(size, 1)):
                tails.set(Size(size, 1))
        elif what == "aside":
            could = pool.fits(Size(size, 2))
            before = world.cache.tries.size.nbytes
            step.close()
            could = pool.fits(Size(size, 2))
            assert pool.reserve(step, Size(size, 2)) == could
            assert could or world.cache.tries.size.nbytes == before
        assert pool.ledger.total.within(pool.limit)
    tails.close()
    step.close()
    for sequence in list(world.sequences):
        sequence.fail()
    world.finish()


def test_state_being_written_makes_no_room(folder: Path) -> None:
    world = PagedWorld(KV, folder, memory=BUDGET)
    world.serve(conversation(0, 100))
    world.tier.slow = True
    world.pager.step()
    assert world.node(100).writing
    world.serve(conversation(1, 100))
    assert world.cache.tries.size.nbytes == 800
    assert not world.cache.pool.make_room(Size(1101))
    assert world.cache.tries.size.nbytes == 800, "evicted in vain"
    assert world.cache.pool.make_room(Size(1100))
    assert world.cache.tries.size.nbytes == 400
    world.tier.slow = False
    world.write_all()
    assert world.cache.pool.make_room(Size(1500))
    world.finish()


def test_nodes_above_a_write_stay(folder: Path) -> None:
    world = PagedWorld(KV, folder, memory=BUDGET, longest=80)  # the end is written where it lies
    world.serve(range(40))
    world.write_all()
    world.probe([*range(8), 77])
    world.serve([*range(20), *range(500, 580)])
    world.tier.slow = True
    world.pager.step()
    assert [node.writing for node in world.trie.nodes()].count(True) == 1
    held = 4 * (20 + 80)
    assert world.cache.tries.size.nbytes == held + 4 * 20
    assert not world.cache.pool.fits(Size(1500 - held + 1))
    assert world.cache.pool.make_room(Size(1500 - held))
    world.tier.slow = False
    world.finish()


def test_checkpoints_make_room(make_world: MakeWorld) -> None:
    world = make_world(RECURRENT)
    pool = pool_of(world, 160)
    for number in range(3):
        world.serve(conversation(number, 10))
    assert world.cache.tries.size.nbytes == 120
    assert pool.make_room(Size(150 - 40))
    assert world.cache.tries.size.nbytes == 40


def test_shrinking_and_growing_again(make_world: MakeWorld) -> None:
    world = make_world(KV)
    pool = pool_of(world, 16_000)
    for number in range(4):
        world.serve(conversation(number, 500))
    held = world.cache.tries.size.nbytes
    assert held == 8000
    sizes = []
    for share in (0.9, 0.8, 0.5, 0.25):
        pool.shrink(share)
        assert pool.budget.nbytes == int(held * share)
        assert pool.ledger.total.within(pool.limit)
        sizes.append(world.cache.tries.size.nbytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 0
    pool.shrink(1.0)
    assert pool.budget.nbytes == 16_000
    assert world.cache.tries.size.nbytes == sizes[-1]


def test_an_empty_cache_shrinks_to_something(make_world: MakeWorld) -> None:
    pool = pool_of(make_world(KV), 16_000)
    pool.shrink(0.25)
    assert pool.budget.nbytes == 2000
    assert pool.room.nbytes == 1000
    assert pool.make_room(Size(1000))


def test_leased_state_survives_shrinking(make_world: MakeWorld) -> None:
    """Pinned state stays, even if that is more than the budget; room is negative then."""
    world = make_world(KV)
    pool = pool_of(world)
    world.serve(conversation(0, 301))
    sequence = world.begin(conversation(0, 301))
    pool.shrink(0.25)
    assert world.cache.tries.size.nbytes == 1200
    assert pool.room.nbytes < 0
    assert not pool.make_room(Size())
    sequence.fail()
    assert pool.make_room(Size())
    assert pool.ledger.total.within(pool.limit)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 25), st.integers(0, 1500)),
        max_size=25,
    )
)
def test_the_reserve_holds_the_longest_copy(steps: list[tuple[int, int, int, int]]) -> None:
    """With pieces no longer than the reserve, budget and copies are never exceeded together."""
    longest = max_copy_bytes(1600) // 4
    registry = Registry()
    cache = PrefixCache(KV.layout, budget=PLENTY, longest=longest)
    cache.pool.resize(BUDGET)
    pool = cache.pool
    step = pool.ledger.account(Kind.TRANSIENT)
    peaks = [0]

    def observe() -> None:
        """Note what there is while a copy exists; what the ledger has of spans may go already."""
        others = pool.ledger.total.nbytes - pool.ledger.held(Kind.KV).nbytes
        peaks.append(others + registry.nbytes)

    registry.on_copy = observe
    for seed, shared, more, need in steps:
        tokens = as_tokens((*range(seed * 1000, seed * 1000 + shared), *range(9000, 9000 + more)))
        lease = cache.begin(NAMESPACE, tokens)
        while lease.held < len(tokens):
            end = min(len(tokens), lease.held + longest)
            if not pool.make_room(Size(4 * (end - lease.held), 4)):
                break
            lease.publish(tokens[:end], FakeSpan(registry, tokens[lease.held : end].tolist()))
        lease.close(tokens[: lease.held])
        pool.reserve(step, Size(need))
        step.close()
        assert max(peaks) <= BUDGET.nbytes
        assert pool.ledger.total.within(pool.limit)
    assert registry.nbytes == cache.tries.size.nbytes
    cache.clear()
    assert not registry.spans
