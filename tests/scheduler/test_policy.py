"""What a step computes, as a function of the running sequences."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.policy import StallBound, plan
from umbel.scheduler.sequence import Sequence

from ..fakes import make_request


def sequence(prompt_length: int, computed: int = 0) -> Sequence:
    """Build a sequence that has come this far."""
    made = Sequence(make_request("a", [7] * prompt_length))
    made.num_computed_tokens = computed
    return made


def test_nothing_runs_in_an_empty_batch() -> None:
    """Without sequences there is nothing to compute."""
    batch = plan([], 4)
    assert batch.empty
    assert batch.prefill is None
    assert batch.decode == ()


def test_a_one_token_prompt_is_decoded_at_once() -> None:
    """The last prompt token is decoded for its logits, so a single one is never prefilled."""
    single = sequence(1)
    batch = plan([single], 4)
    assert batch.prefill is None
    assert batch.decode == (single,)
    assert not batch.empty


def test_one_chunk_is_prefilled_beside_every_decode() -> None:
    """Live sequences never wait for a prompt: each decodes while one prefill advances."""
    live, first, second, done = sequence(3, 2), sequence(9), sequence(9), sequence(3, 7)
    batch = plan([live, first, second, done], 4)
    assert batch.prefill is first
    assert batch.end == 4
    assert batch.decode == (live, done)


def test_a_restored_prefix_is_continued_on_the_grid() -> None:
    """After a restore off the grid the next chunk is short and ends on the grid again."""
    assert plan([sequence(20, 5)], 4).end == 8
    assert plan([sequence(20, 8)], 4).end == 12


def test_the_last_prompt_token_is_left_to_decode() -> None:
    """A prompt that ends on the grid is still prefilled only up to its last token."""
    assert plan([sequence(8, 4)], 4).end == 7
    assert plan([sequence(8, 7)], 4).prefill is None


@given(
    prompt=st.integers(1, 60),
    cached=st.integers(0, 59),
    chunk=st.integers(1, 70),
)
def test_chunks_cover_the_prompt_on_an_absolute_grid(prompt: int, cached: int, chunk: int) -> None:
    """Whatever was cached, chunks are contiguous, end on the grid, and stop before n-1."""
    running = sequence(prompt, min(cached, prompt - 1))
    while (batch := plan([running], chunk)).prefill is not None:
        assert not batch.decode
        assert running.num_computed_tokens < batch.end <= prompt - 1
        assert batch.end - running.num_computed_tokens <= chunk
        assert batch.end % chunk == 0 or batch.end == prompt - 1
        running.num_computed_tokens = batch.end
    assert batch.decode == (running,)
    assert running.num_computed_tokens == prompt - 1


@given(
    states=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=8),
    chunk=st.integers(1, 10),
)
def test_every_sequence_is_decoded_or_waits_for_its_prefill(
    states: list[tuple[int, int]], chunk: int
) -> None:
    """A plan decodes each sequence that can, once, in order; the shortest prompt advances."""
    running = [sequence(*state) for state in states]
    batch = plan(running, chunk)
    prefilling = [s for s in running if s.num_left_to_prefill]
    assert list(batch.decode) == [s for s in running if not s.num_left_to_prefill]
    shortest = min(prefilling, key=lambda s: s.num_left_to_prefill, default=None)
    assert batch.prefill is shortest
    assert batch.empty == (not running)


def test_a_short_prompt_passes_a_long_one() -> None:
    """The least work that is left goes first, also where the long prompt has begun."""
    long, short = sequence(3000, 500), sequence(11)
    batch = plan([long, short], 512)
    assert batch.prefill is short
    assert batch.end == 10
    assert plan([sequence(11), sequence(9, 1), sequence(8)], 4).end == 4  # of equals the oldest


@given(
    length=st.integers(2, 300),
    others=st.lists(st.integers(2, 40), min_size=1, max_size=8),
    chunk=st.integers(1, 64),
)
def test_a_long_prompt_is_not_passed_for_ever(length: int, others: list[int], chunk: int) -> None:
    """However many short prompts come, it is passed over for its own length, and one prompt."""
    long = sequence(length)
    arrivals = itertools.cycle(others)
    running, passed = [long], 0
    while long.num_left_to_prefill:
        if all(s is long or not s.num_left_to_prefill for s in running):
            running = [long, sequence(next(arrivals))]
        batch = plan(running, chunk)
        assert batch.prefill is not None
        tokens = batch.end - batch.prefill.num_computed_tokens
        batch.prefill.num_computed_tokens = batch.end
        for earlier in running[: running.index(batch.prefill)]:
            earlier.num_passed_over += tokens
        passed += 0 if batch.prefill is long else tokens
    assert passed <= length + max(others)


def test_chunks_are_halved_until_they_fit() -> None:
    """A chunk costs 0.1 s and 2 ms a token: 32 tokens fit into 0.2 s, 64 do not."""
    bound = StallBound(0.25)
    for tokens in (512, 64, 16, 128, 16):
        bound.observe(tokens, 0.1 + 0.002 * tokens)
    assert bound.chunk(512) == 32
    assert bound.expected(100) == pytest.approx(0.3)


def test_a_chunk_that_costs_the_same_whatever_its_size_is_not_halved() -> None:
    """Where the weights take all of the time, as with short prompts, pieces would double it."""
    bound = StallBound(0.25)
    for tokens in (16, 40, 64):
        bound.observe(tokens, 0.15)
    assert bound.chunk(512) == 512


def test_chunks_are_not_cut_to_nothing_where_none_fits() -> None:
    """A chunk's own time is over the bound: chunks take at most twice what the least takes."""
    bound = StallBound(0.2)
    for tokens in (512, 64, 16, 128):
        bound.observe(tokens, 0.25 + 0.002 * tokens)
    assert bound.chunk(512) == 128


def test_before_any_measurement_chunks_are_short() -> None:
    """The first prompt beside an answer does not stall it by a chunk of unknown length."""
    assert StallBound(0.25).expected(1) is None
    assert StallBound(0.25).chunk(512) == 64


def test_one_measurement_is_taken_as_proportional() -> None:
    """Nothing is known of a chunk's own time yet, so halves are taken to take half."""
    bound = StallBound(0.25)
    bound.observe(512, 1.6)
    assert bound.chunk(512) == 64


def test_the_bound_follows_a_machine_that_changes() -> None:
    """Newer chunks count more than older ones."""
    bound = StallBound(0.25)
    for _ in range(20):
        bound.observe(512, 0.1)
    assert bound.chunk(512) == 512
    for tokens in [64, 128] * 20:
        bound.observe(tokens, tokens / 330)
    assert bound.chunk(512) == 64


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 5)), min_size=1, max_size=30))
def test_what_is_foretold_is_a_time(chunks: list[tuple[int, float]]) -> None:
    """Whatever noise was measured, no chunk takes less than nothing, nor longer for less."""
    bound = StallBound(0.25)
    for chunk in chunks:
        bound.observe(*chunk)
    times = [bound.expected(tokens) for tokens in (1, 16, 512)]
    assert all(time is not None and time >= -1e-9 for time in times)
    assert times == sorted(times, key=lambda time: time or 0.0)
    assert 16 <= bound.chunk(512) <= 512
