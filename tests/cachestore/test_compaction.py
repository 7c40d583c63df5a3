"""A conversation is a few long segments, whatever its turns were, and is seldom copied."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.node import TrieNode, as_tokens

from .fakes import HYBRID, KV, NAMESPACE, SLIDING, Stack, TokenIds, World
from .pager_tools import PagedSequence, PagedWorld

STATES = (KV, SLIDING, HYBRID)
TURNS = {KV.name: 100, HYBRID.name: 100, SLIDING.name: 25}  # checkpoints like the hybrid's
SYSTEM = 300
_COPIES = 1.2
"""Counted: from 0.27 to 0.4, and 1.03 where all turns are tiny; what is short is copied more."""


class Turn(NamedTuple):
    """Tokens that a turn adds; `dropped` ones end its answer, and the next prompt lacks them."""

    message: int
    answer: int
    dropped: int = 0


def some(rng: random.Random) -> Iterator[Turn]:
    while True:
        yield Turn(rng.randint(5, 400), rng.randint(3, 200))


def short_answers(rng: random.Random) -> Iterator[Turn]:
    """A few tokens behind each long result of a tool."""
    while True:
        yield Turn(400, rng.randint(3, 5))


def long_answers(rng: random.Random) -> Iterator[Turn]:
    while True:
        yield Turn(rng.randint(5, 7), 200)


def alternating(rng: random.Random) -> Iterator[Turn]:
    while True:
        yield Turn(400, 200)
        yield from [Turn(rng.randint(5, 9), 3)] * 4


def tiny(rng: random.Random) -> Iterator[Turn]:
    while True:
        yield Turn(rng.randint(5, 6), 3)


def dead_ends(rng: random.Random) -> Iterator[Turn]:
    """Each answer begins as the next prompt has it, and goes on otherwise."""
    while True:
        answer = rng.randint(3, 200)
        yield Turn(rng.randint(5, 400), answer, rng.randint(1, answer))


Pattern = Callable[[random.Random], Iterator[Turn]]
PATTERNS: tuple[Pattern, ...] = (some, short_answers, long_answers, alternating, tiny, dead_ends)

QUICK = ("short-answers",)  # with checkpoints
NAMES = ("some", "short-answers", "long-answers", "alternating", "tiny", "dead-ends")


class Conversation:
    """A client that sends its history; `computed` counts tokens of dead ends too."""

    def __init__(self, world: World, system: Sequence[int], seed: int) -> None:
        self.world = world
        self.history = list(system)
        self.computed = 0
        self._rng = random.Random(seed)  # noqa: S311  (not a secret)

    def fresh(self, count: int) -> TokenIds:
        return tuple(self._rng.randrange(1 << 30) for _ in range(count))

    def take(self, turn: Turn) -> None:
        prompt = (*self.history, *self.fresh(turn.message))
        boundaries = ((len(self.history), Reason.MESSAGE), (len(prompt) - 3, Reason.MESSAGE))
        sequence = PagedSequence(self.world, NAMESPACE, prompt, boundaries)
        self.computed += sequence.left + turn.answer
        sequence.prefill().publish()
        sequence.decode(self.fresh(turn.answer)).finish()
        self.history = sequence.state[: len(sequence.state) - turn.dropped]

    def path(self) -> list[TrieNode]:
        node, known = self.world.trie.match(as_tokens(self.history))
        assert known == len(self.history)
        return node.path()


def segments(path: Sequence[TrieNode]) -> int:
    """How many segments the state of a path is read in."""
    spans = [node.span for node in path if node.span is not None]
    assert len(spans) == len(path)
    return 1 + sum(not before.adjoins(span) for before, span in pairwise(spans))


def bound(tokens: int) -> float:
    """Pieces that a conversation of so many tokens may be."""
    return 2 + math.log2(max(1, tokens / 256))


@pytest.mark.parametrize(
    ("stack", "pattern"),
    [
        pytest.param(
            stack,
            pattern,
            id=f"{stack.name}-{name}",
            marks=[pytest.mark.slow] if stack is HYBRID and name not in QUICK else [],
        )
        for stack in STATES
        for pattern, name in zip(PATTERNS, NAMES, strict=True)
    ],
)
def test_a_conversation_is_a_few_segments(stack: Stack, pattern: Pattern) -> None:
    world = World(stack)
    agent = Conversation(world, range(SYSTEM), 1)
    turns = pattern(random.Random(1))  # noqa: S311  (not a secret)
    for number in range(TURNS[stack.name]):
        agent.take(next(turns))
        assert segments(agent.path()) <= bound(agent.computed), number
        if not number % 25:
            world.check()
    assert len(agent.path()) > segments(agent.path()) or stack is KV
    assert world.registry.copied <= _COPIES * agent.computed * math.log2(agent.computed)
    world.check()
    world.finish()


@pytest.mark.parametrize("shared", [30, 300, 3000])
@pytest.mark.parametrize("stack", STATES, ids=lambda stack: stack.name)
def test_shared_beginning_is_one_segment_more(stack: Stack, shared: int) -> None:
    """Conversations in turn do not take their common beginning from one another all the time."""
    world, rng = World(stack), random.Random(shared)  # noqa: S311  (not a secret)
    agents = [Conversation(world, range(shared), seed) for seed in range(3)]
    for number in range(90):
        agent = rng.choice(agents)
        agent.take(Turn(rng.choice([5, 60, 300]), rng.choice([3, 40])))
        assert segments(agent.path()) <= 1 + bound(agent.computed), number
    computed = sum(agent.computed for agent in agents)
    assert world.registry.copied <= _COPIES * computed * math.log2(computed)
    world.check()
    world.finish()


def test_a_small_beginning_stays_with_the_longer_conversation() -> None:
    """It would be copied with either one's state in each turn, and what stays there, too."""
    world = World(KV)
    agents = [Conversation(world, range(100), seed) for seed in range(2)]
    for agent, tokens in zip(agents, (1000, 900), strict=True):
        agent.take(Turn(tokens, 3))
    before = world.registry.copied
    for _ in range(20):
        for agent in agents:
            agent.take(Turn(6, 4))
    assert world.registry.copied - before < 8000
    world.finish()


