"""Tenants on one engine: a newcomer is served at once, and no answer changes by it."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from umbel.scheduler.order import Priority
from umbel.scheduler.sequence import SequenceStatus

from .. import zoo
from .memory_tools import CHUNK, GREEDY, SEEDED, Ask, ServerFixture, words, zoo_model

_QUICK = [("llama", False), ("llama", True), ("qwen3_next", False), ("gemma3_text", False)]
EVERY = zoo.params(zoo.each((False, True)), _QUICK)
SLOTS = 4
HEAVY = [
    Ask(words(30 + 7 * n, f"heavy {n}"), 36, (GREEDY, SEEDED)[n % 2], tenant="heavy")
    for n in range(3 * SLOTS)
]
LIGHT = [
    Ask(words(20 + n, f"light {n}"), 8, GREEDY, tenant="light", at=20 + 15 * n) for n in range(4)
]


def server(name: str, *, exact: bool = False, disk: Path | None = None) -> ServerFixture:
    """A server with few slots."""
    return ServerFixture(zoo_model(name), 1 << 26, exact=exact, disk=disk, max_batch=SLOTS)


@cache
def undisturbed(name: str, *, exact: bool) -> tuple[list[list[int]], list[list[int]]]:
    """The answers to each tenant alone."""
    heavy, light = (server(name, exact=exact).serve(asks) for asks in (HEAVY, LIGHT))
    return [told.tokens for told in heavy], [told.tokens for told in light]


def _ended(crowded: ServerFixture, name: str) -> bool:
    return crowded.told[name].reason is not None


@pytest.mark.parametrize(("name", "exact"), EVERY)
def test_answers_are_those_of_a_tenant_alone(name: str, *, exact: bool) -> None:
    """Also of those that yielded their slots in the middle; at least one did."""
    alone, others = undisturbed(name, exact=exact)
    both = server(name, exact=exact)
    told = both.serve([*HEAVY, *LIGHT])
    assert [each.error for each in told] == [None] * len(told)
    assert [each.tokens for each in told] == [*alone, *others]
    assert both.engine.statistics().yields >= 1
    both.check_rest()


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_who_comes_starts_at_once(name: str) -> None:
    """However many of another tenant's wait before it, and whatever their answers still take."""
    crowded = server(name)
    names = [crowded.send(ask) for ask in HEAVY]
    crowded.until(lambda: sum(len(crowded.live[n].output) > 2 for n in names) == SLOTS)
    for number in range(3):
        light = crowded.send(replace(LIGHT[0], prompt=words(30, number)))
        crowded.step()
        assert crowded.told[light].cached is not None, "it did not start"
        crowded.until(partial(_ended, crowded, light))
    assert crowded.told[light].tokens
    crowded.until(lambda: crowded.idle)
    assert all(len(crowded.told[n].tokens) == 36 for n in names)
    assert crowded.engine.statistics().yields == 3
    crowded.check_rest()


@pytest.mark.parametrize(("name", "exact"), EVERY)
def test_batch_answers_yield_to_their_own_tenant(name: str, *, exact: bool) -> None:
    """Its own request starts with the next step, and no token changes by it."""
    plain, own = HEAVY[: SLOTS + 1], [replace(ask, tenant="heavy") for ask in LIGHT[:2]]
    batch = [replace(ask, priority=Priority.BATCH) for ask in plain]
    crowded = server(name, exact=exact)
    names = [crowded.send(ask) for ask in batch]
    crowded.until(lambda: sum(len(crowded.live[n].output) > 2 for n in names) == SLOTS)
    for number, ask in enumerate(own, 1):
        names.append(crowded.send(ask))
        crowded.step()
        assert crowded.told[names[-1]].cached is not None, "it did not start"
        assert crowded.engine.statistics().yields == number
    crowded.until(lambda: crowded.idle)
    assert crowded.engine.statistics().yields == len(own), "what yielded went on once"
    assert [crowded.told[n].error for n in names] == [None] * len(names)
    alone, others = undisturbed(name, exact=exact)
    expected = [*alone[: SLOTS + 1], *others[:2]]
    assert [crowded.told[n].tokens for n in names] == expected
    crowded.check_rest()


@pytest.mark.parametrize("exact", [False, True])
def test_who_comes_is_computed_before_what_others_have_under_way(*, exact: bool) -> None:
    """Its first token comes after its own chunks, though all other slots have prompts."""
    crowded = server("llama", exact=exact)
    heavy = [replace(HEAVY[0], prompt=words(16 * CHUNK, n), tokens=1) for n in range(2 * SLOTS)]
    names = [crowded.send(ask) for ask in heavy]
    for _ in range(3):
        crowded.step()
    light = crowded.send(replace(LIGHT[0], prompt=words(4 * CHUNK, "light")))
    steps = 0
    while not crowded.told[light].tokens:
        crowded.step()
        steps += 1
    assert steps <= 5
    assert not any(crowded.told[name].tokens for name in names)
    crowded.until(lambda: crowded.idle)
    crowded.check_rest()


def test_a_token_on_its_way_is_not_lost() -> None:
    """As on a GPU, where a step is launched before the last one is read."""
    expected, _ = undisturbed("llama", exact=False)
    overlapping = server("llama")
    runner = overlapping.assembly.runner
    runner.overlaps = True
    runner.rules = replace(runner.rules, overlaps=True)
    told = overlapping.serve([*HEAVY, *LIGHT])
    assert [each.tokens for each in told[: len(HEAVY)]] == expected
    assert overlapping.engine.statistics().yields >= 1
    overlapping.check_rest()


def test_one_that_yielded_can_be_cancelled_and_be_late() -> None:
    """It is gone as any that waits, and its state is left to the cache."""
    crowded = server("llama")
    crowded.engine._clock = lambda: clock[0]
    clock = [0.0]
    first, last = HEAVY[0], replace(HEAVY[1], deadline=9.0)
    names = [crowded.send(replace(first, prompt=words(9, n))) for n in range(SLOTS - 1)]
    names.append(crowded.send(last))
    crowded.until(lambda: all(len(crowded.live[n].output) > 2 for n in names))
    light = crowded.send(replace(LIGHT[0], tokens=30))
    crowded.step()
    assert crowded.live[names[-1]].status is SequenceStatus.PREEMPTED
    clock[0] = 10.0
    crowded.step()
    assert crowded.told[names[-1]].error is not None
    light = crowded.send(replace(LIGHT[1], tokens=30))
    crowded.step()
    yielded = next(n for n in names if crowded.live[n].status is SequenceStatus.PREEMPTED)
    crowded.live[yielded].cancelled = True
    assert crowded.queue.remove(yielded) is not None
    crowded.until(lambda: crowded.idle)
    assert len(crowded.told[light].tokens) == 30
    crowded.check_rest()


def test_what_yielded_comes_back_from_disk(tmp_path: Path) -> None:
    """Where its state was left to the disk meanwhile, it is read from there."""
    expected = undisturbed("llama", exact=False)[0][:SLOTS]
    crowded = server("llama", disk=tmp_path / "disk")
    names = [crowded.send(ask) for ask in HEAVY[:SLOTS]]
    crowded.until(lambda: all(len(crowded.live[n].output) > 4 for n in names))
    light = crowded.send(replace(LIGHT[0], tokens=4))
    crowded.step()
    crowded.save()
    crowded.assembly.cache.evict(0)
    crowded.until(lambda: crowded.idle)
    assert crowded.told[light].error is None
    assert [crowded.told[n].tokens for n in names] == expected
    assert crowded.engine.statistics().page_ins > 0
    crowded.close()
