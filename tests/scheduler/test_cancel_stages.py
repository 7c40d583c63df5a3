"""A request is cancelled at every stage of its life, over real models: nothing stays of it."""

from collections.abc import Iterator

import pytest

from umbel.scheduler.kv_cache_manager import _WORTH_WAITING
from umbel.scheduler.sequence import SequenceStatus

from ..scenario.bench import CHUNK, words
from .engine_harness import MAX_BATCH, NAMES, SYSTEM, EngineHarness


@pytest.fixture(params=NAMES)
def drill(request: pytest.FixtureRequest) -> Iterator[EngineHarness]:
    """A model that is served; when the test is over, nothing may be held for anyone."""
    with EngineHarness.of(request.param) as made:
        yield made
        made.finish()


def test_in_the_queue(drill: EngineHarness) -> None:
    """It waits for a place in the batch: it is taken out, and never begun."""
    crew = drill.crew(*[8] * (MAX_BATCH + 1))
    drill.until(lambda: drill.running() == crew[:MAX_BATCH])
    drill.cancel(crew[-1])
    assert drill.live[crew[-1]].lease is None
    assert drill.live[crew[-1]].status is SequenceStatus.WAITING


def test_while_it_waits_for_anothers_prefill(drill: EngineHarness) -> None:
    """It waits for the common prompt: the others still share that, computed once."""
    crew = drill.crew(8, 8, 8)
    drill.step()
    assert drill.running() == crew[:1]
    drill.cancel(crew[1])
    drill.until(lambda: not drill.running())
    own = [len(drill.live[name].request.prompt) - len(SYSTEM) for name in crew]
    assert drill.prefilled() == len(SYSTEM) + own[0] + own[2]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_while_others_wait_for_its_prefill(drill: EngineHarness, chunks: int) -> None:
    """It computes the common prompt: another goes on with that, from where it stopped."""
    crew = drill.crew(8, 8, 8)
    drill.step(chunks)
    assert drill.running() == crew[:1]
    done = drill.live[crew[0]].num_computed_tokens
    assert done >= min(chunks * CHUNK, len(SYSTEM))
    drill.cancel(crew[0])
    assert drill.running()[0] == crew[1]
    drill.until(lambda: not drill.running())
    own = [len(drill.live[name].request.prompt) - len(SYSTEM) for name in crew]
    if not drill.exact:  # else it resumes at a checkpoint, and there may be none yet
        least = len(SYSTEM) + own[1] + own[2]
        # The third does not wait for what is left, if that is not worth it.
        assert 0 <= drill.prefilled() - least < _WORTH_WAITING


def test_at_every_chunk_of_its_prefill(drill: EngineHarness) -> None:
    """Beside two that decode, requests are cancelled after one chunk, two, and so on to all."""
    crew = drill.crew(30, 30)
    drill.until(lambda: drill.decoding(*crew))
    left, chunks = 1, 0
    while left:
        chunks += 1
        name = drill.send(words(200, chunks), 8)
        drill.step(chunks)
        assert drill.live[name].status is SequenceStatus.PREFILL
        left = drill.live[name].num_left_to_prefill
        drill.cancel(name)
    assert chunks >= 200 // CHUNK
    assert drill.running() == crew


@pytest.mark.parametrize("beside", [0, 2])
def test_with_its_first_token_under_way(drill: EngineHarness, beside: int) -> None:
    """Its first token is launched and not read: it is never told."""
    others = drill.crew(*[20] * beside)
    drill.until(lambda: drill.decoding(*others))
    # All of its prompt is known: after a chunk the first token would be read at once.
    earlier = drill.send(words(100, "victim"), 1)
    drill.until(lambda: drill.live[earlier].status is SequenceStatus.FINISHED)
    name = drill.send(words(100, "victim"), 8)
    drill.until(lambda: drill.live[name].pending is not None)
    assert drill.live[name].status is SequenceStatus.DECODE
    assert drill.live[name].output == []
    drill.cancel(name)
    assert drill.running() == others


@pytest.mark.parametrize("beside", [0, 2])
def test_with_its_last_token_under_way(drill: EngineHarness, beside: int) -> None:
    """Its answer lacks the token that is launched and not read: it is cancelled all the same."""
    others = drill.crew(*[20] * beside)
    drill.until(lambda: drill.decoding(*others))
    name = drill.send(words(100, "victim"), 8)
    # Where it is alone, the last token is read in the step that launched it.
    length = 7 if beside else 6
    drill.until(lambda: len(drill.live[name].output) == length)
    assert drill.live[name].pending is not None
    assert drill.live[name].wants_more == (not beside)
    drill.cancel(name)
    assert drill.running() == others


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("count", [5, 6])
def test_in_the_middle_of_a_batch(drill: EngineHarness, count: int, place: int) -> None:
    """Of five rows one goes, and rows move to make four; of six, its row stays free."""
    crew = drill.crew(*[24] * count)
    drill.until(lambda: drill.decoding(*crew, tokens=3))
    seats = drill.seats()
    assert sorted(seats.values()) == list(range(count)) * drill.runner.batches
    name = sorted(crew, key=lambda n: seats.get(n, crew.index(n)))[place]
    assert drill.live[name].pending is not None
    drill.cancel(name)
    drill.step()
    others = [n for n in crew if n != name]
    assert drill.running() == others
    if drill.runner.batches:
        numbers = {n: seats[n] for n in others}
        if count == 5 and place == 0:  # the highest row has moved into the place
            numbers[max(others, key=lambda n: seats[n])] = 0
        assert drill.seats() == numbers
    newcomer = drill.send([*SYSTEM, *words(20, "newcomer")], 6)
    drill.until(lambda: drill.decoding(newcomer))
    if drill.runner.batches:
        assert drill.seats()[newcomer] == (seats[name] if count == 6 else 4)


def test_alone_after_it_was_in_a_batch(drill: EngineHarness) -> None:
    """The others' answers are over, and it has left its row: that was not the last of it."""
    crew = drill.crew(9, 9, 24)
    drill.until(lambda: drill.running() == crew[2:])
    drill.step(3)
    assert drill.runner.rows[-1] == 1
    assert (max(drill.runner.rows) > 1) == drill.runner.batches
    assert drill.seats() == {}
    drill.cancel(crew[2])


def test_the_last_neighbour(drill: EngineHarness) -> None:
    """Of two in a batch one goes: the other goes on alone, from its row."""
    crew = drill.crew(16, 16)
    drill.until(lambda: drill.decoding(*crew, tokens=3))
    drill.cancel(crew[0])
    drill.step()
    assert drill.running() == crew[1:]
    assert drill.seats() == {}


def test_all_at_once(drill: EngineHarness) -> None:
    """A whole batch is cancelled, with one in its prefill and one in the queue."""
    crew = drill.crew(24, 24, 24)
    drill.until(lambda: drill.decoding(*crew, tokens=2))
    long = drill.send(words(300, "long"), 8)
    drill.step(2)
    waiting = drill.send(words(300, "long"), 8)
    drill.step()
    assert drill.running() == [*crew, long]
    drill.cancel(*crew, long, waiting)
    assert drill.running() == []
    assert drill.runner.placement.arrays() == []


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_is_cached(name: str, *, leave: bool) -> None:
    """Two long prompts in a batch, without a cache: when they are over, or gone, all is free."""
    with EngineHarness.of(name, budget=0) as drill:
        pair = [drill.send(words(300, n), 16) for n in range(2)]
        drill.until(lambda: drill.decoding(*pair))
        if leave:
            drill.cancel(*pair)
        else:
            drill.finish()
