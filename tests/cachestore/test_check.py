"""The checker finds damage of every kind; else "no problems" would mean nothing."""

from collections.abc import Callable

import pytest

from umbel.cachestore import check
from umbel.cachestore.ledger import Size
from umbel.cachestore.node import TrieNode, as_tokens

from .fakes import (
    EXACT,
    HYBRID,
    KV,
    NAMESPACE,
    RECURRENT,
    STACKS,
    FakeCheckpoint,
    FakeSpan,
    Stack,
    World,
    conversation,
)


def sound(stack: Stack = HYBRID) -> World:
    """Build a cache with a junction, checkpoints and an open lease on a path."""
    world = World(stack)
    world.serve(range(20))
    world.serve([*range(10), 50, 51])
    world.begin(range(20))
    assert check.problems(world.cache) == []
    return world


def empty_edge(world: World) -> None:
    node = world.node(12)
    node.tokens = as_tokens([])


def gap(world: World) -> None:
    world.node(12).start += 1


def wrong_token(world: World) -> None:
    """File a node under a token that is not its first."""
    children = world.node(10).children
    children[99] = children.pop(50)


def wrong_parent(world: World) -> None:
    world.node(12).parent = world.node(19)


def span_too_short(world: World) -> None:
    node = world.node(12)
    assert node.span is not None
    node.span.close()
    node.span = FakeSpan(world.registry, [1, 2, 3])


def hole(world: World) -> None:
    world.node(10).span = None


def misplaced_checkpoint(world: World) -> None:
    world.node(12).checkpoint = FakeCheckpoint(world.registry, [1])


def unheld_parent(world: World) -> None:
    world.node(10).ref_count -= 1


def extra_hold(world: World) -> None:
    world.node(12).ref_count += 1


def uncounted_span(world: World) -> None:
    world.trie.spans._account.add(Size(-4))


def unviewed(world: World) -> None:
    span = world.node(12).span
    assert isinstance(span, FakeSpan)
    span.storage.tokens += (9,)


def stray_view(world: World) -> None:
    node = world.node(19)
    assert node.span is not None
    node.span = node.span.split(1)[1]


def scattered(world: World) -> None:
    upper, lower = world.node(12), world.node(20)
    for node in (upper, lower):
        assert node.span is not None
        node.span.close()
    upper.span, lower.span = FakeSpan(world.registry, range(12)).split(2)


def uncounted_buffers(world: World) -> None:
    world.trie.spans._account.add(Size(0, 2))


def uncounted_checkpoint(world: World) -> None:
    world.trie.checkpoints.add(Size(4))


def state_at_the_root(world: World) -> None:
    world.trie.root.checkpoint = FakeCheckpoint(world.registry, [])


def stale_lease(world: World) -> None:
    del world.trie.root.children[0]


def empty_trie(world: World) -> None:
    world.sequences[0].fail()
    for node in list(world.trie.nodes()):
        world.trie.root.children.pop(int(node.tokens[0]), None)


def lost_checkpoint(world: World) -> None:
    """Take away what an open lease shall restore from."""
    world.node(19).checkpoint = None


def dropped_trie(world: World) -> None:
    world.cache.tries._tries.clear()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (empty_edge, "empty edge"),
        (gap, "does not start where its parent ends"),
        (wrong_token, "wrong token or parent"),
        (wrong_parent, "wrong token or parent"),
        (span_too_short, "has a span of 3 tokens"),
        (hole, "has no span"),
        (misplaced_checkpoint, "has a checkpoint of offset 1"),
        (unheld_parent, "retained less often than its children"),
        (extra_hold, "is retained 1 times"),
        (uncounted_span, "are counted"),
        (unviewed, "some that no span views"),
        (stray_view, "viewed by what is in no node"),
        (scattered, "do not follow one another"),
        (uncounted_buffers, "buffers and"),
        (uncounted_checkpoint, "are counted"),
        (state_at_the_root, "the root has"),
        (stale_lease, "in no trie"),
        (empty_trie, "an empty trie"),
        (lost_checkpoint, "does not retain"),
        (dropped_trie, "was dropped"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_found(damage: Callable[[World], None], words: str) -> None:
    world = sound()
    damage(world)
    assert words in "\n".join(check.problems(world.cache))


def test_a_leaf_without_state_is_found() -> None:
    world = World(RECURRENT)
    world.serve(range(20))
    world.trie.append(world.node(19), as_tokens([5]), None)
    assert "a leaf without state" in "\n".join(check.problems(world.cache))


def test_a_lease_without_its_spans_is_found() -> None:
    world = sound(KV)
    world.sequences[0].lease.held += 1
    assert "has spans of 19 tokens" in "\n".join(check.problems(world.cache))


@pytest.mark.parametrize("stack", EXACT, ids=lambda stack: stack.name)
def test_a_lease_without_its_checkpoint_is_found(stack: Stack) -> None:
    world = World(stack)
    world.serve(range(20))
    lease = world.begin(range(20)).lease
    assert lease.cached
    lease._checkpoint = None
    assert "has no checkpoint" in "\n".join(check.problems(world.cache))


def test_problems_name_the_trie() -> None:
    """The report tells tries apart, but not whose they are: any tenant may ask for it."""
    world = sound()
    world.trie.spans._account.size += Size(1)
    problem, _ = check.problems(world.cache)  # the second is the ledger's
    assert problem.startswith("trie 0: ")


def test_a_path_ends_at_its_node_and_leaves_the_root_out() -> None:
    world = sound()
    path: list[TrieNode] = world.node(11).path()
    assert [node.end for node in path] == [10, 11]
    assert world.trie.root.path() == []


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
def test_a_cache_that_changes_between_pieces_is_sound(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_AT_ONCE", 2)
    world = World(stack)
    for number in range(12):
        world.serve(conversation(number, 20), (1, 2))
    running = [world.begin(conversation(number, 25)) for number in range(3)]
    pieces = 0
    for found in check.examine(world.cache):
        assert found == []
        pieces += 1
        world.serve(conversation(100 + pieces, 10))
        world.cache.evict(world.cache.tries.size.nbytes * 3 // 4)
        if running and pieces % 3 == 0:
            running.pop().fail()
    assert pieces > 10


def test_the_check_takes_as_long_as_there_are_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    for count in (100, 1000):
        world = World(KV)
        trie = world.cache.tries.open(NAMESPACE)
        for first in range(count):
            tokens = as_tokens([first, 1])
            trie.append(trie.root, tokens, FakeSpan(world.registry, tokens.tolist()))
        assert len(trie.persistence.dirty) == count
        seen = [0]

        def look(node: TrieNode, name: str, seen: list[int] = seen) -> object:
            seen[0] += 1
            return object.__getattribute__(node, name)

        with monkeypatch.context() as patch:
            patch.setattr(TrieNode, "__getattribute__", look)
            assert check.problems(world.cache) == []
        looks.append(seen[0])
    assert looks[1] < looks[0] * 10.5
