"""Prices of plans, held to the allocator while they run, over random batches."""

from dataclasses import replace

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.models.runtime import resident_bytes

from .batch_fixture import CLASSES, Agent, BatchFixture, Branch, each


class Accountant(BatchFixture):
    """A fixture of which every step is held to its price."""

    def decode(self, agents: list[Agent] | None = None, steps: int = 1) -> None:
        """Give agents tokens; see `BatchFixture.decode`."""
        chosen = list(self.agents if agents is None else agents)
        for _ in range(steps):
            plan = self.runner.plan([agent.cache for agent in chosen])
            price = self.runner.cost(plan).nbytes
            mx.clear_cache()  # what is reused may be larger than what is asked for
            before = resident_bytes()
            mx.reset_peak_memory()
            super().decode(chosen)
            mx.eval([agent.logits[len(agent.tokens) - 1] for agent in chosen])
            mx.synchronize()
            took = mx.get_peak_memory() - before
            for agent in chosen:
                agent.logits.clear()
            assert took <= price, f"{took} over {price}: {plan.decode}"

    def come(self, branch: Branch | None = None, prompt: int = 0) -> Agent:
        """Start an agent, and hold its prompt's computation to its price, too."""
        agent = super().come(branch)
        if prompt > 1:
            self._compute(agent, prompt // 2, completes=False)
        if prompt:
            self._compute(agent, prompt - prompt // 2, completes=True)
        return agent

    def _compute(self, agent: Agent, tokens: int, *, completes: bool) -> None:
        plan = self.runner.plan([], (agent.cache, tokens), completes=completes)
        price, words = self.runner.cost(plan).nbytes, self.words(tokens)
        mx.clear_cache()
        before = resident_bytes()
        mx.reset_peak_memory()
        if completes:
            self.runner.complete(words, agent.cache)
        else:
            self.runner.prefill(words, agent.cache)
        assert mx.get_peak_memory() - before <= price
        agent.tokens += words


@pytest.mark.parametrize(
    ("name", "seed"), [*each(range(2)), *[(name, seed) for name in CLASSES for seed in (2, 3)]]
)
def test_no_step_takes_more_than_its_price(name: str, seed: int) -> None:
    """Sequences start, end, wait, run alone, are packed or copied into one piece."""
    fixture = Accountant(name, seed, least_class=24)
    rng = fixture.rng
    branches = [Branch(), fixture.branch(rng.randrange(40, 120))]

    def store(agent: Agent) -> None:
        if agent.tokens:
            branches.append(fixture.store(agent))

    for _ in range(14):
        if len(fixture.agents) < 7:
            fixture.come(rng.choice(branches), rng.choice([0, 1, 5, 33, 70]))
        agent = rng.choice(fixture.agents)
        rng.choice([fixture.leave, fixture.leave_batch, fixture.publish, store])(agent)
        some = [agent for agent in fixture.agents if rng.random() < 0.8]
        if some:
            fixture.decode(some, rng.randrange(1, 9))


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "gemma3_text"])
def test_rows_that_move_take_no_copies_of_all_rows(name: str) -> None:
    """A batch that becomes smaller reads the rows that stay before it writes them elsewhere."""
    fixture = Accountant(name)
    for _ in range(8):
        fixture.come(prompt=9)
    fixture.decode(steps=2)
    for slot in range(4):
        fixture.placement.close(fixture.placement.sequences[slot])
    fixture.agents = [agent for agent in fixture.agents if agent.cache.slot is not None]
    fixture.decode()
    assert fixture.placement.rows == len(fixture.agents) == 4
    fixture.check()


def test_who_takes_a_free_row_brings_its_windows() -> None:
    """Windows are put in order before they are written into an existing row."""
    fixture = Accountant(
        "gemma3_text", sliding_window=512, num_hidden_layers=12, sliding_window_pattern=6
    )
    for _ in range(9):
        fixture.come(prompt=250)
    fixture.decode()
    assert fixture.placement.rows > len(fixture.agents)
    fixture.come(prompt=250)
    fixture.decode()


@pytest.mark.parametrize("name", ["llama", "gemma4_text"])
def test_a_short_prefix_in_one_piece_has_room_made_beside_it(name: str) -> None:
    """The room for later tokens is made before it is joined with the few that are there."""
    fixture = Accountant(name)
    fixture.runner.use(replace(fixture.runner.rules, contiguous=True))
    branch = fixture.branch(1)
    fixture.decode([fixture.come(branch)])
    assert fixture.agents[0].cache.is_contiguous
