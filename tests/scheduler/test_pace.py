"""How long prefill chunks are beside streams, by how long calls took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.pace import LEAST_TOKENS, PrefillPace

Calls = list[tuple[int, float]]


def pace(calls: Calls, *, max_stall: float = 0.25, limit: int = 2048) -> PrefillPace:
    """Make one that has seen these calls; 0.2 s are used of the bound."""
    made = PrefillPace(max_stall, limit)
    for tokens, seconds in calls:
        made.observe(tokens, seconds)
    return made


@pytest.mark.parametrize(
    ("calls", "beside", "tokens"),
    [
        ([], 0, 2048),
        ([], 3, 64),  # before the first call
        ([(100, 9.0)], 0, 2048),  # no stream waits
        ([(64, 0.064)], 1, 192),  # 1 ms a token, with nothing known of a constant time
        ([(64, 0.074), (128, 0.138)], 1, 176),  # 10 ms, and 1 ms a token: 190
        ([(64, 0.164), (128, 0.228)], 1, 96),  # 100 ms, and 1 ms a token
        ([(64, 0.364), (128, 0.428)], 1, LEAST_TOKENS),  # 300 ms: more than the bound
        ([(64, 1.0), (64, 1.2)], 1, LEAST_TOKENS),
        ([(64, 0.001), (128, 0.001)], 1, 512),  # four times the longest that was measured
        ([(2048, 0.02), (64, 0.01)], 1, 2048),
        # A kernel was compiled in one call: the medians do not follow.
        ([(64, 0.074), (128, 0.138), (96, 7.0), (160, 0.17), (80, 0.09)], 1, 176),
        # The last 16 calls count: the machine is slower than it was.
        ([(64, 0.01), *[(n, 0.004 * n) for n in range(16, 272, 16)]], 1, 48),
    ],
)
def test_chunks_are_as_long_as_streams_can_wait(calls: Calls, beside: int, tokens: int) -> None:
    """Seconds are a constant and a time a token; the call is to take 80 % of the bound."""
    assert pace(calls).prefill_tokens(beside) == tokens


@given(
    calls=st.lists(st.tuples(st.integers(1, 4096), st.floats(0.0, 20.0)), max_size=20),
    limit=st.integers(1, 4096),
    bounds=st.tuples(st.floats(0.001, 5.0), st.floats(0.001, 5.0)),
    beside=st.integers(0, 3),
)
def test_any_calls(calls: Calls, limit: int, bounds: tuple[float, float], beside: int) -> None:
    """Never above the limit, nor below the least, and no shorter for a longer bound."""
    shorter, longer = (
        pace(calls, max_stall=bound, limit=limit).prefill_tokens(beside) for bound in sorted(bounds)
    )
    assert min(LEAST_TOKENS, limit) <= shorter <= longer <= limit
