"""How far the budget shrinks, over a time that only the tests know."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from umbel.cachestore.shrink import Pressure, Shrink

NORMAL, WARNING, CRITICAL = Pressure

LEVELS = st.sampled_from(Pressure)
# Polls as they come, and ones that were late by far; some find the clock where it was.
GAPS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0, 10.0, 30.0]), st.floats(0, 1000))
HISTORIES = st.lists(st.tuples(GAPS, LEVELS), max_size=200)
# Sums of seconds are off by little, and so are the times at which something is due.
EPSILON = 1e-6


class Seen(NamedTuple):
    """An observation and the share that came of it."""

    now: float
    level: Pressure
    share: float


class Machine:
    """A budget's share on a machine whose pressure is told second by second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.shrink = Shrink()

    def live(self, history: Iterable[tuple[float, Pressure]]) -> list[Seen]:
        seen = []
        for gap, level in history:
            self.now += gap
            seen.append(Seen(self.now, level, self.shrink.observe(level, self.now)))
        return seen

    def hold(self, level: Pressure, seconds: int) -> list[float]:
        return [seen.share for seen in self.live([(1.0, level)] * seconds)]


# Levels, the seconds that each lasts, and the shares of these seconds; None is any.
Script = list[tuple[Pressure, int, list[float] | None]]
SCRIPTS: dict[str, Script] = {
    "without pressure all may be used": [(NORMAL, 100, [1.0] * 100)],
    "a warning takes a tenth at once and every five seconds": [
        (WARNING, 60, [0.9] * 5 + [0.8] * 5 + [0.7] * 5 + [0.6] * 5 + [0.5] * 40)
    ],
    "critical takes half at once and a tenth every two seconds": [
        (CRITICAL, 30, [0.5, 0.5, 0.4, 0.4, 0.3, 0.3] + [0.25] * 24)
    ],
    "critical does not wait for the warning's next step": [
        (WARNING, 1, [0.9]),
        (CRITICAL, 1, [0.5]),
    ],
    "critical goes on from half": [(WARNING, 60, None), (CRITICAL, 5, [0.4, 0.4, 0.3, 0.3, 0.25])],
    "a warning gives nothing back": [(CRITICAL, 4, None), (WARNING, 100, [0.4] * 100)],
    "it grows after thirty seconds and then every ten": [
        (CRITICAL, 30, None),
        (NORMAL, 29, [0.25] * 29),
        (NORMAL, 70, [share / 100 for share in range(35, 96, 10) for _ in range(10)]),
        (NORMAL, 11, [1.0] * 11),
    ],
    "pressure in between starts the wait again": [
        (CRITICAL, 30, None),
        (NORMAL, 29, None),
        (WARNING, 1, [0.25]),
        (NORMAL, 30, [0.25] * 29 + [0.35]),
        (NORMAL, 9, None),
        (WARNING, 1, [0.35]),
        (NORMAL, 30, [0.35] * 29 + [0.45]),
    ],
    "a warning after a step up takes it back at once": [
        (WARNING, 60, None),
        (NORMAL, 30, [0.5] * 29 + [0.6]),
        (WARNING, 1, [0.5]),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_share_over_time(script: Script) -> None:
    machine = Machine()
    for level, seconds, expected in script:
        shares = machine.hold(level, seconds)
        assert shares == expected or expected is None


def test_a_signal_that_flaps_only_shrinks_and_no_faster_than_one_that_lasts() -> None:
    machine = Machine()
    shares = [seen.share for seen in machine.live([(1.0, WARNING), (1.0, NORMAL)] * 60)]
    assert shares == sorted(shares, reverse=True)
    assert shares[:12] == [0.9] * 6 + [0.8] * 6
    assert shares[-1] == 0.5


@pytest.mark.parametrize("level", [WARNING, CRITICAL])
def test_a_long_gap_is_one_step_down(level: Pressure) -> None:
    machine = Machine()
    machine.hold(level, 1)
    before = machine.shrink.share
    (seen,) = machine.live([(3600.0, level)])
    assert before - seen.share == pytest.approx(0.1)


def test_a_long_gap_is_no_calm() -> None:
    machine = Machine()
    machine.hold(CRITICAL, 30)
    machine.live([(3600.0, NORMAL)])
    assert machine.hold(NORMAL, 25) == [0.25] * 24 + [0.35]
    machine.live([(3600.0, NORMAL)])
    assert machine.hold(NORMAL, 5) == [0.35] * 4 + [0.45]


def test_a_clock_that_went_back_is_no_calm_either() -> None:
    machine = Machine()
    machine.hold(WARNING, 1)
    machine.hold(NORMAL, 29)
    machine.live([(-500.0, NORMAL)])
    assert machine.hold(NORMAL, 1) == [1.0]


@given(HISTORIES)
def test_the_share_stays_within_its_bounds(history: list[tuple[float, Pressure]]) -> None:
    """A quarter to the whole; a warning alone never takes more than half; no step is longer."""
    machine = Machine()
    seen = [Seen(machine.now, NORMAL, 1.0), *machine.live(history)]
    assert machine.shrink.share == seen[-1].share
    for before, after in pairwise(seen):
        step = after.share - before.share
        assert 0.25 <= after.share <= 1
        assert step <= 0.1 + EPSILON
        if after.level == NORMAL:
            assert step >= 0
        else:
            assert step <= 0
        if after.level == CRITICAL:
            assert after.share <= 0.5
            assert step >= -0.1 - EPSILON or after.share == 0.5
        if after.level == WARNING:
            assert step >= -0.1 - EPSILON
            assert after.share >= min(before.share, 0.5)


@given(HISTORIES)
def test_it_never_grows_within_the_wait(history: list[tuple[float, Pressure]]) -> None:
    machine = Machine()
    seen = [Seen(machine.now, NORMAL, 1.0), *machine.live(history)]
    calm = since_step = float("inf")
    for before, after in pairwise(seen):
        watched = min(after.now - before.now, 5.0)
        calm, since_step = calm + watched, since_step + watched
        if after.level != NORMAL:
            calm = 0.0
        if after.share > before.share:
            assert calm >= 30 - EPSILON
            assert since_step >= 10 - EPSILON
            since_step = 0.0


@given(HISTORIES)
def test_it_shrinks_no_faster_than_told(history: list[tuple[float, Pressure]]) -> None:
    machine = Machine()
    seen = [Seen(machine.now, NORMAL, 1.0), *machine.live(history)]
    shrunk_at = float("-inf")
    for before, after in pairwise(seen):
        if after.share < before.share:
            every = 2.0 if after.level == CRITICAL else 5.0
            jump = after.level == CRITICAL and before.share > 0.5
            assert jump or after.now - shrunk_at >= every - EPSILON
            shrunk_at = after.now


@example([(6.12, CRITICAL)] + [(2.0, CRITICAL)] * 4)  # polls whose gaps sum up to 29.999...
@given(HISTORIES)
def test_recovery_is_monotone_and_whole(history: list[tuple[float, Pressure]]) -> None:
    """Whatever was before, after calm of 30 s and seven more steps all may be used again."""
    machine = Machine()
    machine.live(history)
    shares = [machine.shrink.share, *machine.hold(NORMAL, 30 + 7 * 10)]
    assert shares == sorted(shares)
    assert shares[-1] == 1


@given(HISTORIES)
def test_lasting_pressure_shrinks_to_its_floor(history: list[tuple[float, Pressure]]) -> None:
    """Whatever was before: half of the budget within 25 s, three quarters in six more."""
    machine = Machine()
    machine.live(history)
    assert machine.hold(WARNING, 26)[-1] <= 0.5
    assert machine.hold(CRITICAL, 7)[-1] == 0.25
