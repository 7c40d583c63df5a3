"""Sequences as rows of a batch, on tiny real models, against mlx-lm's own caches."""

from typing import TYPE_CHECKING, cast

import pytest

from umbel.models import batch_planner
from umbel.models.batch_planner import SHARED

from .batch_fixture import NAMES, PRIVATE, Agent, BatchFixture, Branch, each
from .steps import in_one_piece

if TYPE_CHECKING:
    from collections.abc import Callable


def schedule(fixture: BatchFixture, steps: int) -> None:
    """Let agents come, go, wait, run alone, be stored, cut and forked, at random."""
    rng, branches = fixture.rng, [Branch()]
    branches.append(fixture.branch(rng.randrange(1, 120)))

    def come(_: Agent) -> None:
        if len(fixture.agents) < 7:
            fixture.come(rng.choice(branches), rng.choice([0, 1, 5, 33, 70]))

    def pack(agent: Agent) -> None:
        if agent.cache.slot is None:
            fixture.pack(agent)

    operations: list[Callable[[Agent], object]] = [
        *(come, come, pack, fixture.leave),
        lambda agent: branches.append(fixture.store(agent)),
        fixture.leave_batch,
        lambda agent: agent.cache.make_contiguous(),
        lambda agent: fixture.decode([agent], rng.randrange(1, 5)),
        lambda _: fixture.cut(branches),
    ]
    for _ in range(steps):
        agent = rng.choice(fixture.agents or [fixture.come(branches[1], 3)])
        rng.choice(operations)(agent)
        some = [agent for agent in fixture.agents if rng.random() < 0.9]
        if some:
            fixture.decode(some, rng.randrange(1, 6))
    fixture.check()


@pytest.mark.parametrize(("name", "seed"), each(range(2)))
def test_any_schedule(name: str, seed: int) -> None:
    """Whatever happens to the others and to itself, a sequence gets the logits it gets alone."""
    schedule(BatchFixture(name, seed), 20)


def test_any_schedule_of_rows_that_are_put_together() -> None:
    """The same where the model attends by itself, to all keys of all rows."""
    schedule(BatchFixture("gemma2"), 10)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", PRIVATE)
def test_any_schedule_of_private_prefixes(name: str, seed: int) -> None:
    """The same where rows copy little of what they lease, and are soon full."""
    schedule(BatchFixture(name, seed, own=4, limit=24), 25)


