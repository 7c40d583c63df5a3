"""Paths that a user keeps: what they hold, what they may take, and what is forgotten first."""

import pytest
from structlog.testing import capture_logs

from umbel.cachestore import check
from umbel.cachestore import pins as pins_module
from umbel.cachestore.errors import PinError
from umbel.cachestore.node import as_tokens
from umbel.cachestore.pins import PinDescription
from umbel.cachestore.pool import TenantBounds
from umbel.cachestore.prefix_cache import PrefixCache

from .fakes import KV, NAMESPACE, STACKS, Stack, World

TENANT = NAMESPACE.tenant


def serve(world: World, *tokens: int) -> tuple[int, ...]:
    """Serve a prompt of these tokens, so that it is cached."""
    world.serve(tokens)
    return tokens


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_pinned_state_outlives_eviction_and_clear(stack: Stack) -> None:
    """Evicting and clearing leave a pinned path's state, and take it once it is unpinned."""
    world = World(stack, interval=4)
    pins = world.cache.pins
    prompt = serve(world, *range(40))
    serve(world, *range(100, 140))
    description = pins.pin(TENANT, "mine", as_tokens(prompt))
    assert description.name == "mine"
    assert 0 < description.held <= description.tokens == len(prompt)
    world.cache.evict(0)
    world.cache.clear()
    assert check.problems(world.cache) == []
    lease = world.cache.begin(NAMESPACE, as_tokens([*prompt, 999]))
    assert lease.cached == description.held
    lease.close()
    assert pins.unpin(TENANT, "mine")
    world.cache.clear()
    assert world.cache.tries.size.nbytes == 0
    assert check.problems(world.cache) == []


def test_pins_take_half_of_the_budget_at_most() -> None:
    world = World(KV, budget=4 * 100)
    pins = world.cache.pins
    first, second = serve(world, *range(30)), serve(world, *range(100, 130))
    pins.pin(TENANT, "first", as_tokens(first), operator=True)
    with pytest.raises(PinError, match="240 bytes, and those of other tenants leave 200"):
        pins.pin(TENANT, "second", as_tokens(second), operator=True)
    assert pins.listed(TENANT) == [PinDescription("first", 30, 30)]
    assert len(world.cache.leases) == len(pins.leases()) == 1


def test_a_refusal_tells_nothing_of_others_pins() -> None:
    """Whatever they hold, a tenant may take its part; only the log says what is whose."""
    other = NAMESPACE._replace(tenant="other")
    told = []
    for size in (4, 20, 60):
        world = World(KV, budget=4 * 400)
        pins = world.cache.pins
        pins.pin(TENANT, "mine", as_tokens(serve(world, *range(size))), operator=True)
        world.serve(range(200, 250), namespace=other)
        assert pins.pin("other", "small", as_tokens(range(200, 220))).held == 20
        assert pins.pin("other", "all", as_tokens(range(200, 225))).held == 25
        with (
            capture_logs() as logs,
            pytest.raises(PinError, match="take 104 bytes, and may take 100") as refusal,
        ):
            pins.pin("other", "x", as_tokens(range(200, 226)))
        told.append(str(refusal.value))
        assert f"'{TENANT}' {4 * size}" in logs[0]["held"]
    assert len(set(told)) == 1


def test_refusals_hide_the_size_of_others_pins() -> None:
    """Where no part is left the answer is the same for each, and a tenant that has one keeps it."""
    world = World(KV, budget=4 * 400)
    pins = world.cache.pins
    tenants = [NAMESPACE._replace(tenant=f"t{number}") for number in range(9)]
    for each in tenants:
        world.serve(range(30), namespace=each)
    for each in tenants[:8]:
        assert pins.pin(each.tenant, "x", as_tokens(range(2))).held == 2
    for size in (1, 10, 25):
        with pytest.raises(PinError, match=r"^there is no room for pins of one more"):
            pins.pin("t8", "x", as_tokens(range(size)))
    assert [pins.pin(f"t{n}", "y", as_tokens(range(25))).held for n in range(8)] == [25] * 8
    assert sum(map(pins.held_by, {path.tenant for path in pins.paths()})) <= 4 * 200
    with pytest.raises(PinError, match="20 bytes, and those of other tenants leave 0"):
        pins.pin("t8", "x", as_tokens(range(5)), operator=True)


