"""A pin is there wholly or not at all, whatever is raised on the way, and wherever."""

from typing import Any

import pytest

from umbel.cachestore import check, pins, prefix_cache
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.node import as_tokens
from umbel.cachestore.pins import Pins
from umbel.cachestore.pool import MemoryPool
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.trie import RadixTrie
from umbel.cachestore.tries import SHARED

from .fakes import HYBRID, NAMESPACE, World
from .test_lease_faults import PanicError

PLACES: list[tuple[Any, str]] = [
    (prefix_cache, "node_at"),
    (pins, "digest"),
    (pins, "size_in_memory"),
    (RadixTrie, "prune"),
    (PrefixCache, "evict"),
    (PrefixCache, "clear"),
    (MemoryPool, "tick"),
    (Pins, "put"),
    (Pins, "settle"),
]
OLDER, NEWER = tuple(range(20)), tuple(range(100, 130))


def pinned_world(tenant: str) -> tuple[World, Pins]:
    """A cache that has two prompts of a tenant, and one of its pins."""
    world = World(HYBRID)
    own = world.cache.pins
    for tokens in (OLDER, NEWER):
        reason = len(tokens), Reason.SYSTEM
        world.serve([*tokens, 9999], (), reason, namespace=NAMESPACE._replace(tenant=tenant))
    own.pin(tenant, "name", as_tokens(OLDER), operator=True)
    return world, own


def check_whole(world: World, own: Pins, tenant: str) -> None:
    listed = own.listed(tenant)
    assert len(world.cache.leases) == len(own.leases(tenant)) == len(listed)
    assert all(lease.open for lease in world.cache.leases)
    assert check.problems(world.cache) == []
    other = NAMESPACE._replace(tenant="other")
    for tokens in (OLDER, NEWER):
        pinned = any(pin.held == pin.tokens == len(tokens) for pin in listed)
        shared = pinned and tenant == SHARED
        assert world.probe([*tokens, 1], other)[1] == (len(tokens) if shared else 0)


@pytest.mark.parametrize("call", [0, 1, 2])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
@pytest.mark.parametrize("act", ["pin", "replace", "unpin", "close"])
@pytest.mark.parametrize("tenant", [SHARED, NAMESPACE.tenant], ids=["shared", "own"])
def test_pin_is_whole_or_not_there(
    tenant: str, act: str, place: tuple[Any, str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the middle leaves no pin without its state, and no state without its pin."""
    world, own = pinned_world(tenant)
    before, calls = own.listed(tenant), iter(range(1 << 30))
    owner, name = place
    works, failed = getattr(owner, name), False

    def fails(*args: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise PanicError
        return works(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        try:
            if act in {"pin", "replace"}:
                pin = "other" if act == "pin" else "name"
                own.pin(tenant, pin, as_tokens(NEWER), operator=True)
            elif act == "unpin":
                own.unpin(tenant, "name")
            else:
                own.close()
        except PanicError:
            failed = True
    if act in {"pin", "replace"}:
        names = {pin.name for pin in own.listed(tenant)}
        assert names == ({"name"} if failed or act == "replace" else {"name", "other"})
        assert (own.listed(tenant) == before) is failed
        world.serve((7, 8, 9))  # a lease that closes settles the rest
        check_whole(world, own, tenant)
        own.close()
    elif act == "unpin":
        assert own.listed(tenant) == []
        assert not failed
        own.close()
    assert own not in world.cache.pool.pins
    assert world.cache.leases == set()
    world.cache.clear()
    assert world.cache.tries.size.nbytes == 0
    assert check.problems(world.cache) == []
