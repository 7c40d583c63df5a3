"""Where state is saved, and which of it stays."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.cachestore.checkpoints import Captured, Reason, decode_due, keep, prompt_offsets

from .fakes import FakeCheckpoint, Registry

REASONS = st.sampled_from(Reason)


@pytest.mark.parametrize(
    ("length", "cached", "matched", "boundaries", "expected"),
    [
        (1, 0, 0, [], {}),
        (2, 0, 0, [], {1: Reason.PROMPT}),
        (31, 0, 0, [], {30: Reason.PROMPT}),
        (31, 30, 31, [], {}),
        (31, 12, 20, [], {20: Reason.JUNCTION, 30: Reason.PROMPT}),
        (31, 20, 20, [], {30: Reason.PROMPT}),
        (31, 12, 31, [], {30: Reason.JUNCTION}),
        (250, 0, 0, [], {100: Reason.GRID, 200: Reason.GRID, 249: Reason.PROMPT}),
        (250, 100, 100, [], {200: Reason.GRID, 249: Reason.PROMPT}),
        (201, 0, 0, [], {100: Reason.GRID, 200: Reason.PROMPT}),
        (31, 0, 0, [(10, Reason.SYSTEM)], {10: Reason.SYSTEM, 30: Reason.PROMPT}),
        (31, 10, 10, [(10, Reason.SYSTEM), (0, Reason.SYSTEM)], {30: Reason.PROMPT}),
        (31, 0, 0, [(31, Reason.MESSAGE)], {30: Reason.MESSAGE}),
        (31, 0, 10, [(10, Reason.SYSTEM)], {10: Reason.JUNCTION, 30: Reason.PROMPT}),
        (31, 0, 0, [(9, Reason.SYSTEM), (9, Reason.MESSAGE)], {9: Reason.MESSAGE}),
    ],
)
def test_prompt_offsets(
    length: int,
    cached: int,
    matched: int,
    boundaries: list[tuple[int, Reason]],
    expected: dict[int, Reason],
) -> None:
    """Junction, boundaries, grid (of 100) and the end, each once, best reason, what is left."""
    offsets = prompt_offsets(
        length, cached=cached, matched=matched, boundaries=boundaries, interval=100, kept=4
    )
    assert offsets == expected


@pytest.mark.parametrize(
    ("cached", "matched", "boundaries", "kept", "expected"),
    [
        (0, 0, [(70, Reason.HINT)], 4, [70]),
        (0, 0, [(63, Reason.HINT)], 4, []),  # too little is spared
        (7, 7, [(70, Reason.HINT)], 4, []),
        (70, 70, [(70, Reason.HINT)], 4, []),
        # Two are shared by others, and two are the conversation's own.
        (0, 0, [(100, Reason.HINT), (250, Reason.HINT), (350, Reason.HINT)], 4, [100, 250]),
        (0, 0, [(100, Reason.SYSTEM), (200, Reason.HINT), (350, Reason.HINT)], 4, [350]),
        (0, 150, [(100, Reason.SYSTEM), (350, Reason.HINT)], 4, []),
        (0, 150, [(100, Reason.SYSTEM), (350, Reason.HINT)], 5, [350]),
        (0, 0, [(100, Reason.HINT)], 2, []),
        (0, 0, [(100, Reason.HINT)], 0, []),
        # A checkpoint that is due anyway needs no hint, and a better reason is kept.
        (0, 0, [(100, Reason.HINT), (100, Reason.SYSTEM), (200, Reason.HINT)], 4, [200]),
        (0, 0, [(100, Reason.HINT), (100, Reason.MESSAGE), (200, Reason.HINT)], 4, [200]),
        (0, 0, [(400, Reason.HINT)], 4, [399]),
        # A message boundary has the place if the hint does not get it, and the next turn's has.
        (0, 0, [(100, Reason.HINT), (100, Reason.MESSAGE), (200, Reason.MESSAGE)], 4, [100]),
        (0, 0, [(100, Reason.HINT), (100, Reason.MESSAGE), (200, Reason.MESSAGE)], 2, []),
        (0, 0, [(200, Reason.HINT), (100, Reason.MESSAGE), (200, Reason.MESSAGE)], 4, []),
    ],
)
def test_hints_get_the_checkpoints_left(
    cached: int, matched: int, boundaries: list[tuple[int, Reason]], kept: int, expected: list[int]
) -> None:
    """Those come first that spare the most tokens; a place of a lesser reason is theirs."""
    offsets = prompt_offsets(
        400, cached=cached, matched=matched, boundaries=boundaries, interval=50, kept=kept
    )
    assert [offset for offset, reason in offsets.items() if reason is Reason.HINT] == expected
    without = [(offset, reason) for offset, reason in boundaries if reason is not Reason.HINT]
    plain = prompt_offsets(
        400, cached=cached, matched=matched, boundaries=without, interval=50, kept=kept
    )
    assert {o: r for o, r in offsets.items() if r is not Reason.HINT} == {
        o: r for o, r in plain.items() if o not in expected
    }


@given(
    st.integers(1, 300),
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 400), REASONS)),
    st.data(),
)
def test_prompt_offsets_are_ascending_and_left_to_compute(
    length: int, interval: int, boundaries: list[tuple[int, Reason]], data: st.DataObject
) -> None:
    """A prefill can stop at each in turn; the junction is always among them.

    So is the end, where there is no message boundary.
    """
    matched = data.draw(st.integers(0, length))
    cached = data.draw(st.integers(0, min(matched, length - 1)))
    offsets = prompt_offsets(
        length, cached=cached, matched=matched, boundaries=boundaries, interval=interval, kept=4
    )
    assert list(offsets) == sorted(offsets)
    assert all(cached < offset <= length - 1 for offset in offsets)
    last = () if any(reason is Reason.MESSAGE for _, reason in boundaries) else (length - 1,)
    for wanted in (*last, min(matched, length - 1), *range(interval, length, interval)):
        assert wanted in offsets or wanted <= cached
    for offset, reason in boundaries:
        place = min(offset, length - 1)
        if reason is not Reason.HINT:  # a hint may have no room, or a message boundary's
            least = Reason.HINT if reason is Reason.MESSAGE else reason
            assert place <= cached or offsets[place] <= least


def test_decode_is_saved_densely_at_first_then_ever_less() -> None:
    due = [generated for generated in range(-64, 5121) if decode_due(generated)]
    assert due == [*range(64, 513, 64), *range(768, 2049, 256), *range(3072, 5121, 1024)]


def captured(*items: tuple[int, Reason]) -> list[Captured]:
    registry = Registry()
    return [Captured(FakeCheckpoint(registry, range(at)), reason) for at, reason in items]


def offsets_of(items: Sequence[Captured]) -> list[int]:
    return [item.checkpoint.offset for item in items]


MESSAGES = tuple((at, Reason.MESSAGE) for at in (100, 200, 300, 400))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ((), []),
        (((30, Reason.PROMPT),), [30]),
        (((30, Reason.PROMPT), (94, Reason.DECODE), (158, Reason.DECODE)), [94, 30, 158]),
        (
            (
                (30, Reason.PROMPT),
                *((30 + 64 * n, Reason.DECODE) for n in range(1, 9)),
                (550, Reason.FINAL),
            ),
            [550, 94, 30, 158],
        ),
        (((50, Reason.SYSTEM), *MESSAGES, (500, Reason.FINAL)), [500, 400, 50, 300]),
        (tuple((at, Reason.GRID) for at in range(10, 60, 10)), [50, 40, 30, 20]),
        (((9, Reason.GRID), (9, Reason.SYSTEM), (9, Reason.PROMPT)), [9]),
        (
            ((10, Reason.JUNCTION), (20, Reason.GRID), (5, Reason.SYSTEM), (30, Reason.PROMPT)),
            [10, 5, 30, 20],
        ),
        (
            (
                *((at, Reason.HINT) for at in (10, 20)),
                *((at, Reason.MESSAGE) for at in (30, 40)),
                (50, Reason.PROMPT),
            ),
            [40, 20, 10, 50],
        ),
    ],
)
def test_keep_four(items: tuple[tuple[int, Reason], ...], expected: list[int]) -> None:
    kept, _ = keep(captured(*items), 4)
    assert offsets_of(kept) == expected


def test_of_two_at_one_offset_the_better_reason_stays() -> None:
    items = captured((94, Reason.DECODE), (94, Reason.FINAL))
    kept, dropped = keep(items, 4)
    assert (kept, dropped) == ([items[1]], [items[0]])


@given(st.lists(st.tuples(st.integers(1, 30), REASONS), max_size=20), st.integers(0, 8))
def test_keep_divides_without_loss(items: list[tuple[int, Reason]], limit: int) -> None:
    everything = captured(*items)
    kept, dropped = keep(everything, limit)
    together = [id(item) for item in [*kept, *dropped]]
    assert sorted(together) == sorted(id(item) for item in everything)
    distinct = {at for at, _ in items}
    assert len(kept) == len(set(offsets_of(kept))) == min(limit, len(distinct))


@given(st.lists(st.tuples(st.integers(1, 30), REASONS), max_size=20), st.integers(0, 6))
def test_higher_limit_keeps_superset_of_checkpoints(
    items: list[tuple[int, Reason]], limit: int
) -> None:
    everything = captured(*items)
    fewer, _ = keep(everything, limit)
    more, _ = keep(everything, limit + 1)
    assert more[: len(fewer)] == fewer


@given(
    st.lists(st.integers(1, 99), unique=True).flatmap(
        lambda at: st.lists(REASONS, min_size=len(at), max_size=len(at)).map(
            lambda reasons: list(zip(sorted(at), reasons, strict=True))
        )
    ),
    st.integers(1, 5),
)
def test_keeping_as_one_goes_is_keeping_at_the_end(
    items: list[tuple[int, Reason]], limit: int
) -> None:
    """A lease drops at each capture, and loses nothing that would have stayed at its end."""
    everything = captured(*items)
    at_the_end, _ = keep(everything, limit)
    running: list[Captured] = []
    for item in everything:
        running, _ = keep([*running, item], limit)
    assert running == at_the_end
