"""Sequences as rows of a batch, on tiny real models, against mlx-lm's own caches."""

import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models import batch_planner, runner
from umbel.models.batch_planner import SHARED

from ..shared import AS_GPU
from .batch_fixture import CLASSES, NAMES, Agent, BatchFixture, Branch, each
from .steps import run

if TYPE_CHECKING:
    from collections.abc import Callable


def schedule(fixture: BatchFixture, steps: int) -> None:
    """Let agents come, go, wait, run alone, be stored, cut and forked, at random."""
    rng, branches = fixture.rng, [Branch()]
    branches.append(fixture.branch(rng.randrange(1, 120)))

    def come(_: Agent) -> None:
        if len(fixture.agents) < 7:
            fixture.come(rng.choice(branches), rng.choice([0, 1, 5, 33, 70]))

    operations: list[Callable[[Agent], object]] = [
        *(come, come, fixture.publish, fixture.leave),
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
@pytest.mark.parametrize("name", CLASSES)
def test_any_schedule_of_length_classes(name: str, seed: int) -> None:
    """The same where rows soon move from one length class to the next."""
    schedule(BatchFixture(name, seed, least_class=16), 25)


@pytest.mark.parametrize(("least", "shared"), [(4, 2), (2, 0), (100, 100)])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_any_bounds(name: str, least: int, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same wherever the bounds lie between what is a row's own and what is read elsewhere."""
    monkeypatch.setattr(batch_planner, "SHARED", shared)
    schedule(BatchFixture(name, 7, least_class=least), 15)


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
    """State captured and packed in a slot restores the sequence, and the slot continues."""
    fixture = BatchFixture(name)
    branch = fixture.branch(50)
    first, *_ = [fixture.come(branch, prompt) for prompt in (3, 40, 0)]
    fixture.decode(steps=7)
    checkpoint = fixture.captured(first)
    if fixture.layout.has_checkpoints:
        fixture.decode(steps=5)  # a capture changes nothing
        checkpoint = fixture.captured(first)
    tokens, leased = list(first.tokens), list(first.cache.leased)
    span = fixture.placement.suffix_span(first.cache)
    assert (span is None) == (not fixture.layout.has_spans)
    stored = Branch(tokens, leased + ([] if span is None else [span]), checkpoint)
    fixture.placement.close(first.cache)
    fixture.agents.remove(first)
    fixture.check(first)
    for _ in range(2):
        fixture.come(stored, 1)
    fixture.decode(steps=9)
    fixture.check()


def classes(fixture: BatchFixture) -> dict[int, list[int]]:
    """Own tokens of the rows of each length class."""
    found: dict[int, list[int]] = {}
    rows = fixture.placement.own
    assert rows is not None
    for slot, seat in rows.seats.items():
        found.setdefault(seat.limit, []).append(rows.length(slot))
    return {limit: sorted(lengths) for limit, lengths in sorted(found.items())}


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gpt_oss", "llama_kv8", "deepseek_v3"])
def test_a_full_row_moves_to_the_next_class(name: str) -> None:
    """Rows of one length share a buffer, which is at most twice as long as a row."""
    fixture = BatchFixture(name, least_class=16)
    branch = fixture.branch(40)
    for prompt in (1, 12, 13, 100):
        fixture.come(branch, prompt)
    fixture.decode()
    assert classes(fixture) == {16: [2, 13, 14], 128: [101]}
    fixture.decode(steps=5)
    assert classes(fixture) == {16: [7], 32: [18, 19], 128: [106]}
    fixture.decode(steps=40)
    assert classes(fixture) == {64: [47, 58, 59], 256: [146]}
    fixture.check()


def test_a_step_launches_as_many_operations_after_any_number_of_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Histories that grow by a span each turn are one piece in their rows."""
    counted = list[int]()

    def count(logits: mx.array, _: object) -> None:
        counted.append(operations(logits))

    monkeypatch.setattr(runner, "launch", count)
    for turns in (1, 4, 10):
        fixture = BatchFixture("llama", device=replace(AS_GPU, launches_layers=False))
        system = fixture.branch(60)
        for _ in range(4):
            branch = system
            for _ in range(turns):
                branch = fixture.branch(5, branch)
            fixture.come(branch, 1)
        fixture.decode()
        run(fixture.runner, list(fixture.placement.sequences.values()), [1] * 4)
    _, first, _, second, _, third = counted
    assert 100 < first == second == third


def operations(array: mx.array) -> int:
    """Number of operations that an array is still to be computed by."""
    with tempfile.TemporaryFile("w+") as file:
        mx.export_to_dot(file, array)
        file.seek(0)
        return file.read().count("shape=rectangle")


def test_what_becomes_shared_is_read_once() -> None:
    """A row that copied what it read alone reads it with the others who come, and alone again."""
    fixture = BatchFixture("llama")
    branch = fixture.branch(200)
    first = fixture.come(branch, 3)
    other = fixture.come(prompt=7)
    fixture.decode()
    assert shared(fixture) == []
    assert own(fixture) == [204, 8]
    fixture.come(branch, 4)
    fixture.decode()
    assert shared(fixture) == [(200, {0, 2})]
    assert own(fixture) == [5, 9, 5]
    fixture.leave(first)
    fixture.decode()
    assert shared(fixture) == []
    assert own(fixture) == [10, 206]
    fixture.leave(other)
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
    """Each level of a nested prompt is read once for its rows, also when it is cut."""
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
    rows = fixture.placement.own
    assert rows is not None
    return [rows.length(cast("int", agent.cache.slot)) for agent in fixture.agents]


def test_short_ends_are_copied() -> None:
    """A row copies what it reads alone, and a short end of what is shared."""
    fixture = BatchFixture("llama")
    system = fixture.branch(60)
    short, long = fixture.branch(SHARED, system), fixture.branch(SHARED + 1, system)
    for branch in (short, short, long, long):
        fixture.come(branch, 1)
    fixture.decode()
    assert own(fixture) == [SHARED + 2] * 2 + [2] * 2
    assert shared(fixture) == [(60, {0, 1, 2, 3}), (SHARED + 1, {2, 3})]
    fixture.come(fixture.branch(300, system), 1)
    fixture.decode()
    assert own(fixture)[4:] == [302]
    assert shared(fixture)[0] == (60, set(range(5)))
    fixture.check()


def test_publishing_from_a_row() -> None:
    """A sequence whose tokens are stored while it has a row reads each of them once."""
    fixture = BatchFixture("llama", least_class=8)
    for _ in range(2):
        fixture.come(prompt=3)
    fixture.decode(steps=12)
    fixture.publish(fixture.agents[0])
    fixture.decode(steps=2)
    assert own(fixture) == [17, 17]
    fixture.check()
