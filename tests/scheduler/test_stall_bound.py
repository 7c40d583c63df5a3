"""How long chunks are, by how long calls took."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.policy import ChunkSize
from umbel.scheduler.stall_bound import StallBound


@pytest.mark.parametrize(
    ("own", "cut", "last"),
    [
        (0.05, 64, 87),  # in 0.225 s
        (0.085, 48, 74),  # in 0.234 s, twice what 16 tokens take
        (0.101, 48, 74),  # in 0.25 s
    ],
)
def test_chunks_are_cut_until_they_fit(own: float, cut: int, last: int) -> None:
    """A chunk costs a time of its own and 2 ms a token, and may take 80 % of the bound of 0.25 s.

    A prompt's last may take 90 % of it, and up to all of it as long as two of the shortest take
    longer: to cut it would keep streams waiting for more.
    """
    bound = StallBound(0.25)
    for tokens in (512, 64, 16, 128, 16):
        bound.observe(tokens, own + 0.002 * tokens)
    assert bound.chunk_size(512) == ChunkSize(cut, last=last)
    assert bound.expected(100) == pytest.approx(own + 0.2)


def test_a_chunk_that_costs_the_same_whatever_its_size_is_not_halved() -> None:
    """Where the weights take all of the time, as with short prompts, pieces would double it."""
    bound = StallBound(0.25)
    for tokens in (16, 40, 64):
        bound.observe(tokens, 0.15)
    assert bound.chunk_size(512).most == 512


def test_chunks_are_not_cut_to_nothing_where_none_fits() -> None:
    """A chunk's own time is over the bound: chunks take at most twice what the least takes."""
    bound = StallBound(0.2)
    for tokens in (512, 64, 16, 128):
        bound.observe(tokens, 0.25 + 0.002 * tokens)
    assert bound.chunk_size(512).most == 144


def test_before_any_measurement_chunks_are_short() -> None:
    """The first prompt beside an answer does not stall it by a chunk of unknown length."""
    assert StallBound(0.25).expected(1) is None
    assert StallBound(0.25).chunk_size(512) == ChunkSize(64)


def test_one_measurement_is_taken_as_proportional() -> None:
    """Nothing is known of a chunk's own time yet, so halves are taken to take half."""
    bound = StallBound(0.25)
    bound.observe(512, 1.6)
    assert bound.chunk_size(512).most == 64


def test_the_bound_follows_a_machine_that_changes() -> None:
    """Newer chunks count more than older ones."""
    bound = StallBound(0.25)
    for _ in range(20):
        bound.observe(512, 0.1)
    assert bound.chunk_size(512).most == 512
    for tokens in [64, 128] * 20:
        bound.observe(tokens, tokens / 330)
    assert bound.chunk_size(512).most == 64


class Unscaled(StallBound):
    """Takes no measurement for another speed of the machine."""

    _NOISE = math.inf


def calls_after(
    bound: StallBound, own: float, each: float, factor: float, seed: int
) -> list[tuple[int, float]]:
    """Have prompts computed by a machine whose speed changes at once.

    Args:
        bound: sizes its chunks.
        own: seconds of a chunk, before.
        each: seconds of a token more.
        factor: by which both grow.
        seed: of noise, a tenth up or down, and of prompts.

    Returns:
        Tokens and seconds of its calls from the first that can know of it.
    """
    noise, left, calls = random.Random(seed), 0, []  # noqa: S311 - times, not secrets
    for number in range(80):
        left = left or noise.randint(500, 900)
        size = bound.chunk_size(512)
        tokens = left if left <= size.last else min(size.most, left)
        left -= tokens
        slower = factor if number >= 40 else 1.0
        seconds = (own + each * tokens) * slower * noise.uniform(0.9, 1.1)
        bound.observe(tokens, seconds)
        calls.append((tokens, seconds))
    return calls[41:]


MACHINES = [(0.1, 0.002), (0.05, 0.001), (0.02, 0.003), (0.1, 0.0005)]


@pytest.mark.parametrize(("own", "each"), MACHINES)
def test_a_machine_that_is_half_as_fast_at_once_is_followed(own: float, each: float) -> None:
    """No chunk is as long soon after as where the fit is left to find out."""

    def worst(bound: StallBound, seed: int) -> float:
        return max(seconds for _, seconds in calls_after(bound, own, each, 2, seed))

    scaled = statistics.mean(worst(StallBound(0.25), seed) for seed in range(30))
    unscaled = statistics.mean(worst(Unscaled(0.25), seed) for seed in range(30))
    assert scaled < 0.97 * unscaled


