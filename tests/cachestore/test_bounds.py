"""Bounds of tenants: the state that each keeps, in memory and on disk, and what goes first."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from structlog.testing import capture_logs

from umbel.cachestore.evict import stages
from umbel.cachestore.ledger import Size
from umbel.cachestore.pool import MemoryPool, TenantBounds
from umbel.cachestore.tries import Namespace

from .bounded import bound, holdings, watched
from .conftest import MakeWorld
from .fakes import KV, PLENTY, STACKS, Stack, TokenIds, World, conversation
from .pager_tools import PagedWorld

A, B, C = (Namespace(name) for name in "abc")


def held(world: World, tenant: Namespace) -> int:
    found = holdings(world.cache).get(tenant.tenant)
    return 0 if found is None else found.held


def flood(world: World, tenant: Namespace, prompts: int, length: int = 100) -> None:
    for number in range(prompts):
        world.serve(conversation(100 + number, length), namespace=tenant)


def test_stages_take_from_the_greedy_first_and_from_floors_last() -> None:
    shares = {"a": (100, None), "b": (0, 300), "c": (50, 20)}
    assert stages(shares, 1000) == [
        {"b": 300, "c": 50},
        {"a": 100, "b": 0, "c": 50},
        {"a": 0, "b": 0, "c": 0},
    ]
    assert stages({"a": (0, None)}, 1000) == [{"a": 0}], "without bounds it is one pass"
    assert stages({}, 0) == [{}]


def test_floors_over_the_room_are_scaled_down() -> None:
    shares = {"a": (600, None), "b": (200, None)}
    assert stages(shares, 400)[0] == {"a": 300, "b": 100}
    assert stages(shares, 0) == stages(shares, -7) == [{"a": 0, "b": 0}]


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_a_flood_leaves_a_floor_untouched(stack: Stack, make_world: MakeWorld) -> None:
    world = make_world(stack, budget=1200)
    mine = conversation(1, 100)
    world.serve(mine, namespace=A)
    before = held(world, A)
    bound(world.cache, a=TenantBounds(floor=before))
    flood(world, B, 40)
    assert held(world, A) == before
    assert world.cache.tries.evictions, "nothing was evicted, so nothing was tested"
    assert world.serve([*mine, 7], namespace=A) >= 99
    bound(world.cache)
    flood(world, B, 40)
    assert held(world, A) == 0, "without a floor the same flood takes all of it"


def test_state_above_a_floor_is_evicted(make_world: MakeWorld) -> None:
    world = make_world(KV, budget=1200)
    world.serve(conversation(1, 200), namespace=A)
    bound(world.cache, a=TenantBounds(floor=301))
    flood(world, B, 40)
    assert 301 - 4 <= held(world, A) <= 304
    assert world.cache.tries.size.nbytes <= 1200


def test_tenant_over_its_ceiling_goes_first(make_world: MakeWorld) -> None:
    """Its own oldest state goes, though all of another's is older; below it, the oldest goes."""
    world = make_world(KV, budget=1200)
    world.serve(conversation(1, 50), namespace=A)
    bound(world.cache, b=TenantBounds(ceiling=500))
    flood(world, B, 20)
    assert held(world, A) == 200
    assert 500 <= held(world, B) <= 1000
    world.serve(conversation(2, 100), namespace=C)
    assert (held(world, A), held(world, B)) == (200, 600), "no more of it than must"
    world.serve(conversation(3, 25), namespace=C)
    world.serve(conversation(4, 50), namespace=C)
    assert (held(world, A), held(world, B)) == (0, 500), "at its ceiling it is one of many"


def test_a_request_that_runs_wins_over_floors(make_world: MakeWorld) -> None:
    """Where nothing but floors is left, they give way, the oldest first: nothing is stuck."""
    world = make_world(KV, budget=800)
    bound(world.cache, a=TenantBounds(floor=400), b=TenantBounds(floor=400))
    world.serve(conversation(1, 100), namespace=A)
    world.serve(conversation(2, 100), namespace=B)
    assert world.cache.pool.evictable().nbytes == 800
    running = world.begin(conversation(1, 101), namespace=A)
    world.cache.evict(500)
    assert held(world, A) == 400, "leased"
    assert held(world, B) == 100, "a floor that cannot be kept is not kept"
    running.fail()
    world.cache.evict(0)
    assert world.cache.tries.size.nbytes == 0