@pytest.mark.parametrize("stack", [KV, HYBRID], ids=lambda stack: stack.name)
def test_segments_stay_few_whatever_else_happens(stack: Stack, folder: Path) -> None:
    """Writes, page-outs, evictions, pins and restarts between the turns of a conversation."""
    with PagedWorld(stack, folder) as world:
        agent = Conversation(world, range(SYSTEM), 0)
        turns = some(random.Random(0))  # noqa: S311  (not a secret)
        for number in range(24):
            if number == 18:
                world.write_all()
                world.restart()
            if number in (6, 21):
                world.cache.evict(world.cache.tries.size.nbytes * 2 // 3)
            if number == 12:
                world.page_out()
            world.fetch([*agent.history, 1])
            agent.take(next(turns))
            if number % 7:
                world.pager.step()  # and the next turn ends while it is being written, perhaps
            assert segments(agent.path()) <= bound(agent.computed), number
        world.write_all()
        world.page_out()
        world.fetch([*agent.history, 1])
        read = [node for node in agent.path() if node.span is not None]
        # It is put together before it is leased.
        assert segments(read) <= bound(agent.computed)
        assert stack is KV or len(read) > 5
        world.finish()


@pytest.mark.parametrize("stack", STATES, ids=lambda stack: stack.name)
def test_pinned_nodes_are_not_joined(stack: Stack) -> None:
    world = World(stack)
    agent = Conversation(world, range(SYSTEM), 0)
    for _ in range(10):
        agent.take(Turn(60, 20))
    pinned = world.cache.begin(NAMESPACE, as_tokens([*agent.history, -1]))
    before = len({id(span.storage) for span in pinned.spans()})
    for _ in range(40):
        agent.take(Turn(60, 20))
        assert segments(agent.path()) <= before + bound(agent.computed)
        assert len({id(span.storage) for span in pinned.spans()}) <= before
    pinned.close()
    agent.take(Turn(2000, 20))
    assert segments(agent.path()) <= bound(agent.computed)
    world.check()
    world.finish()


def test_no_more_is_copied_at_a_time_than_there_is_room_for() -> None:
    world = World(KV)
    world.cache.longest = 500
    largest, before = 0, 0
    agents = [Conversation(world, range(100), seed) for seed in range(2)]
    rng = random.Random(0)  # noqa: S311  (not a secret)
    for _ in range(80):
        agent = rng.choice(agents)
        agent.take(Turn(rng.randint(5, 90), rng.randint(3, 90), rng.randint(0, 3)))
        largest = max(largest, world.registry.copied - before)
        before = world.registry.copied
        longest = max(len(node.tokens) for node in world.trie.nodes())
        assert longest <= 500
    assert 250 < largest <= 500
    world.finish()
