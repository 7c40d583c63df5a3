"""The stacks that everything is tried over, and worlds that must not leak."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from structlog.testing import capture_logs

from umbel.cachestore.disk import tier as disk_tier

from .fakes import STACKS, Stack, World
from .pager_tools import write_unless_poisoned

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


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Name a folder in memory, where there is such a thing: the disk itself is not tested."""
    memory = Path("/dev/shm")  # noqa: S108  (a folder of our own in it)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(disk_tier, "write_file", write_unless_poisoned)
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as name, capture_logs():
        yield Path(name) / "disk"