@pytest.mark.parametrize(("own", "each", "best"), [(0.1, 0.002, 80), (0.1, 0.0005, 224)])
def test_chunks_are_not_cut_to_the_shortest_for_it(own: float, each: float, best: int) -> None:
    """Where a chunk's own time counts: few have less than half of what is best from then on."""

    def short(bound: StallBound, seed: int) -> int:
        return sum(tokens < best / 2 for tokens, _ in calls_after(bound, own, each, 2, seed)[:18])

    scaled = sum(short(StallBound(0.25), seed) for seed in range(30))
    unscaled = sum(short(Unscaled(0.25), seed) for seed in range(30))
    assert scaled < 0.8 * unscaled


@pytest.mark.parametrize(("own", "each"), MACHINES)
def test_noise_is_no_other_speed(own: float, each: float) -> None:
    """Where nothing changes, chunks are as long as those of the fit."""

    def mean(kind: type[StallBound]) -> float:
        runs = (calls_after(kind(0.25), own, each, 1, seed) for seed in range(20))
        return statistics.mean(tokens for calls in runs for tokens, _ in calls)

    assert mean(StallBound) == pytest.approx(mean(Unscaled), rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 5)), min_size=1, max_size=30))
def test_what_is_foretold_is_a_time(chunks: list[tuple[int, float]]) -> None:
    """Whatever noise was measured, no chunk takes less than nothing, nor longer for less."""
    bound = StallBound(0.25)
    for chunk in chunks:
        bound.observe(*chunk)
    times = [bound.expected(tokens) for tokens in (1, 16, 512)]
    assert all(time is not None and time >= -1e-9 for time in times)
    assert times == sorted(times, key=lambda time: time or 0.0)
    assert 16 <= bound.chunk_size(512).most <= 512


def several(same: float, each: float, calls: list[int]) -> StallBound:
    """Learn of calls of one, of 30 ms and 0.1 ms a token, and of several, which take more.

    Args:
        same: seconds, however many rows there are.
        each: seconds more of each row but the first.
        calls: rows of each call of several, of 64 tokens a row.
    """
    bound = StallBound(0.2)
    for tokens in (512, 64, 16, 128):
        bound.observe(tokens, 0.03 + 0.0001 * tokens)
    for rows in calls:
        more = same + each * (rows - 1)
        bound.observe(64 * rows, 0.03 + 0.0001 * 64 * rows + more, rows)
    return bound


def most_that_join(bound: StallBound) -> int:
    """How many prompts of 64 tokens one call has beside streams."""
    rows = 1
    while rows < 100 and bound.joins([64] * rows, 64, bounded=True):
        rows += 1
    return rows


@pytest.mark.parametrize(
    ("same", "each", "calls"),
    [
        (0.04, 0.0, [2, 7, 4]),
        (0.04, 0.001, [2, 7, 4]),
        (0.0, 0.005, [2, 7, 4]),
        (0.02, 0.003, [7, 2, 2, 3]),
    ],
)
def test_what_several_take_more_is_for_all_and_for_each(
    same: float, each: float, calls: list[int]
) -> None:
    """So that a call of more than ever were is foretold."""
    bound = several(same, each, calls)
    bound.observe_decode(0.01, 0, 8)
    bound.observe_decode(0.01, 4, 8)  # to enter takes nothing here
    fitting = [n for n in range(2, 60) if 0.03 + n * 0.0064 + same + each * (n - 1) <= 0.16]
    assert most_that_join(bound) == max(fitting)


def test_of_one_number_of_rows_all_is_taken_to_be_the_rows() -> None:
    """What others take is not known then: of twice as many twice as much."""
    bound = several(0.06, 0.0, [4, 4])
    bound.observe_decode(0.01, 0, 8)
    bound.observe_decode(0.01, 4, 8)
    assert most_that_join(bound) == 5  # 30 ms, 6.4 for each, and 20 for each but the first


