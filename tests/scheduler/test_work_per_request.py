"""Work of a request does not grow with the cache: nodes that it visits are counted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from umbel.cachestore.ledger import Size
from umbel.cachestore.node import TrieNode, as_tokens
from umbel.scheduler.kv_cache_manager import KVCacheManager
from umbel.scheduler.policy import ChunkSize
from umbel.scheduler.sequence import Sequence

from ..cachestore.fakes import KV, NAMESPACE, FakeSpan, World, conversation
from ..fakes import make_request
from .test_memory import PlannerFixture, state_of

_SIZE = ChunkSize(64)
EACH = 10
"""Tokens of a stored conversation."""


class Looks:
    """How often a field or a property of some node was read."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while the block lasts."""
        plain = object.__getattribute__

        def look(node: TrieNode, name: str) -> Any:
            self.count += 1
            return plain(node, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrieNode, "__getattribute__", look)
            yield


def stored(count: int, spare: int) -> PlannerFixture:
    """A planner whose cache has so many conversations, and room for so many tokens more."""
    world = World(KV)
    trie = world.cache.tries.open(NAMESPACE)
    for number in range(count):
        tokens = as_tokens([2 * 10**9 + number, *range(EACH - 1)])
        node = trie.append(trie.root, tokens, FakeSpan(world.registry, tokens))
        trie.touch(node, world.cache.pool.tick())
    nbytes = (world.cache.tries.size.nbytes + spare) * 16 // 15 + 16
    return PlannerFixture(world, nbytes=nbytes, buffers=1 << 40)


def sequence(number: int) -> Sequence:
    """A request of a prompt of its own."""
    return Sequence(make_request(str(number), list(conversation(number, EACH))))


def serve(fixture: PlannerFixture, number: int) -> None:
    """Start a request beside another one, compute, store what it computed, and describe it."""
    runs, comes = sequence(1000), sequence(number)
    fixture.planner.admits(comes, fixture.known(comes), [runs])
    fixture.planner.afford([runs], _SIZE, {runs: state_of(runs)})
    fixture.pool.make_room(Size(4 * (EACH + 2)))
    cache = fixture.world.cache
    lease = cache.begin(NAMESPACE, comes.tokens)
    lease.close(comes.tokens, FakeSpan(fixture.world.registry, comes.tokens.tolist()[lease.held :]))
    cache.tries.statistics()
    fixture.planner.release()


def looks(fixture: PlannerFixture, work: Callable[[PlannerFixture, int], None], times: int) -> int:
    """How often nodes are looked at for each of some requests."""
    seen = Looks()
    with seen.counted():
        for number in range(times):
            work(fixture, number)
    return seen.count // times


def test_request_beside_another_with_room_left() -> None:
    """Nothing has to go for it, so nothing is looked for."""
    few, many = (looks(stored(count, 10**6), serve, 20) for count in (100, 10_000))
    assert 0 < many <= few * 1.1


def test_request_in_a_full_cache() -> None:
    """The oldest go for it; the walk that finds them is shared by many requests."""
    few, many = (looks(stored(count, 0), serve, 400) for count in (100, 10_000))
    assert 0 < many <= few * 2


def refused(fixture: PlannerFixture, number: int) -> None:
    """Ask for more than there is."""
    del number
    assert not fixture.pool.make_room(fixture.pool.budget)


def after_a_preemption(fixture: PlannerFixture, number: int) -> None:
    """Ask whether another may start where one was preempted."""
    runs, comes = sequence(1000), sequence(number)
    if not number:
        fixture.planner.note_preemption([runs])
    assert not fixture.planner.admits(comes, fixture.known(comes), [runs])


def short_of_memory(fixture: PlannerFixture, number: int) -> None:
    """Ask whether the disk tier is about to give something up, without one."""
    del number
    opener: Any = None
    manager = KVCacheManager(opener, fixture.world.cache, interval=1 << 20)
    assert not manager.writing


@pytest.mark.parametrize("work", [refused, after_a_preemption, short_of_memory])
def test_question_that_is_asked_in_each_step(work: Callable[[PlannerFixture, int], None]) -> None:
    """While memory is short these are asked again and again: no node is looked at."""
    few, many = (looks(stored(count, 0), work, 5) for count in (100, 10_000))
    assert many <= few + 1
