"""The stacks that everything is tried over, and worlds that must not leak."""

from collections.abc import Callable, Iterator

import pytest

from .fakes import STACKS, Stack, World

MakeWorld = Callable[..., World]


@pytest.fixture(params=STACKS, ids=lambda stack: stack.name)
def stack(request: pytest.FixtureRequest) -> Stack:
    """One of the kinds of stacks that models come in."""
    chosen: Stack = request.param
    return chosen


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Build caches; whatever they have not given back at the end fails the test."""
    worlds: list[World] = []

    def make(stack: Stack, **options: int) -> World:
        worlds.append(World(stack, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.finish()


@pytest.fixture
def world(stack: Stack, make_world: MakeWorld) -> World:
    """Build a cache that is never under pressure, over each of the stacks."""
    return make_world(stack)
