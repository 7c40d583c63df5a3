"""What a step computes, as a function of the running sequences."""

import functools
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.order import Priority
from umbel.scheduler.policy import (
    Batch,
    ChunkSize,
    PrefillChunk,
    age,
    plan,
)
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.stall_bound import StallBound

from ..fakes import make_request


def sequence(prompt_length: int, computed: int = 0, tenant: str = "default") -> Sequence:
    """Build a sequence that has come this far."""
    made = Sequence(make_request("a", [7] * prompt_length, tenant=tenant))
    made.num_computed_tokens = computed
    return made


def batch_sequence(prompt_length: int) -> Sequence:
    """Build one that nobody sits before."""
    made = sequence(prompt_length)
    made.request = msgspec.structs.replace(made.request, priority=Priority.BATCH)
    return made


def only(batch: Batch) -> PrefillChunk:
    """The one chunk of a batch."""
    (chunk,) = batch.prefill
    return chunk


def test_nothing_runs_in_an_empty_batch() -> None:
    """Without sequences there is nothing to compute."""
    batch = plan([], ChunkSize(4))
    assert batch.empty
    assert not batch.prefill
    assert batch.decode == ()


def test_who_will_decode_soon() -> None:
    """Those of whose prompts a chunk is left at most, also of the last one's length."""
    decodes, nearly, last, long = sequence(3, 2), sequence(20, 15), sequence(7), sequence(12)
    assert plan([decodes, nearly, last, long], ChunkSize(4)).coming == 1
    assert plan([decodes, nearly, last, long], ChunkSize(4, last=6)).coming == 2
    assert plan([decodes], ChunkSize(4)).coming == 0


def test_a_one_token_prompt_is_decoded_at_once() -> None:
    """The last prompt token is decoded for its logits, so a single one is never prefilled."""
    single = sequence(1)
    batch = plan([single], ChunkSize(4))
    assert not batch.prefill
    assert batch.decode == (single,)
    assert not batch.empty


def test_one_chunk_is_prefilled_beside_every_decode() -> None:
    """Live sequences never wait for a prompt: each decodes while one prefill advances."""
    live, first, second, done = sequence(3, 2), sequence(9), sequence(9), sequence(3, 7)
    batch = plan([live, first, second, done], ChunkSize(4))
    assert batch.prefill == ((first, 4),)
    assert batch.decode == (live, done)


def test_a_restored_prefix_is_continued_on_the_grid() -> None:
    """After a restore off the grid the next chunk is short and ends on the grid again."""
    assert only(plan([sequence(20, 5)], ChunkSize(4, grid=4))).end == 8
    assert only(plan([sequence(20, 8)], ChunkSize(4, grid=4))).end == 12


def test_without_a_grid_chunks_are_as_long_as_they_may_be() -> None:
    """Wherever a restore ended: a short chunk takes nearly as long as a whole one."""
    assert only(plan([sequence(20, 5)], ChunkSize(4))).end == 9


def test_a_short_rest_is_no_call_of_its_own() -> None:
    """The chunk that completes a prompt may be longer than others, but not what stops before."""
    size = ChunkSize(4, last=6)
    assert only(plan([sequence(7)], size)).end == 6
    assert only(plan([sequence(8)], size)).end == 4
    stopped = sequence(7)
    stopped.num_awaited = 5
    assert only(plan([stopped], size)).end == 4


def test_the_last_prompt_token_is_left_to_decode() -> None:
    """A prompt that ends on the grid is still prefilled only up to its last token."""
    assert only(plan([sequence(8, 4)], ChunkSize(4))).end == 7
    assert not plan([sequence(8, 7)], ChunkSize(4)).prefill


@given(
    prompt=st.integers(1, 60),
    cached=st.integers(0, 59),
    chunk=st.integers(1, 70),
)
def test_chunks_cover_the_prompt_on_an_absolute_grid(prompt: int, cached: int, chunk: int) -> None:
    """Whatever was cached, chunks are contiguous, end on the grid, and stop before n-1."""
    running = sequence(prompt, min(cached, prompt - 1))
    while (batch := plan([running], ChunkSize(chunk, grid=chunk))).prefill:
        assert not batch.decode
        end = only(batch).end
        assert running.num_computed_tokens < end <= prompt - 1
        assert end - running.num_computed_tokens <= chunk
        assert end % chunk == 0 or end == prompt - 1
        running.num_computed_tokens = end
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
    batch = plan(running, ChunkSize(chunk))
    prefilling = [s for s in running if s.num_left_to_prefill]
    assert list(batch.decode) == [s for s in running if not s.num_left_to_prefill]
    shortest = min(prefilling, key=lambda s: s.num_left_to_prefill, default=None)
    assert [chunk.sequence for chunk in batch.prefill] == ([shortest] if shortest else [])
    assert batch.empty == (not running)


