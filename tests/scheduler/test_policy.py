"""Work of a step, as a function of the running sequences."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.order import Priority
from umbel.scheduler.policy import (
    Batch,
    Call,
    ChunkSize,
    age,
    plan,
)
from umbel.scheduler.sequence import Sequence

from ..fakes import make_request


def sequence(prompt_length: int, computed: int = 0, tenant: str = "default") -> Sequence:
    """Build a sequence that has come this far."""
    made = Sequence(make_request("a", [7] * prompt_length, tenant=tenant))
    made.num_computed_tokens = computed
    return made


def batch_sequence(prompt_length: int) -> Sequence:
    """Build one that no other precedes."""
    made = sequence(prompt_length)
    made.request = msgspec.structs.replace(made.request, priority=Priority.BATCH)
    return made


def only(batch: Batch) -> Call:
    """The one chunk of a batch."""
    assert batch.prefill is not None
    return batch.prefill


def end_of(batch: Batch) -> int:
    """Where the one chunk of a batch ends."""
    end = only(batch).end
    assert end is not None
    return end


def test_nothing_runs_in_an_empty_batch() -> None:
    """Without sequences there is nothing to compute."""
    batch = plan([], ChunkSize(4))
    assert batch.calls == ()


def test_who_will_decode_soon() -> None:
    """Those of whose prompts a chunk is left at most."""
    decodes, nearly, last, long = sequence(3, 3), sequence(20, 16), sequence(6), sequence(12)
    assert plan([decodes, nearly, last, long], ChunkSize(4)).coming == 1
    assert plan([decodes, nearly, last, long], ChunkSize(6)).coming == 2
    assert plan([decodes], ChunkSize(4)).coming == 0


def test_the_last_chunk_ends_with_the_prompt() -> None:
    """Its call gives the first token, also of a prompt of one token."""
    chunk = only(plan([sequence(8, 4)], ChunkSize(4)))
    assert chunk.completes
    assert chunk.end == 8
    assert not only(plan([sequence(9, 4)], ChunkSize(4))).completes
    assert only(plan([sequence(1)], ChunkSize(4))).completes
    assert plan([sequence(8, 8)], ChunkSize(4)).prefill is None


def test_a_chunk_that_gives_many_logits_is_short() -> None:
    """Where a model computes those of all tokens of a call, the one before ends earlier."""
    size = ChunkSize(20, completing=4)
    assert only(plan([sequence(15)], size)).end == 11
    assert only(plan([sequence(15, 11)], size)).end == 15
    assert only(plan([sequence(15, 12)], size)).end == 15
    assert only(plan([sequence(30)], size)).end == 20


def test_one_chunk_is_prefilled_beside_every_decode() -> None:
    """Live sequences never wait for a prompt: each decodes while one prefill advances."""
    live, first, second, done = sequence(3, 3), sequence(9), sequence(9), sequence(3, 7)
    batch = plan([live, first, second, done], ChunkSize(4))
    assert batch.prefill == Call((first,), 4)
    assert batch.decode == Call((live, done))


def test_a_restored_prefix_is_continued_on_the_grid() -> None:
    """After a restore off the grid the next chunk is short and ends on the grid again."""
    assert only(plan([sequence(20, 5)], ChunkSize(4, grid=4))).end == 8
    assert only(plan([sequence(20, 8)], ChunkSize(4, grid=4))).end == 12


def test_without_a_grid_chunks_are_as_long_as_they_may_be() -> None:
    """Wherever a restore ended: a short chunk takes nearly as long as a whole one."""
    assert only(plan([sequence(20, 5)], ChunkSize(4))).end == 9


@given(
    prompt=st.integers(1, 60),
    cached=st.integers(0, 59),
    chunk=st.integers(1, 70),
)
def test_chunks_cover_the_prompt_on_an_absolute_grid(prompt: int, cached: int, chunk: int) -> None:
    """Whatever was cached, chunks are contiguous, end on the grid, and at the prompt's end."""
    running = sequence(prompt, min(cached, prompt - 1))
    while (batch := plan([running], ChunkSize(chunk, grid=chunk))).prefill is not None:
        assert batch.decode is None
        end = end_of(batch)
        assert running.num_computed_tokens < end <= prompt
        assert end - running.num_computed_tokens <= chunk
        assert end % chunk == 0 or end == prompt
        running.num_computed_tokens = end
    assert batch.decode == Call((running,))
    assert running.num_computed_tokens == prompt


@given(
    states=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=8),
    chunk=st.integers(1, 10),
)
def test_every_sequence_is_decoded_or_waits_for_its_prefill(
    states: list[tuple[int, int]], chunk: int
) -> None:
    """A plan decodes each sequence that can, once, in order; the shortest prompt advances."""
    running = [sequence(*state) for state in states]
    batch = plan(running, ChunkSize(chunk))
    prefilling = [s for s in running if s.num_left_to_prefill]
    decode = () if batch.decode is None else batch.decode.sequences
    assert list(decode) == [s for s in running if not s.num_left_to_prefill]
    shortest = min(prefilling, key=lambda s: s.num_left_to_prefill, default=None)
    assert (batch.prefill and batch.prefill.sequences[0]) is shortest
    assert bool(batch.calls) == bool(running)


def test_a_short_prompt_passes_a_long_one() -> None:
    """The least work that is left goes first, also where the long prompt has begun."""
    long, short = sequence(3000, 500), sequence(11)
    batch = plan([long, short], ChunkSize(512))
    assert batch.prefill == Call((short,), 11)
    oldest = sequence(9, 1)
    assert (
        only(plan([sequence(11), oldest, sequence(8)], ChunkSize(4))).sequences[0] is oldest
    )  # of equals


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
        batch = plan(running, ChunkSize(chunk))
        advances, end = only(batch).sequences[0], end_of(batch)
        tokens = end - advances.num_computed_tokens
        advances.num_computed_tokens = end
        for earlier in running[: running.index(advances)]:
            earlier.prefill.passed_over += tokens
        passed += 0 if advances is long else tokens
    assert passed <= length + max(others)


def test_interactive_prompts_go_before_those_of_a_batch() -> None:
    """Also if they are longer; but not for ever, where more and more of them come."""
    batch, talk = batch_sequence(201), sequence(3001)
    assert only(plan([batch, talk], ChunkSize(4096))).sequences[0] is talk
    assert only(plan([batch, sequence(4501)], ChunkSize(8192))).sequences[0] is batch
    passed = 0
    while only(plan([batch, talk], ChunkSize(4096))).sequences[0] is talk:
        age([batch, talk], talk, 100)
        passed += 100
        talk = sequence(101)
    assert 4096 <= passed <= 4096 + 200 + 100


def test_a_tenants_precedence_is_before_what_is_left() -> None:
    """However short another's prompt is; of those that are alike the shortest goes first."""
    running = [sequence(40, tenant="a"), sequence(400, tenant="b"), sequence(90, tenant="c")]
    precedence = {"a": 3.0, "b": 1.0, "c": 3.0}
    assert only(plan(running, ChunkSize(1000), precedence)).sequences[0] is running[1]
    running[1].num_computed_tokens = 400
    assert only(plan(running, ChunkSize(1000), precedence)).sequences[0] is running[0]


def test_only_later_ones_of_its_tenant_make_a_prompt_older() -> None:
    first, other, later = sequence(9), sequence(9, tenant="b"), sequence(9)
    age([first, other, later], later, 5)
    age([first, other, later], other, 3)
    assert [each.prefill.passed_over for each in (first, other, later)] == [5, 0, 0]