def test_refusal_lists_own_pins_by_size() -> None:
    world = World(KV, budget=4 * 100)
    pins = world.cache.pins
    for name, start, tokens in (("little", 0, 10), ("much", 100, 20)):
        pins.pin(
            TENANT, name, as_tokens(serve(world, *range(start, start + tokens))), operator=True
        )
    with pytest.raises(
        PinError, match=r"unpin .* \(bytes that yours hold: 'much' 80, 'little' 40\)"
    ):
        pins.pin(TENANT, "more", as_tokens(serve(world, *range(200, 230))), operator=True)


def test_a_tenants_pins_take_its_ceiling_at_most() -> None:
    world = World(KV, budget=4 * 1000)
    pins = world.cache.pins
    ceiling = TenantBounds(ceiling=4 * 40)
    world.cache.pool.bound_tenants(lambda name: ceiling if name == TENANT else TenantBounds(), 0)
    pins.pin(TENANT, "first", as_tokens(serve(world, *range(30))), operator=True)
    with pytest.raises(PinError, match="200 bytes, and may take 160, your cache_ceiling"):
        pins.pin(TENANT, "second", as_tokens(serve(world, *range(100, 120))), operator=True)
    world.serve(range(50), namespace=NAMESPACE._replace(tenant="other"))
    assert pins.pin("other", "x", as_tokens(range(50))).held == 50


def test_pins_of_all_models_count_together() -> None:
    world = World(KV, budget=4 * 100)
    another = World(KV)
    another.cache = PrefixCache(KV.layout, budget=4 * 100, pool=world.cache.pool)
    pins, others = world.cache.pins, another.cache.pins
    pins.pin(TENANT, "here", as_tokens(serve(world, *range(30))), operator=True)
    tokens = as_tokens(serve(another, *range(25)))
    with pytest.raises(PinError, match="220 bytes, and those of other tenants leave 200"):
        others.pin(TENANT, "there", tokens, operator=True)
    pins.close()
    assert others.pin(TENANT, "there", tokens, operator=True).held == 25


def test_a_path_that_two_pins_share_counts_once() -> None:
    world = World(KV, budget=4 * 100)
    pins = world.cache.pins
    shared = tuple(range(40))
    first, second = serve(world, *shared, 50), serve(world, *shared, 60)
    pins.pin(TENANT, "first", as_tokens(first), operator=True)
    pins.pin(TENANT, "second", as_tokens(second), operator=True)
    assert len(pins.leases()) == 2


def test_a_pin_replaces_one_of_its_name() -> None:
    world = World(KV)
    pins = world.cache.pins
    first, second = serve(world, *range(20)), serve(world, *range(100, 110))
    pins.pin(TENANT, "name", as_tokens(first))
    pins.pin(TENANT, "name", as_tokens(second))
    assert pins.listed(TENANT) == [PinDescription("name", 10, 10)]
    world.cache.clear()
    assert world.cache.tries.statistics().tokens == 10


def test_a_tenant_sees_and_unpins_its_own() -> None:
    world = World(KV)
    pins = world.cache.pins
    pins.pin(TENANT, "name", as_tokens(serve(world, *range(20))))
    assert pins.listed("other") == []
    assert not pins.unpin("other", "name")
    assert pins.unpin(TENANT, "name")
    assert not pins.unpin(TENANT, "name")


def test_nothing_is_pinned_where_nothing_is_in_memory() -> None:
    world = World(KV)
    pins = world.cache.pins
    with pytest.raises(PinError, match="nothing of 'name'"):
        pins.pin(TENANT, "name", as_tokens([1, 2, 3]))
    assert world.cache.leases == set()


def test_conversations_are_remembered_up_to_a_bound() -> None:
    pins = World(KV).cache.pins
    for number in range(1500):
        pins.remember(TENANT, str(number), as_tokens([number]))
    pins.remember(TENANT, "1400", as_tokens([1, 2]))
    names, newest = zip(*pins.conversations(TENANT), strict=True)
    assert "0" not in names
    assert (names[-1], newest[-1].tolist()) == ("1400", [1, 2])
    assert pins.conversations("other") == []


def test_tenant_has_so_many_pins_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "_MOST", 3)
    world = World(KV)
    pins = world.cache.pins
    prompt = as_tokens(serve(world, *range(30)))
    for name in "abc":
        pins.pin(TENANT, name, prompt)
    with pytest.raises(PinError, match="you have 3 pins of this model, which is the most"):
        pins.pin(TENANT, "d", prompt)
    assert len(world.cache.leases) == len(pins.leases()) == 3
    pins.pin(TENANT, "a", prompt)
    assert pins.unpin(TENANT, "b")
    pins.pin(TENANT, "d", prompt)
    assert sorted(pin.name for pin in pins.listed(TENANT)) == ["a", "c", "d"]
    assert check.problems(world.cache) == []
