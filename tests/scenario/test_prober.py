"""A prober that knows only its own requests and clocks, as PROMPTPEEK does.

It guesses what another tenant has sent, or is sending at the moment, and sends the guess itself.
Whatever it observes of a right guess must be what it observes of a wrong one. The same prober
against its own tenant's prompts is the control: there it must tell them apart.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.node import as_tokens
from umbel.cachestore.tries import SHARED
from umbel.scheduler.request import FinishReason

from .. import zoo
from .memory_tools import Ask, ServerFixture, words, zoo_model

LENGTH = 40
"""Tokens of a prompt that is guessed: more than a request waits for another's prefill for."""
SYSTEM = 48
"""Tokens of the prompt that all begin with, where one is shared."""


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """Return the chance that the smaller of a random pair is a hit; 0.5 if nothing can be told."""
    smaller = sum(hit < miss for hit in hits for miss in misses)
    equal = sum(hit == miss for hit in hits for miss in misses)
    return (smaller + equal / 2) / (len(hits) * len(misses))


def chance(hits: int, misses: int) -> float:
    """Return how far from 0.5 `auc` lies by chance, once in 15,000 tries of a true 0.5."""
    return 4 * math.sqrt((hits + misses + 1) / (12 * hits * misses))


class Observation(NamedTuple):
    """Everything a prober can find out with one request of its own.

    Attributes:
        cached: what its answer's usage says, negated: more is sooner.
        work: tokens that were computed until it ended, its own and others'; a clock without noise.
        steps: of the engine until then: the same.
        order: how many requests began before it since it was sent.
    """

    cached: int
    work: int
    steps: int
    order: int


class Prober:
    """Sends guesses to an engine, while its victim sends what is to be guessed."""

    def __init__(self, name: str, victim: str, *, shared: bool) -> None:
        self._victim = victim
        self._server = ServerFixture(zoo_model(name), 4 << 20, max_batch=2, prefill_chunk=32)
        self._system = words(SYSTEM, "system") if shared else []
        self._draw = random.Random(f"{name} {victim} {shared}")  # noqa: S311  (not a secret)
        if shared:
            ends = [(SYSTEM, Reason.SYSTEM)]
            self._server.serve([Ask([*self._system, 1], 1, boundaries=ends, tenant=SHARED)])
            pins = self._server.assembly.cache.pins
            held = pins.pin(SHARED, "system", as_tokens(self._system)).held
            assert held == SYSTEM

    def observe(self, number: int, *, right: bool, at_once: bool) -> Observation:
        """Send one guess.

        Args:
            number: of the try. No two are about the same prompt.
            right: whether it is what the victim sends.
            at_once: whether the victim sends it at the same time, or has sent it before.
        """
        # The first token is the try's, so that no try begins as one before by accident.
        begin = [*self._system, number % zoo.VOCAB_SIZE]
        secret = [*begin, *words(LENGTH, f"secret {number}")]
        other = [*begin, *words(LENGTH, f"other {number}")]
        victim = Ask(secret, 1, tenant=self._victim, boundaries=[(len(secret) - 1, Reason.MESSAGE)])
        guess = Ask(secret if right else other, 1, tenant="prober")
        server, engine = self._server, self._server.engine
        if not at_once:
            server.serve([victim])
        before = engine.statistics()
        first = server.send(victim) if at_once else None
        if at_once:
            server.step()
        began = sum(told.order >= 0 for told in server.told.values())
        name = server.send(guess)
        server.until(lambda: server.told[name].reason is not None)
        after, told = engine.statistics(), server.told[name]
        server.until(lambda: server.idle)
        assert told.reason is FinishReason.LENGTH
        assert first is None or server.told[first].reason is FinishReason.LENGTH
        assert told.cached is not None
        return Observation(
            -told.cached,
            after.prefill_tokens - before.prefill_tokens,
            after.steps - before.steps,
            told.order - began,
        )

    def tell_apart(self, tries: int) -> tuple[dict[tuple[str, bool], float], float]:
        """Make many tries, half of them right, in random order.

        Returns:
            How well each thing that is observed tells right guesses from wrong ones, of what was
            sent before and of what is sent at once; and how well nothing at all would by chance.
        """
        kinds = [(bool(n % 2), bool(n // 2 % 2)) for n in range(tries)]
        self._draw.shuffle(kinds)
        seen: dict[tuple[bool, bool], list[Observation]] = {kind: [] for kind in kinds}
        for number, (right, at_once) in enumerate(kinds):
            observation = self.observe(number, right=right, at_once=at_once)
            seen[right, at_once].append(observation)
        told = {
            (field, at_once): auc(
                [hit[place] for hit in seen[True, at_once]],
                [miss[place] for miss in seen[False, at_once]],
            )
            for place, field in enumerate(Observation._fields)
            for at_once in (False, True)
        }
        return told, chance(tries // 4, tries // 4)


@pytest.mark.parametrize("shared", [False, True])
def test_a_prober_learns_nothing_of_another_tenant(*, shared: bool) -> None:
    """Neither from `cached_tokens` nor from what is computed, nor when: all of it is the same."""
    told, _ = Prober("llama", "victim", shared=shared).tell_apart(40)
    assert set(told.values()) == {0.5}, told


def test_the_prober_can_tell_its_own_tenants_prompts() -> None:
    """The control: the tries differ in nothing but in who the victim is."""
    told, _ = Prober("llama", "prober", shared=True).tell_apart(40)
    assert {field for field, apart in told.items() if apart > 0.95} == {
        (field, at_once) for field in ("cached", "work", "steps") for at_once in (False, True)
    }


@pytest.mark.parametrize(
    ("name", "tries"),
    [
        pytest.param("llama", 1000, marks=pytest.mark.nightly),
        pytest.param("qwen3_next", 60, marks=pytest.mark.slow),
    ],
)
def test_a_prober_learns_nothing_in_many_tries(name: str, tries: int) -> None:
    """The same, also of a model that resumes at checkpoints only."""
    told, by_chance = Prober(name, "victim", shared=True).tell_apart(tries)
    assert all(abs(each - 0.5) <= by_chance for each in told.values()), told