@pytest.mark.parametrize(("own", "shared", "limit"), [(4, 2, 8), (0, 0, 3), (100, 100, 100)])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_any_bounds(
    name: str, own: int, shared: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same wherever the bounds lie between what is a row's own and what is read elsewhere."""
    monkeypatch.setattr(batch_planner, "SHARED", shared)
    schedule(BatchFixture(name, 7, own=own, limit=limit), 15)


@pytest.mark.parametrize("name", NAMES)
def test_standing_up_and_sitting_down(name: str) -> None:
    """A sequence may leave the batch and come back at any length, and the others do not notice."""
    fixture = BatchFixture(name)
    branch = fixture.branch(40)
    fixture.come()  # starts from nothing at all
    for prompt in (0, 3, 31, 90):
        fixture.come(branch, prompt)
    for turn in range(8):
        standing = fixture.agents[turn % 5]
        others = [agent for agent in fixture.agents if agent is not standing]
        fixture.decode(steps=1 + turn % 3)
        fixture.decode(others, 3)
        assert standing.cache.slot is None
        assert all(agent.cache.slot is not None for agent in others)
        for _ in range(turn % 3):
            fixture.decode([standing], 2)
    fixture.decode(steps=2)
    fixture.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_read_in_its_seat(name: str) -> None:
    """What is captured and packed in a slot restores the sequence, and the slot goes on."""
    fixture = BatchFixture(name)
    branch = fixture.branch(50)
    first, *_ = [fixture.come(branch, prompt) for prompt in (3, 40, 0)]
    fixture.decode(steps=7)
    checkpoint = fixture.captured(first)
    if fixture.layout.has_checkpoints:
        fixture.decode(steps=5)  # a capture changes nothing
        checkpoint = fixture.captured(first)
    tokens, leased = list(first.tokens), list(first.cache.leased)
    span = in_one_piece(fixture.placement.take_packed(first.cache))
    assert (span is None) == (not fixture.layout.has_spans)
    stored = Branch(tokens, leased + ([] if span is None else [span]), checkpoint)
    fixture.placement.close(first.cache)
    fixture.agents.remove(first)
    fixture.check(first)
    for _ in range(2):
        fixture.come(stored, 1)
    fixture.decode(steps=9)
    fixture.check()


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text", "gpt_oss"])
def test_rows_are_sealed_at_the_limit(name: str) -> None:
    """A row that is full becomes part of its prefix, and starts again; answers stay."""
    fixture = BatchFixture(name, own=4, limit=8)
    branch = fixture.branch(40)
    for prompt in (0, 3, 4, 5):
        fixture.come(branch, prompt)
    for step in range(30):
        fixture.decode()
        assert max(fixture.batch._suffixes.lengths) <= 8, step
    for agent in fixture.agents:
        own = sum(span.length for span in agent.cache.prefix) - 40
        assert own >= 16
        assert own + agent.cache.suffix_length + 40 == len(agent.tokens)
        assert len(agent.cache.prefix) <= 4, "small neighbours are joined"
    fixture.check()


def test_queries_are_tempered_by_row() -> None:
    """Where positions scale queries, each row's own does."""
    fixture = BatchFixture("llama4", floor_scale=8)
    branch = fixture.branch(40)
    for prompt in (0, 3, 31, 90):
        fixture.come(branch, prompt)
    fixture.decode(steps=40)
    fixture.check()


def shared(fixture: BatchFixture) -> list[tuple[int, set[int]]]:
    """For each run that several rows read in one product, its length, and these agents."""
    slots = fixture.placement.sequences
    numbers = {id(agent.cache): number for number, agent in enumerate(fixture.agents)}
    runs = []
    for spans, members in fixture.batch._step.shared:
        chosen = list(slots) if members is None else cast("list[int]", members.tolist())
        agents = {numbers[id(slots[slot])] for slot in chosen}
        runs.append((sum(span.length for span in spans), agents))
    return sorted(runs, key=lambda run: -run[0])


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "gpt_oss", "gemma2"])
def test_nested_sharing(name: str) -> None:
    """Each level of a nested prompt is read once by those who lease it, also when it is cut."""
    fixture = BatchFixture(name)
    system = fixture.branch(60)
    projects = [fixture.branch(length, system) for length in (50, 45)]
    for number in range(6):
        fixture.come(projects[number % 2] if number < 5 else system, 2 + number)
    fixture.decode(steps=4)
    levels = [(60, set(range(6))), (50, {0, 2, 4}), (45, {1, 3})]
    assert shared(fixture) == levels
    for _ in range(4):
        fixture.cut([system, *projects])
        fixture.decode(steps=2)
        assert shared(fixture) == levels
    fixture.check()


def own(fixture: BatchFixture) -> list[int]:
    """How many tokens each agent's row holds."""
    lengths = fixture.batch._suffixes.lengths
    return [lengths[cast("int", agent.cache.slot)] for agent in fixture.agents]


def test_short_ends_are_copied() -> None:
    """Of its prefix's end a row copies short segments, shared or not, and never a long one."""
    fixture = BatchFixture("llama")
    system = fixture.branch(60)
    short, long = fixture.branch(SHARED, system), fixture.branch(SHARED + 1, system)
    for branch in (short, short, long, long):
        fixture.come(branch, 1)
    fixture.decode()
    assert own(fixture) == [SHARED + 2] * 2 + [2] * 2
    assert shared(fixture) == [(60, {0, 1, 2, 3}), (SHARED + 1, {2, 3})]
    most = fixture.runner.rules.own
    for length in (most - 1, most):
        fixture.come(fixture.branch(length, system), 1)
    fixture.decode()
    assert own(fixture)[4:] == [most + 1, 2]
    assert shared(fixture)[0] == (60, set(range(6)))
    fixture.check()


def test_sealing_in_a_seat() -> None:
    """A sequence whose suffix is packed while it has a slot reads each of its tokens once."""
    fixture = BatchFixture("llama", own=4, limit=8)
    for _ in range(2):
        fixture.come(prompt=3)
    fixture.decode(steps=12)
    fixture.pack(fixture.agents[0])
    fixture.decode(steps=2)
    fixture.check()