def test_a_call_that_compiles_does_not_change_what_rows_take() -> None:
    """One of seven takes ten times as long, once: neither part is learned of it."""
    usual = several(0.04, 0.001, [2, 7, 4, 3, 5, 6])
    other = several(0.04, 0.001, [2, 7, 4, 3, 5])
    other.observe(384, 1.0, 6)
    for bound in (usual, other):
        bound.observe_decode(0.01, 0, 8)
        bound.observe_decode(0.01, 4, 8)
        bound.observe(64, 0.0364)
        for rows in (4, 5):  # the last call of several was as long as foretold
            bound.observe(64 * rows, 0.03 + 0.0064 * rows + 0.04 + 0.001 * (rows - 1), rows)
    assert most_that_join(other) == most_that_join(usual)


@given(
    calls=st.lists(
        st.tuples(st.integers(2, 40), st.floats(0, 5)),
        min_size=1,
        max_size=9,
    ),
    rows=st.integers(1, 60),
)
def test_more_rows_never_take_less(calls: list[tuple[int, float]], rows: int) -> None:
    """However calls took, by chance: what is foretold is a time, and grows with the rows."""
    bound = StallBound(0.2)
    bound.observe(64, 0.03)
    for count, seconds in calls:
        bound.observe(64 * count, seconds, count)
    one, two = (bound._usual(n, 64) for n in (rows, rows + 1))
    assert 0 <= one <= two + 1e-9


def test_calls_of_several_rows_show_a_faster_machine() -> None:
    """Where all calls have several, nothing else does; a row's own time stays what it is more."""
    bound = StallBound(0.2)
    for tokens in (16, 64, 128) * 4:
        bound.observe(tokens, 0.02 + 0.001 * tokens)
    before = bound.expected(128)
    for _ in range(30):
        bound.observe(128, (0.02 + 0.001 * 128) / 4, rows=2)
    now = bound.expected(128)
    assert before is not None
    assert now is not None
    assert now < 1.5 * before / 4


@pytest.mark.parametrize(
    ("spent", "count"),
    [
        (0.01, 6),  # as long as usual
        (0.05, 6),  # 20 + 60 + 5 * 8 ms, and 40 more
        (0.06, 5),
        (0.08, 4),
        (0.5, 1),
    ],
)
def test_a_decode_that_took_long_leaves_room_for_less(spent: float, count: int) -> None:
    """All before a call keeps streams waiting, too; one prompt is computed in any case."""
    bound = _known()
    for _ in range(3):
        bound.observe_decode(0.01, 0, 8)
    assert bound.fitting([10] * 6, spent, 8, ended=False) == count
    assert bound.fitting([10], spent, 8, ended=False) == 1


def test_what_those_who_end_take_is_not_usual() -> None:
    """A decode behind them is as long as before they came; alone they are better than nothing."""
    bound = _known()
    for _ in range(9):
        bound.observe_decode(0.06, 0, 8, ended=True)
    assert bound.fitting([10] * 6, 0.08, 8, ended=False) == 6
    bound.observe_decode(0.01, 0, 8)
    for _ in range(9):
        bound.observe_decode(0.06, 0, 8, ended=True)
    assert bound.fitting([10] * 6, 0.08, 8, ended=False) == 4


def test_after_a_call_that_took_long_the_next_is_shorter() -> None:
    """As much longer is likely the next one; one that took no longer ends that."""
    bound = _known()
    for seconds, count in ((0.19, 4), (0.12, 6), (0.05, 6), (9.0, 3)):  # 120 ms are usual
        bound.observe(60, seconds, rows=6)
        assert bound.fitting([10] * 6, 0.0, 8, ended=False) == count


@pytest.mark.parametrize(
    ("took", "behind", "others"),
    [
        (1.8, 4, 6),
        (1.0, 6, 6),  # no longer than usual
        (9.0, 3, 6),  # once, which says that a kernel was compiled
    ],
)
def test_behind_who_ends_calls_are_as_long_as_the_worst_of_these(
    took: float, behind: int, others: int
) -> None:
    """A call of six takes 120 ms; others are as they were once one of these was."""
    bound = _known()
    assert bound.fitting([10] * 6, 0.0, 8, ended=True) == 6  # before, some longer: 150 ms
    assert bound.fitting([10] * 6, 0.02, 8, ended=True) == 5
    for seconds in (0.02 + 0.01 * 3 + 0.016, *[0.03] * 4):
        rows = 3 if seconds > 0.03 else 1
        bound.observe(10 * rows, seconds * (took if rows > 1 else 1), rows, behind=True)
    bound.observe(30, 0.02 + 0.01 * 3 + 0.016, 3)
    assert bound.fitting([10] * 6, 0.0, 8, ended=True) == behind
    assert bound.fitting([10] * 6, 0.0, 8, ended=False) == others
    bound.observe(10, 0.03, behind=True)  # one is forgotten after five
    assert bound.fitting([10] * 6, 0.0, 8, ended=True) == 6