def test_bounds_are_over_all_models() -> None:
    pool = MemoryPool()
    one, two = World(KV), World(KV)
    for world in (one, two):
        world.cache.close()
        world.cache = type(world.cache)(KV.layout, budget=PLENTY, pool=pool)
        world.serve(conversation(1, 50), namespace=A)
        world.serve(conversation(2, 50), namespace=B)
    pool.bounds = lambda tenant: TenantBounds(floor=300 if tenant == "a" else 0)
    one.cache.evict(0)
    assert (held(one, A), held(one, B)) == (0, 0), "it must go, floor or not"
    one.serve(conversation(1, 50), namespace=A)
    one.cache.pool.evict(one.cache.pool.tries, Size(300, PLENTY))
    assert held(one, A) + held(two, A) == 300
    assert held(two, B) == 0
    for world in (one, two):
        world.cache.clear()


TENANTS = st.sampled_from([A, B, C])
BOUNDS = st.builds(
    TenantBounds,
    floor=st.sampled_from([0, 0, 100, 300, 900]),
    ceiling=st.sampled_from([None, None, 0, 200, 600]),
)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
@given(
    st.tuples(BOUNDS, BOUNDS, BOUNDS),
    st.lists(
        st.tuples(st.sampled_from(["serve", "begin", "end", "evict"]), TENANTS, st.integers(0, 99)),
        max_size=25,
    ),
)
def test_eviction_respects_bounds_in_any_order(
    stack: Stack,
    bounds: tuple[TenantBounds, TenantBounds, TenantBounds],
    steps: list[tuple[str, Namespace, int]],
) -> None:
    """In any order of requests, with any bounds; and what fits without them fits with them."""
    world = World(stack)
    bound(world.cache, **dict(zip("abc", bounds, strict=True)))
    for what, tenant, size in steps:
        prompt: TokenIds = conversation(size % 5, 1 + size)
        if what == "serve":
            world.serve(prompt, namespace=tenant)
        elif what == "begin":
            world.begin(prompt, namespace=tenant)
        elif what == "end" and world.sequences:
            world.sequences[size % len(world.sequences)].fail()
        elif what == "evict":
            stored = world.cache.tries.size.nbytes
            limit = stored * size // 100
            least = stored - world.cache.pool.evictable().nbytes
            with watched(world.cache, limit):
                world.cache.evict(limit)
            assert world.cache.tries.size.nbytes <= max(limit, least)
        world.check()
    for sequence in list(world.sequences):
        sequence.fail()
    world.finish()


def test_floors_over_the_budget_are_said_once() -> None:
    pool = MemoryPool()
    with capture_logs() as logs:
        pool.bound_tenants(lambda _: TenantBounds(), 1200)
        assert logs == [], "the budget is not known yet"
        pool.resize(Size(1000, 10))
        pool.resize(Size(900, 10))
    assert [(entry["floors"], entry["budget"]) for entry in logs] == [(1200, 1000)]
    with capture_logs() as logs:
        pool.bound_tenants(lambda _: TenantBounds(), 900)
        pool.bound_tenants(lambda _: TenantBounds(), 901)
    assert [entry["floors"] for entry in logs] == [901]


# -- on disk ---------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_a_floor_outlives_a_flood_and_a_restart(stack: Stack, folder: Path) -> None:
    """The other's flood fills memory and disk; its own next turn is cached after a restart."""
    with PagedWorld(stack, folder, budget=1500, disk=4000) as world:
        mine = conversation(1, 60)
        world.serve(mine, namespace=A)
        world.write_all()
        floor = max(held(world, A), holdings(world.cache)["a"].files)
        bound(world.cache, a=TenantBounds(floor=floor))
        for number in range(12):
            world.serve(conversation(100 + number, 60), namespace=B)
            world.write_all()
            world.step()
        assert world.probe([*mine, 7], A)[1] >= 59
        world.restart()
        world.fetch([*mine, 7], A)
        assert world.probe([*mine, 7], A)[1] >= 59
        world.finish()


@pytest.mark.parametrize("bounds", [TenantBounds(disk=1000), None])
def test_tenant_over_its_disk_share_is_forgotten_first(
    folder: Path, bounds: TenantBounds | None
) -> None:
    """Its own oldest files go though another's are older; without a share the oldest do."""
    with PagedWorld(KV, folder, disk=PLENTY) as world:
        world.serve(conversation(1, 60), namespace=A)
        world.write_all()
        for number in range(5):
            world.serve(conversation(100 + number, 60), namespace=B)
            world.write_all()
        if bounds is not None:
            bound(world.cache, b=bounds)
        before = holdings(world.cache)
        world.cache.pool.forget_persisted(world.cache.tries.files.nbytes - 1)
        after = holdings(world.cache)
        assert (after["a"].files == before["a"].files) == (bounds is not None)
        assert (after["b"].files == before["b"].files) == (bounds is None)
        world.finish()
