"""Sequences as rows of a batch, on tiny real models, against mlx-lm's own caches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pytest

from umbel.models import planner
from umbel.models.kv import batch_cache
from umbel.models.kv.packed import PackedSpan
from umbel.models.kv.span_stack import SpanStack
from umbel.models.planned_for import Rules
from umbel.models.planner import SHARED

from .batch_fixture import NAMES, Agent, BatchFixture, Branch, each
from .steps import in_one_piece

if TYPE_CHECKING:
    from collections.abc import Callable


def schedule(party: BatchFixture, steps: int) -> None:
    """Let agents come, go, wait, run alone, be stored, cut and forked, at random."""
    rng, branches = party.rng, [Branch()]
    branches.append(party.branch(rng.randrange(1, 120)))

    def come(_: Agent) -> None:
        if len(party.agents) < 7:
            party.come(rng.choice(branches), rng.choice([0, 1, 5, 33, 70]))

    def pack(agent: Agent) -> None:
        if agent.cache.slot is None:
            party.pack(agent)

    operations: list[Callable[[Agent], object]] = [
        *(come, come, pack, party.leave),
        lambda agent: branches.append(party.store(agent)),
        party.leave_batch,
        lambda agent: agent.cache.make_contiguous(),
        lambda agent: party.feed([agent], rng.randrange(1, 5)),
        lambda _: party.cut(branches),
    ]
    for _ in range(steps):
        agent = rng.choice(party.agents or [party.come(branches[1], 3)])
        rng.choice(operations)(agent)
        some = [agent for agent in party.agents if rng.random() < 0.9]
        if some:
            party.feed(some, rng.randrange(1, 6))
    party.check()


@pytest.mark.parametrize(("name", "seed"), each(range(2)))
def test_any_schedule(name: str, seed: int) -> None:
    """Whatever happens to the others and to itself, a sequence gets the logits it gets alone."""
    schedule(BatchFixture(name, seed), 20)


def test_any_schedule_of_rows_that_are_put_together() -> None:
    """The same where the model attends by itself, to all keys of all rows."""
    schedule(BatchFixture("gemma2"), 10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama", "falcon_h1", "deepseek_v3", "gemma4_text"])
def test_any_schedule_of_stacks(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where what single rows lease is read side by side."""
    party = BatchFixture(name, seed, own=4, limit=24, stacks=True)
    made = list[int]()

    class Counted(SpanStack):
        """Notes the rows that are written."""

        def put(self, row: int, spans: Sequence[PackedSpan], layers: int) -> None:
            """See `SpanStack`."""
            made.append(row)
            super().put(row, spans, layers)

    monkeypatch.setattr(batch_cache, "SpanStack", Counted)
    schedule(party, 25)
    assert made


@pytest.mark.parametrize(("own", "shared", "limit"), [(4, 2, 8), (0, 0, 3), (100, 100, 100)])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_any_bounds(
    name: str, own: int, shared: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same wherever the bounds lie between what is a row's own and what is read elsewhere."""
    monkeypatch.setattr(planner, "SHARED", shared)
    schedule(BatchFixture(name, 7, own=own, limit=limit), 15)


@pytest.mark.parametrize("name", NAMES)
def test_standing_up_and_sitting_down(name: str) -> None:
    """A sequence may leave the batch and come back at any length, and the others do not notice."""
    party = BatchFixture(name)
    branch = party.branch(40)
    party.come()  # starts from nothing at all
    for prompt in (0, 3, 31, 90):
        party.come(branch, prompt)
    for turn in range(8):
        standing = party.agents[turn % 5]
        others = [agent for agent in party.agents if agent is not standing]
        party.feed(steps=1 + turn % 3)
        party.feed(others, 3)
        assert standing.cache.slot is None
        assert all(agent.cache.slot is not None for agent in others)
        for _ in range(turn % 3):
            party.feed([standing], 2)
    party.feed(steps=2)
    party.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_read_in_its_seat(name: str) -> None:
    """What is captured and sealed in a seat restores the sequence, and the seat goes on."""
    party = BatchFixture(name)
    branch = party.branch(50)
    first, *_ = [party.come(branch, prompt) for prompt in (3, 40, 0)]
    party.feed(steps=7)
    checkpoint = party.captured(first)
    if party.layout.has_checkpoints:
        party.feed(steps=5)  # a capture changes nothing
        checkpoint = party.captured(first)
    tokens, leased = list(first.tokens), list(first.cache.leased)
    span = in_one_piece(party.placement.take_packed(first.cache))
    assert (span is None) == (not party.layout.has_spans)
    stored = Branch(tokens, leased + ([] if span is None else [span]), checkpoint)
    party.placement.close(first.cache)
    party.agents.remove(first)
    party.check(first)
    for _ in range(2):
        party.come(stored, 1)
    party.feed(steps=9)
    party.check()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "gpt_oss"])
