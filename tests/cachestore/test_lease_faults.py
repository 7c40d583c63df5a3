"""Each lease closes, whatever is raised on the way, and wherever."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from umbel.cachestore import prefix_cache
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.ledger import Kind
from umbel.cachestore.node import as_tokens
from umbel.cachestore.pins import Pins
from umbel.cachestore.pool import MemoryPool
from umbel.cachestore.prefix_cache import Lease, PrefixCache
from umbel.cachestore.trie import RadixTrie

from .fakes import HYBRID, NAMESPACE, World, conversation

PLACES = [
    (prefix_cache, "insert"),
    (prefix_cache, "attach"),
    (prefix_cache, "compact"),
    (prefix_cache, "node_at"),
    (RadixTrie, "match"),
    (RadixTrie, "prune"),
    (RadixTrie, "split"),
    (RadixTrie, "append"),
    (RadixTrie, "set_span"),
    (RadixTrie, "set_checkpoint"),
    (MemoryPool, "tick"),
    (Lease, "_check_handover"),
    (PrefixCache, "evict"),
    (Pins, "settle"),
]


class PanicError(BaseException):
    """Error that native code may raise."""


def request(world: World, tokens: tuple[int, ...]) -> None:
    """Begin, publish, capture and hand over, and close once more if that fails, as the engine."""
    lease = world.cache.begin(NAMESPACE, as_tokens(tokens))
    try:
        half = (lease.held + len(tokens)) // 2
        lease.capture(world.checkpoint(tokens[:half]), Reason.SYSTEM)
        lease.publish(as_tokens(tokens[:half]), world.span(tokens[lease.held : half]))
        lease.capture(world.checkpoint(tokens), Reason.FINAL)
        lease.close(as_tokens(tokens), world.span(tokens[lease.held :]))
    except PanicError:
        lease.close()


@pytest.mark.parametrize("call", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_lease_closes_whatever_is_raised(
    place: tuple[Any, str], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, calls = World(HYBRID, budget=400), iter(range(1 << 30))
    owner, name = place
    works = getattr(owner, name)

    def fails(*args: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise PanicError
        return works(*args, **named)

    monkeypatch.setattr(owner, name, fails)
    for tokens in _conversations():
        with suppress(PanicError):  # nothing was leased
            request(world, tokens)
        assert world.cache.leases == set()
    assert not any(trie.root.ref_count for trie in world.cache.tries)
    stored = sum(trie.checkpoints.size.nbytes for trie in world.cache.tries)
    assert world.cache.ledger.held(Kind.CHECKPOINT).nbytes == stored


def _conversations() -> Iterator[tuple[int, ...]]:
    for number in range(4):
        yield conversation(number, 20)
        yield (*conversation(number, 12), *conversation(50 + number, 9))
