"""Requests that come and are cancelled at random, over real models and caches of any size."""

from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ..scenario.bench import words
from .engine_harness import NAMES, SYSTEM, EngineHarness

BUDGETS = (0, 400_000, 1 << 30)
"""Bytes of cache: none, room for about one prompt, and more than is needed."""

ROWS = (8, 512)
"""Own tokens of a row in the first length class: fewer than an answer has, and more."""

PROMPTS = [
    [*SYSTEM[:shared], *words(own, f"{shared} {own}")]
    for shared in (0, 100, len(SYSTEM))
    for own in (1, 40, 75)
]


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        at: the step before which its request comes.
        stays: steps after which it leaves; None if it waits for its answer.
    """

    prompt: int
    tokens: int
    at: int
    stays: int | None


CLIENTS = st.builds(
    Client,
    prompt=st.integers(0, len(PROMPTS) - 1),
    tokens=st.integers(1, 16),
    at=st.integers(0, 16),
    stays=st.none() | st.integers(0, 16),
)


def play(harness: EngineHarness, clients: list[Client]) -> None:
    """Let clients come and go, and see to it that the others get their answers."""
    names: dict[int, str] = {}
    for step in range(33):
        for number, client in enumerate(clients):
            if client.at == step:
                names[number] = harness.send(PROMPTS[client.prompt], client.tokens)
        leaving = [
            names[number]
            for number, client in enumerate(clients)
            if client.stays is not None and client.at + client.stays == step
        ]
        live = [*harness.running(), *harness._queue._waiting]
        harness.cancel(*[name for name in leaving if name in live])
    harness.finish()


# Shrinking takes minutes, for each try is a model's work: take the phases out to have it.
@pytest.mark.slow
@settings(phases=(Phase.reuse, Phase.generate))
@given(
    name=st.sampled_from(NAMES),
    budget=st.sampled_from(BUDGETS),
    row=st.sampled_from(ROWS),
    exact=st.booleans(),
    clients=st.lists(CLIENTS, min_size=1, max_size=9),
)
def test_any_schedule_of_joins_and_cancels(
    name: str, budget: int, row: int, clients: list[Client], *, exact: bool
) -> None:
    with EngineHarness.of(name, budget, row=row, exact=exact) as harness:
        play(harness, clients)