def test_a_short_prompt_passes_a_long_one() -> None:
    """The least work that is left goes first, also where the long prompt has begun."""
    long, short = sequence(3000, 500), sequence(11)
    batch = plan([long, short], ChunkSize(512))
    assert batch.prefill == ((short, 10),)
    oldest = sequence(9, 1)
    assert (
        only(plan([sequence(11), oldest, sequence(8)], ChunkSize(4))).sequence is oldest
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
        advances, end = only(plan(running, ChunkSize(chunk)))
        tokens = end - advances.num_computed_tokens
        advances.num_computed_tokens = end
        for earlier in running[: running.index(advances)]:
            earlier.num_passed_over += tokens
        passed += 0 if advances is long else tokens
    assert passed <= length + max(others)


def taking(own: float, each: float, row: float = 0.0, most: float = 1e9) -> StallBound:
    """What has learned that calls take a time of their own, and more for each token and row."""
    bound = StallBound(most)
    for tokens in (16, 512, 64):
        bound.observe(tokens, own + each * tokens)
    for rows in (2, 5):
        bound.observe(100, own + each * 100 + row * (rows - 1), rows)
    return bound


def lengths(running: list[Sequence], bound: StallBound, *, bounded: bool = False) -> list[int]:
    """Tokens of the chunks that are computed in one call."""
    batch = plan(running, ChunkSize(512), functools.partial(bound.joins, bounded=bounded))
    return [chunk.tokens for chunk in batch.prefill]


def test_prompts_join_where_a_call_of_their_own_takes_longer() -> None:
    """Padding is computed, so that a long one joins a short one only where calls are dear."""
    running = [sequence(11), sequence(101), sequence(21)]
    assert lengths(running, taking(0.2, 0.001)) == [10, 20, 100]
    assert lengths(running, taking(0.1, 0.003)) == [10, 20]
    assert lengths(running, taking(0.0, 0.003)) == [10]
    assert [chunk.tokens for chunk in plan(running, ChunkSize(512)).prefill] == [10]


def test_several_prompts_have_1024_tokens_at_most() -> None:
    """However many one may have: each brings work after the call."""
    running = [sequence(101) for _ in range(12)]
    batch = plan(running, ChunkSize(2048), functools.partial(taking(1, 0).joins, bounded=False))
    assert [chunk.tokens for chunk in batch.prefill] == [100] * 10
    assert only(plan([sequence(1500)], ChunkSize(2048))).tokens == 1499


def test_interactive_prompts_go_before_those_of_a_batch() -> None:
    """Also if they are longer; but not for ever, where more and more of them come."""
    batch, talk = batch_sequence(201), sequence(3001)
    assert only(plan([batch, talk], ChunkSize(4096))).sequence is talk
    assert only(plan([batch, sequence(4501)], ChunkSize(8192))).sequence is batch
    passed = 0
    while only(plan([batch, talk], ChunkSize(4096))).sequence is talk:
        age([batch, talk], {talk: 100})
        passed += 100
        talk = sequence(101)
    assert 4096 <= passed <= 4096 + 200 + 100


def test_rows_have_a_price() -> None:
    """Where layers compute each row by itself, a call of several is no gain."""
    running = [sequence(11), sequence(11), sequence(11)]
    assert lengths(running, taking(0.1, 0.001, 0.05)) == [10, 10, 10]
    assert lengths(running, taking(0.1, 0.001, 0.2)) == [10]


def test_a_call_that_compiled_its_kernels_does_not_end_calls_of_several() -> None:
    """It took long once: what a row took before still holds. Were it always so, it would count."""
    tens = [sequence(11) for _ in range(4)]
    bound = taking(0.1, 0.001)
    bound.observe(20, 5.0, rows=2)
    assert lengths(tens, bound) == [10] * 4
    for _ in range(7):
        bound.observe(20, 5.0, rows=2)
    assert lengths(tens, bound) == [10]


@pytest.mark.parametrize("row", [0.0, 0.05])
def test_the_first_call_of_several_is_soon_tried_again(row: float) -> None:
    """Nearly always it compiles something, and says little of what the next one takes."""
    tens = [sequence(11) for _ in range(4)]
    bound = StallBound(1e9)
    for tokens in (16, 512, 64):
        bound.observe(tokens, 0.1 + 0.001 * tokens)
    bound.observe(20, 1.0, rows=2)
    calls = 0
    while len(together := lengths(tens, bound)) == 1:
        bound.observe(10, 0.11)
        calls += 1
    assert 2 < calls < 10
    for rows in (2, 3):  # the next number of rows compiles something, too
        bound.observe(10 * rows, 0.1 + 0.01 * rows + row * (rows - 1) + (rows == 3), rows)
    assert 1 < len(together) <= len(lengths(tens, bound)) == 4


def test_what_rows_take_is_tried_again() -> None:
    """Where it never was less than would pay, now and then."""
    tens = [sequence(11) for _ in range(4)]
    bound = taking(0.1, 0.001, 0.2)
    assert lengths(tens, bound) == [10]
    calls = 0
    while lengths(tens, bound) == [10]:
        bound.observe(10, 0.11)
        calls += 1
    assert 10 < calls < 200


def test_those_who_decode_wait_no_longer_for_several() -> None:
    """Than for one: chunks join up to the bound, of which each row takes its time twice."""
    running = [sequence(11) for _ in range(9)]
    bound = taking(0.1, 0.002, 0.01, most=0.26)
    assert len(lengths(running, bound)) == 9
    assert len(lengths(running, bound, bounded=True)) == 2  # 0.1 + 0.06 + 0.05 is over 0.208


def test_those_who_decode_do_not_rely_on_the_best_case() -> None:
    """A row took 10 ms at best and mostly 50: so many join as fit if each takes that."""
    running = [sequence(11) for _ in range(9)]
    bound = taking(0.1, 0.002, 0.01, most=0.4)
    assert len(lengths(running, bound, bounded=True)) == 5
    for rows in (3, 5, 2):
        bound.observe(100, 0.3 + 0.05 * (rows - 1), rows)
    assert len(lengths(running, bound, bounded=True)) == 2  # 0.1 + 0.06 + 3 * 0.05 + … is over 0.32
    assert len(lengths(running, bound)) == 9


def test_what_entering_the_batch_takes_counts() -> None:
    """Where streams decode, as it was measured; a decode that compiled a kernel is left out."""
    running = [sequence(11) for _ in range(9)]
    bound = taking(0.1, 0.002, 0.01, most=0.27)
    bound.observe_decode(9.0, 3, 3)
    assert len(lengths(running, bound, bounded=True)) == 3, "nothing to compare with"
    for seconds, entered in ((0.02, 0), (0.02, 0), (9.0, 0), (0.04, 2), (7.0, 1), (0.06, 4)):
        bound.observe_decode(seconds, entered, 8)
    assert (
        len(lengths(running, bound, bounded=True)) == 3
    )  # 0.1 + 0.08 + 0.03 + 4 * 0.01 is over 0.216
    for _ in range(7):
        bound.observe_decode(0.08, 2, 8)
    assert len(lengths(running, bound, bounded=True)) == 2  # 0.27 with a third
    for _ in range(7):
        bound.observe_decode(0.01, 3, 8)
    assert len(lengths(running, bound, bounded=True)) == 4  # as if it took nothing
    assert len(lengths(running, bound)) == 9


def test_a_batch_that_grows_is_no_entry() -> None:
    """More rows take longer; those who enter are charged with what is beyond that."""
    running = [sequence(11) for _ in range(9)]
    bound = taking(0.1, 0.002, 0.01, most=0.27)
    for rows in (1, 2, 1):
        bound.observe_decode(0.06, 0, rows)
    before = len(lengths(running, bound, bounded=True))
    for rows in range(5, 12):
        bound.observe_decode(0.06 + 0.01 * rows, 1, rows)
    assert len(lengths(running, bound, bounded=True)) == before == 3
    bound.observe_decode(0.16, 0, 10)  # what the others took by themselves is known now
    assert len(lengths(running, bound, bounded=True)) == before + 1
    for _ in range(7):
        bound.observe_decode(0.27, 1, 12)
    assert len(lengths(running, bound, bounded=True)) == 1


def test_before_calls_were_measured_those_that_are_alike_are_tried() -> None:
    """If a quarter at most of what is computed is padding."""
    tens = [sequence(11) for _ in range(4)]
    assert lengths(tens, StallBound(1.0)) == [10] * 4
    assert lengths([*tens, sequence(17)], StallBound(1.0)) == [10] * 4
    assert lengths([*tens, sequence(13)], StallBound(1.0)) == [10] * 4 + [12]
    assert lengths([sequence(11), sequence(31)], StallBound(1.0)) == [10]


def test_all_are_tried_where_calls_of_one_are_known() -> None:
    """That is no longer than a call for each of them takes, whatever a row takes."""
    tens = [sequence(11) for _ in range(4)]
    bound = StallBound(1.0)
    for tokens in (16, 512):
        bound.observe(tokens, 0.1 + 0.001 * tokens)
    assert lengths(tens, bound) == [10] * 4
    assert lengths([*tens, sequence(17)], bound) == [10] * 4


def test_a_first_call_of_several_is_no_call_of_one() -> None:
    """What its rows took would be taken for its tokens': short calls for quick, and rows for free.

    The machine takes 0.12 s for a call, 1.5 ms for a token and 45 for a row more.
    """
    prompts = [sequence(31) for _ in range(16)]
    bound = StallBound(0.4)
    bound.observe(480, 0.12 + 0.0015 * 480 + 0.045 * 15, rows=16)
    assert bound.expected(16) is None
    assert lengths(prompts, bound, bounded=True) == [30, 30]
    bound.observe(30, 0.165)
    bound.observe(480, 0.84)
    bound.observe(60, 0.12 + 0.09 + 0.045, rows=2)
    beside = len(lengths(prompts, bound, bounded=True))
    assert 0.12 + 0.045 * beside + 0.045 * (beside - 1) <= 0.8 * 0.4


def test_beside_streams_two_are_tried() -> None:
    """What rows take is not known, and might be long."""
    tens = [sequence(11) for _ in range(4)]
    assert lengths(tens, StallBound(1.0), bounded=True) == [10, 10]
    bound = StallBound(1.0)
    bound.observe(10, 0.1)
    assert lengths(tens, bound, bounded=True) == [10, 10], "what rows take is not known"
    slow = StallBound(0.45)
    slow.observe(10, 0.2)
    assert lengths(tens, slow, bounded=True) == [10], "two would be over the bound"
    bound.observe(20, 0.2, rows=2)
    assert lengths(tens, bound, bounded=True) == [10, 10, 10, 10]


def test_where_no_call_keeps_to_the_bound_prompts_share_it() -> None:
    """Each alone would keep streams waiting as often as there are prompts."""
    slow = StallBound(0.2)
    slow.observe(16, 0.3)
    slow.observe(32, 0.4)
    slow.observe(32, 0.4, rows=2)
    tens = [sequence(11) for _ in range(6)]
    assert lengths(tens, slow, bounded=True) == [10] * 6, "0.575 s are less than twice 0.3"
    assert lengths([*tens, sequence(11)], slow, bounded=True) == [10] * 6


def test_who_must_be_alone_is() -> None:
    """It neither joins others nor is joined."""
    running = [sequence(11), sequence(12), sequence(13)]
    running[1].is_alone = True
    assert lengths(running, taking(1, 0)) == [10, 12]
    running[0].is_alone = True
    assert lengths(running, taking(1, 0)) == [10]


@given(
    states=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 80)), max_size=12),
    chunk=st.integers(1, 200),
    own=st.floats(0.01, 1),
    each=st.floats(0.001, 0.1),
    row=st.floats(0, 1),
)
def test_a_joint_call_is_never_slower(
    states: list[tuple[int, int]], chunk: int, own: float, each: float, row: float
) -> None:
    """It takes no longer than calls of their own, padding included, and keeps to the bound."""
    running = [sequence(*state) for state in states]
    batch = plan(
        running, ChunkSize(chunk), functools.partial(taking(own, each, row).joins, bounded=False)
    )
    alone = plan(running, ChunkSize(chunk))
    assert batch.prefill[:1] == alone.prefill
    assert batch.decode == alone.decode
    assert len({id(piece.sequence) for piece in batch.prefill}) == len(batch.prefill)
    if len(batch.prefill) > 1:
        counts = [piece.tokens for piece in batch.prefill]
        padded = len(counts) * max(counts)
        assert padded <= chunk
        joint = own + each * padded + row * (len(counts) - 1)
        assert joint <= sum(own + each * count for count in counts) * (1 + 1e-6)


def test_a_tenants_precedence_is_before_what_is_left() -> None:
    """However short another's prompt is; of those that are alike the shortest goes first."""
    running = [sequence(40, tenant="a"), sequence(400, tenant="b"), sequence(90, tenant="c")]
    for each, precedence in zip(running, (3.0, 1.0, 3.0), strict=True):
        each.precedence = precedence
    assert only(plan(running, ChunkSize(1000))).sequence is running[1]
    running[1].num_computed_tokens = 399
    assert only(plan(running, ChunkSize(1000))).sequence is running[0]


def test_only_later_ones_of_its_tenant_make_a_prompt_older() -> None:
    """What others' prompts take is settled between tenants."""
    first, other, later = sequence(9), sequence(9, tenant="b"), sequence(9)
    age([first, other, later], {later: 5, other: 3})
    assert [each.num_passed_over for each in (first, other, later)] == [5, 0, 0]
