"""Two models at work under one budget: whose state goes, and that neither waits for ever."""

import gc
from typing import NamedTuple

import mlx.core as mx
import pytest

from umbel.cachestore.check import problems
from umbel.cachestore.ledger import Size
from umbel.daemon.config import ModelSettings, Settings
from umbel.daemon.models.memory_budget import MemoryBudget
from umbel.models.runtime import device_memory
from umbel.scheduler.thread import Pace

from .memory_tools import Ask, ServerFixture, words, zoo_model

BUDGET = 6 << 20
"""Bytes: of some conversations of a few hundred tokens."""


class Two(NamedTuple):
    """Two models that share memory."""

    llama: ServerFixture
    gemma: ServerFixture

    @property
    def both(self) -> tuple[ServerFixture, ServerFixture]:
        """In the order in which they take turns."""
        return self.llama, self.gemma

    def run(self, most: int = 5000) -> None:
        """Let them take turns until both are done; the budget holds at each step."""
        pool = self.llama.memory.pool
        for _ in range(most):
            paces = [server.step() for server in self.both]
            assert pool.ledger.total.nbytes <= pool.budget.nbytes
            if all(server.idle for server in self.both):
                return
            assert set(paces) != {Pace.WAITING}, "each waits for the other"
        pytest.fail("they never ended")


@pytest.fixture
def two() -> Two:
    """Make them under a budget that holds a few conversations."""
    gc.collect()
    settings = Settings(models={"gemma": ModelSettings()}, cache_bytes=BUDGET)
    memory = MemoryBudget(settings, device_memory())
    names = ("llama", "gemma3_text")
    return Two(*(ServerFixture(zoo_model(name), BUDGET, memory=memory) for name in names))


def test_the_state_used_longest_ago_goes_whosever_it_is(two: Two) -> None:
    """And the newer stays, though it is the other model's."""
    old, new = words(300, 1), words(300, 2)
    two.llama.serve([Ask(old, 2)])
    two.gemma.serve([Ask(new, 2)])
    kept = [server.assembly.cache.tries.size.nbytes for server in two.both]
    pool = two.gemma.assembly.cache.pool
    assert pool.make_room(pool.room + Size(kept[0] // 2))
    sizes = [server.assembly.cache.tries.size.nbytes for server in two.both]
    assert sizes[0] < kept[0]
    assert sizes[1] == kept[1]
    assert not [found for server in two.both for found in problems(server.assembly.cache)]


def test_neither_waits_for_ever(two: Two) -> None:
    """Both short of memory that the other holds: one gives way, and all are answered."""
    for server in two.both:
        for number in range(4):
            server.send(Ask(words(400, number), 40))
    two.run()
    for server in two.both:
        assert [len(told.tokens) for told in server.told.values()] == [40] * 4


def test_a_closed_one_leaves_nothing(two: Two) -> None:
    """Its state, its share of the ledger and its memory are given back; the other goes on."""
    alone = two.llama.serve([Ask(words(300, 1), 4)])[0]
    held = two.llama.memory.pool.ledger.total
    gc.collect()
    active = mx.get_active_memory()
    two.gemma.serve([Ask(words(300, 2), 4)])
    two.gemma.assembly.close()
    mx.clear_cache()
    assert two.llama.memory.pool.ledger.total == held
    assert two.llama.memory.pool.tries == [two.llama.assembly.cache.tries]
    assert mx.get_active_memory() <= active
    assert two.llama.serve([Ask(words(300, 1), 4)])[0].tokens == alone.tokens