@pytest.mark.parametrize(
    ("known", "spent", "ended", "waits"),
    [
        # No decode is known: a call of one, of 30 ms, still fits behind 130.
        ([], 0.131, False, True),
        ([], 0.129, False, False),
        ([], 0.123, True, True),  # where somebody ended it is expected to take 37.5
        ([], 0.122, True, False),
        # 10 ms are usual.
        ([(0.01, 0)], 0.141, False, True),
        ([(0.01, 0)], 0.139, False, False),
        ([(0.01, 0)], 0.061, True, True),
        ([(0.01, 0)], 0.059, True, False),
        # Those in which somebody entered are no measure, but where there are no others.
        ([(0.07, 2)], 0.201, False, True),
        ([(0.07, 2)], 0.192, True, False),
        ([(0.01, 0), (0.07, 2)], 0.141, False, True),
    ],
)
def test_a_call_should_wait_where_not_even_one_fits(
    known: list[tuple[float, int]], spent: float, *, ended: bool, waits: bool
) -> None:
    """Or where somebody ended, and that alone took long."""
    bound = _known()
    for seconds, entered in known:
        bound.observe_decode(seconds, entered, 8)
    assert bound.should_wait(10, spent, 8, ended=ended) == waits


def test_where_no_call_fits_at_all_none_waits_for_a_decode_as_usual() -> None:
    """A slow model's calls would all wait."""
    bound = StallBound(0.2)
    for tokens in (10, 40):
        bound.observe(tokens, 1.0 + 0.001 * tokens)
    bound.observe_decode(0.5, 0, 8)
    for spent, waits in ((0.6, False), (1.4, False), (1.6, True)):  # calls may take 2.03 s
        assert bound.should_wait(10, spent, 8, ended=False) == waits


def test_behind_who_ends_no_call_of_several_counts_before_rows_are_measured() -> None:
    """What its rows take would be taken for lateness."""
    bound = StallBound(0.2)
    for tokens in (10, 40, 60):
        bound.observe(tokens, 0.02 + 0.001 * tokens)
    bound.observe(20, 0.08, 2, behind=True)  # twice as long as a call of one
    for rows in (3, 4, 5):
        bound.observe(10 * rows, 0.02 + 0.01 * rows + 0.008 * (rows - 1), rows)
    assert bound.fitting([10] * 6, 0.0, 8, ended=True) == 6


def test_calls_of_one_make_it_count_for_less() -> None:
    """Beside streams there may be no call of several again that says that it has passed."""
    bound = _known()
    bound.observe(60, 9.0, rows=6)
    for count in (3, 5, 6):
        assert bound.fitting([10] * 6, 0.0, 8, ended=False) == count
        bound.observe(10, 0.03)


def test_where_no_decode_is_known_all_of_it_counts() -> None:
    """The first decodes of a process are those that take long."""
    bound = _known()
    assert bound.fitting([10] * 6, 0.04, 8, ended=False) == 6
    assert bound.fitting([10] * 6, 0.05, 8, ended=False) == 5
    bound.observe_decode(0.01, 0, 2)  # of so many fewer that it says nothing
    assert bound.fitting([10] * 6, 0.05, 8, ended=False) == 5
    bound.observe_decode(0.05, 0, 64)  # eight take no longer
    assert bound.fitting([10] * 6, 0.05, 8, ended=False) == 6


def test_before_any_measurement_nothing_is_left_out() -> None:
    """Nothing is foretold then."""
    assert StallBound(0.2).fitting([10] * 6, 0.1, 8, ended=False) == 6


def _known() -> StallBound:
    """One whose calls take 20 ms, and 1 ms a token, and 8 ms for each row more."""
    bound = StallBound(0.2)
    for tokens in (10, 40, 60, 10, 20, 60):
        bound.observe(tokens, 0.02 + 0.001 * tokens)
    for rows in (2, 3, 4):
        bound.observe(10 * rows, 0.02 + 0.01 * rows + 0.008 * (rows - 1), rows)
    return bound
