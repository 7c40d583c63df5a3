"""Which rows read side by side: few products, little padding, little copied."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.kv.stacking import LOOSE, Stack, padded, stacks_of


@dataclass(frozen=True)
class Span:
    """State of so many tokens."""

    length: int
    number: int = field(default_factory=count().__next__)


Private = dict[int, list[Span]]


def read(stacks: tuple[Stack, ...], private: Private) -> int:
    """Check that stacks hold what their rows read, and count the spans that are left."""
    stacked: dict[int, int] = {}
    for stack in stacks:
        for row in stack.rows:
            if row is None:
                continue
            assert row.slot not in stacked
            spans = private[row.slot][: len(row.spans)]
            assert row.spans == tuple(span.number for span in spans)
            assert row.tokens == sum(span.length for span in spans) <= stack.positions
            stacked[row.slot] = len(row.spans)
    return sum(len(spans) - stacked.get(slot, 0) for slot, spans in private.items())


def rows(*lengths: int) -> Private:
    """One span a row."""
    return {slot: [Span(length)] for slot, length in enumerate(lengths)}


@pytest.mark.parametrize("count", range(LOOSE + 1))
def test_few_spans_are_not_copied(count: int) -> None:
    """They cost no more operations one by one."""
    assert stacks_of(rows(*[5000] * count)) == ()


def test_rows_of_like_length_are_together() -> None:
    """And those of other lengths apart: a short row is not padded to a long one."""
    stacks = stacks_of(rows(8000, 300, 7000, 310, 290))
    assert [stack.slots for stack in stacks] == [(0, 2), (1, 3, 4)]
    assert [stack.positions for stack in stacks] == [8192, 320]


def test_the_number_of_products_does_not_grow_with_rows() -> None:
    """Nor with how many spans a row has."""
    few = stacks_of({slot: [Span(4000)] for slot in range(4)})
    many = stacks_of({slot: [Span(200) for _ in range(20)] for slot in range(64)})
    assert len(few) == len(many) == 1


def test_nothing_changes_while_nobody_comes() -> None:
    """Rows are not written twice, wherever their slots are by now."""
    private = rows(900, 910, 920)
    stacks = stacks_of(private)
    moved = {slot + 5: spans for slot, spans in private.items()}
    (stack,) = again = stacks_of(moved, stacks)
    assert stack.written(stacks) == ()
    assert read(again, moved) == 0


def test_who_comes_takes_a_free_row() -> None:
    """Nobody else is copied for it."""
    private = rows(*[1000] * 8)
    before = stacks_of(private)
    private[8] = [Span(990)]
    (stack,) = after = stacks_of(private, before)
    assert read(after, private) == 0
    assert stack.written(before) == (8,)


def test_a_few_who_do_not_fit_are_read_one_by_one() -> None:
    """Until they are too many for it."""
    private = rows(*[1000] * 8)
    stacks = stacks_of(private)
    for slot in range(8, 8 + LOOSE):
        private[slot] = [Span(50)]
        stacks = stacks_of(private, stacks)
        assert len(stacks) == 1
    private[8 + LOOSE] = [Span(50)]
    after = stacks_of(private, stacks)
    assert read(after, private) == 0
    assert [stack.written(stacks) for stack in after] == [(), (0, 1, 2)]


def test_a_stack_that_most_have_left_is_made_anew() -> None:
    """What is free in it is memory, and is computed with."""
    private = rows(*[1000] * 16)
    before = stacks_of(private)
    (stack,) = stacks_of({slot: private[slot] for slot in range(4)}, before)
    assert len(stack.rows) == 4
    assert stack.kept == -1


def test_other_spans_in_the_same_row_are_written() -> None:
    """A span that was cut is two others."""
    private = rows(900, 910, 920)
    before = stacks_of(private)
    private[1] = [Span(500), Span(410)]
    after = stacks_of(private, before)
    assert read(after, private) <= LOOSE


lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=3)


@given(st.lists(st.dictionaries(st.integers(0, 12), lengths, max_size=10), max_size=8))
def test_any_crowd(crowds: list[dict[int, list[int]]]) -> None:
    """Whoever comes and goes: all is read once, by few products, with little padding."""
    stacks: tuple[Stack, ...] = ()
    private: Private = {}
    for crowd in crowds:
        private = {
            slot: private.get(slot, []) if slot % 2 else [Span(length) for length in wanted]
            for slot, wanted in crowd.items()
        }
        private = {slot: spans for slot, spans in private.items() if spans}
        stacks = stacks_of(private, stacks)
        assert read(stacks, private) <= LOOSE
        for stack in stacks:
            used = [row for row in stack.rows if row is not None]
            assert used
            assert len(stack.rows) <= 1.5 * len(used) + 1
            for row in used:
                assert stack.positions <= max(1.25 * row.tokens, row.tokens + 64)


@given(st.integers(1, 1 << 20))
def test_padding(tokens: int) -> None:
    """Lengths are few, and little longer."""
    assert tokens <= padded(tokens) <= max(tokens * 9 / 8, tokens + 64)
    assert padded(padded(tokens)) == padded(tokens)
