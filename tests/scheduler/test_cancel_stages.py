"""A request is cancelled at every stage of its life, over real models: nothing stays of it."""

from collections.abc import Iterator

import pytest

from umbel.scheduler.kv_cache_manager import _WORTH_WAITING
from umbel.scheduler.sequence import SequenceStatus

from ..scenario.bench import CHUNK, words
from .engine_harness import MAX_BATCH, NAMES, SYSTEM, EngineHarness


@pytest.fixture(params=NAMES)
def harness(request: pytest.FixtureRequest) -> Iterator[EngineHarness]:
    """A model that is served; when the test is over, nothing may be held for anyone."""
    with EngineHarness.of(request.param) as made:
        yield made
        made.finish()


def test_in_the_queue(harness: EngineHarness) -> None:
    """It waits for a place in the batch: it is taken out, and never begun."""
    agents = harness.agents(*[8] * (MAX_BATCH + 1))
    harness.until(lambda: harness.running() == agents[:MAX_BATCH])
    harness.cancel(agents[-1])
    assert harness.live[agents[-1]].lease is None
    assert harness.live[agents[-1]].status is SequenceStatus.WAITING


def test_while_it_waits_for_anothers_prefill(harness: EngineHarness) -> None:
    """It waits for the common prompt: the others still share that, computed once."""
    agents = harness.agents(8, 8, 8)
    harness.step()
    assert harness.running() == agents[:1]
    harness.cancel(agents[1])
    harness.until(lambda: not harness.running())
    own = [len(harness.live[name].request.prompt) - len(SYSTEM) for name in agents]
    assert harness.prefilled() == len(SYSTEM) + own[0] + own[2]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_while_others_wait_for_its_prefill(harness: EngineHarness, chunks: int) -> None:
    """It computes the common prompt: another goes on with that, from where it stopped."""
    agents = harness.agents(8, 8, 8)
    harness.step(chunks)
    assert harness.running() == agents[:1]
    done = harness.live[agents[0]].num_computed_tokens
    assert done >= min(chunks * CHUNK, len(SYSTEM))
    harness.cancel(agents[0])
    assert harness.running()[0] == agents[1]
    harness.until(lambda: not harness.running())
    own = [len(harness.live[name].request.prompt) - len(SYSTEM) for name in agents]
    if not harness.exact:  # else it resumes at a checkpoint, and there may be none yet
        least = len(SYSTEM) + own[1] + own[2]
        # The third does not wait for what is left, if that is not worth it.
        assert 0 <= harness.prefilled() - least < _WORTH_WAITING


def test_at_every_chunk_of_its_prefill(harness: EngineHarness) -> None:
    """Beside two that decode, requests are cancelled after one chunk, two, and so on to all."""
    agents = harness.agents(30, 30)
    harness.until(lambda: harness.decoding(*agents))
    left, chunks = 1, 0
    while left:
        chunks += 1
        name = harness.send(words(200, chunks), 8)
        harness.step(chunks)
        left = harness.live[name].num_left_to_prefill
        stage = SequenceStatus.PREFILL if left else SequenceStatus.DECODE
        assert harness.live[name].status is stage
        harness.cancel(name)
    assert chunks >= 200 // CHUNK
    assert harness.running() == agents


@pytest.mark.parametrize("beside", [0, 2])
def test_with_a_token_under_way(harness: EngineHarness, beside: int) -> None:
    """Its second token is launched and not read: it is never told."""
    others = harness.agents(*[20] * beside)
    harness.until(lambda: harness.decoding(*others))
    name = harness.send(words(100, "victim"), 8)
    harness.until(lambda: harness.live[name].pending is not None)
    assert harness.live[name].status is SequenceStatus.DECODE
    assert len(harness.live[name].output) == 1
    harness.cancel(name)
    assert harness.running() == others


@pytest.mark.parametrize("beside", [0, 2])
def test_with_its_last_token_under_way(harness: EngineHarness, beside: int) -> None:
    """Its answer lacks the token that is launched and not read: it is cancelled all the same."""
    others = harness.agents(*[20] * beside)
    harness.until(lambda: harness.decoding(*others))
    name = harness.send(words(100, "victim"), 8)
    # Where it is alone, the last token is read in the step that launched it.
    length = 7 if beside else 6
    harness.until(lambda: len(harness.live[name].output) == length)
    assert harness.live[name].pending is not None
    assert harness.live[name].wants_more == (not beside)
    harness.cancel(name)
    assert harness.running() == others


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("count", [5, 6])
def test_in_the_middle_of_a_batch(harness: EngineHarness, count: int, place: int) -> None:
    """Of five rows one goes, and rows move to make four; of six, its row stays free."""
    agents = harness.agents(*[24] * count)
    harness.until(lambda: harness.decoding(*agents, tokens=3))
    slots = harness.slots()
    assert sorted(slots.values()) == list(range(count)) * harness.runner.batches
    name = sorted(agents, key=lambda n: slots.get(n, agents.index(n)))[place]
    assert harness.live[name].pending is not None
    harness.cancel(name)
    harness.step()
    others = [n for n in agents if n != name]
    assert harness.running() == others
    if harness.runner.batches:
        numbers = {n: slots[n] for n in others}
        if count == 5 and place == 0:  # the highest row has moved into the place
            numbers[max(others, key=lambda n: slots[n])] = 0
        assert harness.slots() == numbers
    new = harness.send([*SYSTEM, *words(20, "new")], 6)
    harness.until(lambda: harness.decoding(new))
    if harness.runner.batches:
        harness.until(lambda: new in harness.slots())
        assert harness.slots()[new] == (slots[name] if count == 6 else 4)


def test_alone_after_it_was_in_a_batch(harness: EngineHarness) -> None:
    """The others' answers are over, and it has left its row: that was not the last of it."""
    agents = harness.agents(9, 9, 24)
    harness.until(lambda: harness.running() == agents[2:])
    harness.step(3)
    assert harness.runner.rows[-1] == 1
    assert (max(harness.runner.rows) > 1) == harness.runner.batches
    assert harness.slots() == {}
    harness.cancel(agents[2])


def test_the_last_neighbour(harness: EngineHarness) -> None:
    """Of two in a batch one goes: the other goes on alone, from its row."""
    agents = harness.agents(16, 16)
    harness.until(lambda: harness.decoding(*agents, tokens=3))
    harness.cancel(agents[0])
    harness.step()
    assert harness.running() == agents[1:]
    assert harness.slots() == {}


def test_all_at_once(harness: EngineHarness) -> None:
    """A whole batch is cancelled, with one in its prefill and one in the queue."""
    agents = harness.agents(24, 24, 24)
    harness.until(lambda: harness.decoding(*agents, tokens=2))
    long = harness.send(words(300, "long"), 8)
    harness.step(2)
    waiting = harness.send(words(300, "long"), 8)
    harness.step()
    assert harness.running() == [*agents, long]
    harness.cancel(*agents, long, waiting)
    assert harness.running() == []
    assert harness.runner.placement.arrays() == []


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_is_cached(name: str, *, leave: bool) -> None:
    """Two long prompts in a batch, without a cache: when they are over, or gone, all is free."""
    with EngineHarness.of(name, budget=0) as harness:
        pair = [harness.send(words(300, n), 16) for n in range(2)]
        harness.until(lambda: harness.decoding(*pair))
        if leave:
            harness.cancel(*pair)
        else:
            harness.finish()