def test_rows_are_sealed_at_the_limit(name: str) -> None:
    """A row that is full becomes part of its trunk, and starts again; answers stay."""
    party = BatchFixture(name, own=4, limit=8)
    branch = party.branch(40)
    for prompt in (0, 3, 4, 5):
        party.come(branch, prompt)
    for step in range(30):
        party.feed()
        assert max(party.batch._suffixes.lengths) <= 8, step
    for agent in party.agents:
        own = sum(span.length for span in agent.cache.prefix) - 40
        assert own >= 16
        assert own + agent.cache.suffix_length + 40 == len(agent.tokens)
        assert len(agent.cache.prefix) <= 4, "small neighbours are joined"
    party.check()


def test_queries_are_tempered_by_row() -> None:
    """Where positions scale queries, each row's own does."""
    party = BatchFixture("llama4", floor_scale=8)
    branch = party.branch(40)
    for prompt in (0, 3, 31, 90):
        party.come(branch, prompt)
    party.feed(steps=40)
    party.check()


def shared(party: BatchFixture) -> list[tuple[int, set[int]]]:
    """For each run that several rows read in one product, its length, and these agents."""
    slots = party.placement.sequences
    numbers = {id(agent.cache): number for number, agent in enumerate(party.agents)}
    runs = []
    for spans, members in party.batch._step.shared:
        chosen = list(slots) if members is None else cast("list[int]", members.tolist())
        agents = {numbers[id(slots[slot])] for slot in chosen}
        runs.append((sum(span.length for span in spans), agents))
    return sorted(runs, key=lambda run: -run[0])


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "gpt_oss", "gemma2"])
def test_nested_sharing(name: str) -> None:
    """Each level of a nested prompt is read once by those who lease it, also when it is cut."""
    party = BatchFixture(name)
    system = party.branch(60)
    projects = [party.branch(length, system) for length in (50, 45)]
    for number in range(6):
        party.come(projects[number % 2] if number < 5 else system, 2 + number)
    party.feed(steps=4)
    levels = [(60, set(range(6))), (50, {0, 2, 4}), (45, {1, 3})]
    assert shared(party) == levels
    for _ in range(4):
        party.cut([system, *projects])
        party.feed(steps=2)
        assert shared(party) == levels
    party.check()


def own(party: BatchFixture) -> list[int]:
    """How many tokens each agent's row holds."""
    lengths = party.batch._suffixes.lengths
    return [lengths[cast("int", agent.cache.slot)] for agent in party.agents]


def test_short_ends_are_copied() -> None:
    """Of its trunk's end a row copies short segments, shared or not, and never a long one."""
    party = BatchFixture("llama")
    system = party.branch(60)
    short, long = party.branch(SHARED, system), party.branch(SHARED + 1, system)
    for branch in (short, short, long, long):
        party.come(branch, 1)
    party.feed()
    assert own(party) == [SHARED + 2] * 2 + [2] * 2
    assert shared(party) == [(60, {0, 1, 2, 3}), (SHARED + 1, {2, 3})]
    for length in (Rules().own - 1, Rules().own):
        party.come(party.branch(length, system), 1)
    party.feed()
    assert own(party)[4:] == [Rules().own + 1, 2]
    assert shared(party)[0] == (60, set(range(6)))
    party.check()


def test_sealing_in_a_seat() -> None:
    """A sequence whose tail is sealed while it sits reads each of its tokens once."""
    party = BatchFixture("llama", own=4, limit=8)
    for _ in range(2):
        party.come(prompt=3)
    party.feed(steps=12)
    party.pack(party.agents[0])
    party.feed(steps=2)
    party.check()
