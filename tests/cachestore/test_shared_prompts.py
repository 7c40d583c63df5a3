"""Prompts that all tenants read: computed once, and nothing else of them is common."""

from pathlib import Path

import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.node import as_tokens
from umbel.cachestore.pins import Pins
from umbel.cachestore.tries import SHARED, Namespace

from .fakes import KV, STACKS, Stack, TokenIds, World, conversation
from .pager_tools import PagedWorld

A, B = (Namespace(name) for name in "ab")
OPERATOR = Namespace(SHARED)
PROMPT = tuple(range(40))


def share(world: World, pins: Pins, tokens: TokenIds = PROMPT, name: str = "system") -> None:
    """Compute a prompt and declare it shared, as the daemon does."""
    world.serve([*tokens, 9999], (), (len(tokens), Reason.SYSTEM), namespace=OPERATOR)
    assert pins.pin(SHARED, name, as_tokens(tokens)).held == len(tokens)


def shared(world: World) -> Pins:
    """Pins of a world's cache, without a disk, that have the prompt declared."""
    share(world, world.cache.pins)
    return world.cache.pins


def follow(world: World, tenant: Namespace, seed: int) -> tuple[TokenIds, int]:
    """Serve a tenant a request that begins with the prompt; return it, and what was cached."""
    prompt = (*PROMPT, *conversation(seed, 30))
    return prompt, world.serve(prompt, (), (60, Reason.MESSAGE), namespace=tenant)


def end(world: World, pins: Pins) -> None:
    """Share nothing any more; then nothing may be left."""
    for pin in pins.listed(SHARED):
        assert pins.unpin(SHARED, pin.name)
    world.finish()


@pytest.fixture
def world(stack: Stack) -> World:
    """Build a cache that is never under pressure, over each of the stacks."""
    return World(stack)


def test_it_is_computed_once_and_read_by_all(world: World) -> None:
    """Each tenant's first request resumes at its end, and takes memory for its own part only."""
    pins = shared(world)
    before = world.cache.tries.size.nbytes
    _, cached = follow(world, A, 1)
    own = world.cache.tries.size.nbytes - before
    assert cached == len(PROMPT)
    _, cached = follow(world, B, 2)
    assert cached == len(PROMPT)
    assert world.cache.tries.size.nbytes == before + 2 * own
    if world.stack is KV:
        assert own == 4 * 30
    end(world, pins)


def test_continuation_is_its_tenants_alone(world: World) -> None:
    """The same request of another tenant resumes where what is shared ends, and knows no more."""
    pins = shared(world)
    prompt, _ = follow(world, A, 1)
    assert world.probe([*prompt, 7], B) == (len(PROMPT), len(PROMPT))
    matched, cached = world.probe([*prompt, 7], A)
    assert matched >= 60
    assert cached >= 60
    for tenant in (A, B):
        known = world.cache.known(tenant, as_tokens([*prompt, 7]))
        assert (known.cached >= 60) == (tenant is A)
        assert known.cached == world.probe([*prompt, 7], tenant)[1]
    end(world, pins)


@pytest.mark.parametrize("length", [1, 20, 39, 40])
def test_a_part_of_it_is_not_shared(world: World, length: int) -> None:
    pins = shared(world)
    other = (*PROMPT[:length], 5555, *range(30)) if length < 40 else PROMPT
    assert world.probe(other, A) == (0, 0)
    assert world.cache.known(A, as_tokens(other)).tokens == 0
    end(world, pins)


def test_it_is_always_there(world: World) -> None:
    pins = shared(world)
    follow(world, A, 1)
    world.cache.evict(0)
    world.cache.clear()
    assert follow(world, B, 2)[1] == len(PROMPT)
    end(world, pins)


def test_the_longest_counts(world: World) -> None:
    pins = shared(world)
    longer = (*PROMPT, *conversation(7, 20))
    share(world, pins, longer, "longer")
    assert world.probe([*longer, 1], A) == (60, 60)
    assert world.probe([*longer[:59], 1], A) == (40, 40)
    end(world, pins)


def test_unsharing_forgets_prompt_and_continuations(world: World) -> None:
    pins = shared(world)
    prompt, _ = follow(world, A, 1)
    running = world.begin([*prompt, 7], namespace=A)
    assert pins.unpin(SHARED, "system")
    assert world.probe([*prompt, 7], A) == (0, 0)
    world.cache.evict(0)
    world.check()
    running.prefill().decode((1, 2, 3)).finish()
    world.check()
    assert world.probe([*prompt, 7], A) == (0, 0)
    world.cache.clear()
    assert world.cache.tries.size.nbytes == 0
    world.finish()


def test_sharing_again_keeps_continuations(world: World) -> None:
    pins = shared(world)
    prompt, _ = follow(world, A, 1)
    running = world.begin([*prompt, 7], namespace=A)
    share(world, pins)
    assert world.probe([*prompt, 7], A)[1] >= 60
    running.prefill().finish()
    assert len(pins.leases()) == 1
    end(world, pins)


def test_older_conversation_moves_below_shared_prompt(world: World) -> None:
    prompt, _ = follow(world, A, 1)
    pins = shared(world)
    assert world.serve([*prompt, 7], namespace=A) == len(PROMPT)
    assert world.probe([*prompt, 7, 8], A)[0] >= len(prompt)
    end(world, pins)


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_shared_prompt_and_continuations_survive_restart(stack: Stack, folder: Path) -> None:
    with PagedWorld(stack, folder) as world:
        share(world, world.cache.pins)
        prompt, _ = follow(world, A, 1)
        world.write_all()
        world.restart()
        assert world.cache.pins.is_awaited(A, as_tokens([*prompt, 7]))
        assert not world.cache.pins.is_awaited(A, as_tokens([*PROMPT[:30], 7]))
        while world.cache.pins.is_awaited(A, as_tokens([*prompt, 7])):
            world.step()
        assert follow(world, B, 2)[1] == len(PROMPT)
        world.fetch([*prompt, 7], A)
        assert world.probe([*prompt, 7], A)[1] >= 60
        assert world.probe([*prompt, 7], B)[1] == len(PROMPT)
        world.finish()


def test_unreadable_prompt_is_not_shared(folder: Path) -> None:
    with PagedWorld(KV, folder) as world:
        share(world, world.cache.pins)
        prompt, _ = follow(world, A, 1)
        world.write_all()
        for trie in [trie for name, trie in world.cache.tries.items() if name == OPERATOR]:
            for node in trie.nodes():
                for extent in node.extents:
                    world.tier.path(extent.record).write_bytes(
                        bytes(extent.record.nbytes)
                    )  # damaged, and as long as before
        world.restart()
        while world.cache.pins.is_awaited(A, as_tokens([*prompt, 7])):
            world.step()
        assert world.serve([*prompt, 7], namespace=A) == 0
        world.step()
        assert {name.base for name, _ in world.cache.tries.items()} == {b""}
        world.finish()
