"""Which rows read side by side: few products, little padding, little copied."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.kv.restacking import RestackTimer, restacked_after
from umbel.models.kv.stacking import (
    APART,
    LOOSE,
    Run,
    Stack,
    moved,
    padded,
    runs_in,
    stacks_of,
)

Private = dict[int, list[Run]]

_numbers = count()


def run(tokens: int) -> Run:
    """A storage of so many tokens, all of it."""
    return Run(next(_numbers), 0, tokens, moves=True)


def rows(*lengths: int) -> Private:
    """One storage a row."""
    return {slot: [run(length)] for slot, length in enumerate(lengths)}


def after(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The same stacks in the next step: what moved into them lies there."""
    return tuple(
        stack._replace(
            rows=tuple(
                row._replace(held=sum(run.tokens for run in row.runs if run.moves))
                for row in stack.rows
            )
        )
        for stack in stacks
    )


def read(stacks: tuple[Stack, ...], private: Private) -> int:
    """Check that stacks hold what their rows read, and count the runs that are left."""
    stacked: dict[int, int] = {}
    for stack in stacks:
        for row in stack.rows:
            if row.slot is None:
                continue
            assert row.slot not in stacked
            assert 0 < row.tokens <= stack.positions
            left, tokens = 0, row.tokens
            for held, wanted in zip(row.runs, private[row.slot], strict=False):
                if not tokens:
                    break
                assert held[:2] == wanted[:2]
                assert held.stop >= wanted.stop
                tokens -= wanted.tokens
                left += 1
            assert not tokens
            stacked[row.slot] = left
    return sum(len(runs) - stacked.get(slot, 0) for slot, runs in private.items())


def products(stacks: tuple[Stack, ...], private: Private) -> int:
    """How many a layer has of what single rows read."""
    return read(stacks, private) + sum(bool(stack.slots) for stack in stacks)


@dataclass(frozen=True)
class Lying:
    """Where spans lie."""

    length: int
    number: int = field(default_factory=_numbers.__next__)
    movable: bool = True

    def may_move(self, start: int, stop: int) -> bool:
        """Whether some tokens can have another place."""
        return self.movable and 0 <= start < stop <= self.length


@dataclass(frozen=True)
class Span:
    """Some tokens of a storage."""

    storage: Lying
    start: int
    length: int


def test_neighbours_are_one_run() -> None:
    """What nobody reads meanwhile moves, without what is beside it."""
    whole, part, lent = Lying(10), Lying(8), Lying(5, movable=False)
    spans = [Span(whole, 0, 4), Span(whole, 4, 6), Span(part, 0, 7), Span(lent, 0, 5)]
    assert runs_in(spans) == (
        Run(whole.number, 0, 10, moves=True),
        Run(part.number, 0, 7, moves=True, rest=1),
        Run(lent.number, 0, 5, moves=False),
    )
    assert runs_in(spans[1:2]) == (Run(whole.number, 4, 10, moves=True, rest=4),)


def test_what_a_kernel_reads_apart_needs_no_stack() -> None:
    """As long as it has arguments for all; then there is one of all who are as long."""
    private = rows(*[5000] * APART)
    assert len(stacks_of(private)) == 1
    assert stacks_of(private, apart=True) == ()
    assert len(stacks_of(rows(*[5000] * (APART + 1)), apart=True)) == 1
    (stack,) = before = after(stacks_of(rows(*[5000] * (APART + 1)), apart=True))
    private = rows(*[5000] * (2 * APART + 1))
    assert [s.positions for s in stacks_of(private, before, apart=True)] == [stack.positions]


@pytest.mark.parametrize("count", range(LOOSE + 1))
def test_few_runs_are_not_copied(count: int) -> None:
    """They cost no more operations one by one."""
    assert stacks_of(rows(*[5000] * count)) == ()


def test_rows_of_like_length_are_together() -> None:
    """And those of other lengths apart: a short row is not padded to a long one."""
    stacks = stacks_of(rows(8000, 300, 7000, 310, 290))
    assert [stack.slots for stack in stacks] == [(0, 2), (1, 3, 4)]
    assert [stack.positions for stack in stacks] == [8000, 320]
    assert [len(stack.rows) for stack in stacks] == [2, 3]


def test_the_number_of_products_does_not_grow_with_rows() -> None:
    """Nor with how many runs a row has."""
    few = stacks_of({slot: [run(4000)] for slot in range(4)})
    many = stacks_of({slot: [run(200) for _ in range(20)] for slot in range(64)})
    assert len(few) == len(many) == 1


def test_nothing_changes_while_nobody_comes() -> None:
    """Rows are not written twice, wherever their slots are by now."""
    private = rows(900, 910, 920)
    stacks = stacks_of(private)
    shifted = {slot + 5: runs for slot, runs in private.items()}
    (stack,) = again = stacks_of(shifted, stacks)
    assert not stack.made
    assert read(again, shifted) == 0


def test_who_comes_back_finds_its_row() -> None:
    """Who left does not lie elsewhere meanwhile; what it has besides by then is read apart."""
    private = rows(*[1000] * 8)
    stacks = after(stacks_of(private))
    away = private.pop(3)
    (stack,) = stacks = after(stacks_of(private, stacks))
    assert not stack.made
    assert len(stack.slots) == 7
    private[11] = [*away, run(90)]
    (stack,) = stacks = stacks_of(private, stacks)
    assert not stack.made
    assert len(stack.slots) == 8
    assert read(stacks, private) == 1


def test_what_is_cut_or_joined_meanwhile() -> None:
    """A row is read up to where it holds what its sequence reads by now."""
    first, second, third = run(700), run(200), run(100)
    private = rows(1000, 990) | {2: [first, second, third]}
    stacks = after(stacks_of(private))
    for there, tokens in (
        ([first, run(300)], 700),
        ([first, second._replace(stop=150, moves=False), run(5)], 850),
        ([first._replace(stop=800), third], 0),
        ([run(1000)], 0),
    ):
        (stack,) = after_all = stacks_of(private | {2: there}, stacks)
        assert not stack.made
        assert [row.tokens for row in stack.rows] == [1000, 990, tokens]
        assert read(after_all, private | {2: there}) <= LOOSE


def test_a_few_who_come_are_read_one_by_one() -> None:
    """Until they are too many for it; nobody else is copied then."""
    private = rows(*[1000] * 8)
    stacks = after(stacks_of(private))
    for slot in range(8, 8 + LOOSE):
        private[slot] = [run(50)]
        stacks = after(stacks_of(private, stacks))
        assert len(stacks) == 1
    private[8 + LOOSE] = [run(50)]
    stacks = stacks_of(private, stacks)
    assert read(stacks, private) == 0
    assert [stack.made for stack in stacks] == [False, True]


def test_stacks_stay_few() -> None:
    """What came apart is put together before there are many more than there need be."""
    private: Private = {}
    stacks: tuple[Stack, ...] = ()
    for slot in range(60):
        private[slot] = [run(1000)]
        stacks = after(stacks_of(private, stacks))
        assert len(stacks) <= 2
    assert read(stacks, private) <= LOOSE


def test_the_longer_a_copy_takes_the_longer_it_waits() -> None:
    """Who came late is read apart for as long as to put all together takes, and no longer."""
    waits = []
    for length in (10, 1000, 100_000):
        private = rows(*[length] * 8)
        before = after(stacks_of(private))
        private[8] = [run(length)]
        stacks = after(stacks_of(private, before))
        assert read(stacks, private) == 1
        waits.append(restacked_after(private, stacks, most=1 << 62))
        (stack,) = stacks_of(private, stacks, fewest=True)
        assert len(stack.slots) == len(private)
        assert restacked_after(private, (stack,), most=1 << 62) == 0
    assert waits == sorted(waits)
    assert waits[0] == 1
    assert waits[2] > 10 * waits[1] / 2


def test_nothing_is_put_together_for_no_gain() -> None:
    """Rows of other lengths, or longer than a stack may be, are read apart for good."""
    private = rows(100, 1000, 10_000)
    stacks = after(stacks_of(private))
    assert restacked_after(private, stacks, most=1 << 62) == 0
    alone = rows(1000, 1000)
    assert restacked_after(alone, stacks_of(alone, most=900), most=900) == 0


def test_a_stack_that_most_have_left_is_given_up() -> None:
    """What nobody reads in it is computed with."""
    private = rows(*[1000] * 16)
    before = after(stacks_of(private))
    (stack,) = stacks_of({slot: private[slot] for slot in range(4)}, before)
    assert len(stack.rows) == 4
    assert stack.made


def test_a_stack_that_holds_little_is_given_up() -> None:
    """What was joined elsewhere meanwhile leaves a gap in it, which is memory."""
    private = rows(*[1000] * 6)
    before = after(stacks_of(private))
    rows_left = [row._replace(held=0) if at > 3 else row for at, row in enumerate(before[0].rows)]
    holed = (before[0]._replace(rows=tuple(rows_left)),)
    (stack,) = stacks_of({slot: private[slot] for slot in range(4)}, holed)
    assert stack.made


def test_no_stack_is_longer_than_it_may_be() -> None:
    """It is given up at any time, for which there must be room."""
    stacks = stacks_of(rows(*[1000] * 8, 5000), most=3100)
    assert [len(stack.rows) for stack in stacks] == [3, 3, 2]
    assert 8 not in {slot for stack in stacks for slot in stack.slots}


def test_where_memory_is_short_all_stays() -> None:
    """Nothing is made, and nothing is given up: both are copies."""
    private = rows(*[1000] * 8)
    assert stacks_of(private, may_copy=False) == ()
    before = after(stacks_of(private))
    (stack,) = stacks_of({2: private[2], 9: [run(10)] * 9}, before, may_copy=False)
    assert not stack.made
    assert stack.slots == (2,)


def test_what_lies_in_a_stack_that_stays_does_not_move() -> None:
    """Its bytes there would not be free."""
    private = rows(*[1000] * 6) | {6: [run(1000), run(500)], 7: [run(1500)], 8: [run(1500)]}
    stacks = after(stacks_of(private))
    assert moved(stacks_of(private)) == sum(r.tokens for runs in private.values() for r in runs)
    # The first of the seventh row's is shared by now, and the rest is read by it alone.
    private[6] = private[6][1:]
    private |= {slot: [run(500)] for slot in (9, 10)}
    stacks = stacks_of(private, stacks)
    assert [stack.made for stack in stacks] == [False, False, True]
    assert moved(stacks) == 1000


lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=3)


@given(st.lists(st.dictionaries(st.integers(0, 12), lengths, max_size=10), max_size=8))
def test_any_crowd(crowds: list[dict[int, list[int]]]) -> None:
    """Whoever comes and goes: all is read once, by few products, with little padding."""
    stacks: tuple[Stack, ...] = ()
    private: Private = {}
    for crowd in crowds:
        private = {
            slot: private.get(slot, []) if slot % 2 else [run(length) for length in wanted]
            for slot, wanted in crowd.items()
        }
        private = {slot: runs for slot, runs in private.items() if runs}
        stacks = after(stacks_of(private, stacks))
        assert read(stacks, private) <= LOOSE
        due = restacked_after(private, stacks, most=1 << 62)
        best = after(stacks_of(private, stacks, fewest=True))
        assert bool(due) == (products(best, private) < products(stacks, private))
        assert restacked_after(private, best, most=1 << 62) == 0
        for stack in stacks:
            used = [row for row in stack.rows if row.slot is not None]
            assert used
            assert len(stack.rows) <= 1.5 * len(used)
            held = sum(max(row.tokens, row.held) for row in stack.rows)
            assert stack.capacity <= 1.25 * (held + 64 * len(stack.rows))
            if stack.made:
                assert stack.capacity <= held * 9 / 8 + 128 * len(stack.rows)
                for row in used:
                    assert stack.positions <= max(1.25 * row.tokens, row.tokens + 64)


@given(st.integers(1, 1 << 20))
def test_padding(tokens: int) -> None:
    """As little as products want."""
    assert tokens <= padded(tokens) < tokens + 64
    assert padded(padded(tokens)) == padded(tokens)


def test_stacks_are_due_after_as_many_steps_as_planned() -> None:
    """Who comes or goes begins no time anew, and where nothing is gained nothing is due."""
    timer = RestackTimer()
    timer.step(3)
    for planned in (5, None):
        timer.step(planned)
        assert not timer.is_due
    for _ in range(2):
        timer.step(None)
    assert timer.is_due
    timer.step(0)
    for _ in range(9):
        timer.step(None)
        assert not timer.is_due


def test_who_found_no_memory_for_stacks_waits() -> None:
    """What was due and not made is due again later; while that is waited for, others may come."""
    timer, steps = RestackTimer(), 0
    timer.step(1)
    timer.step(None)
    assert timer.is_due
    timer.step(None)
    while not timer.is_due:
        timer.step(None)
        steps += 1
    timer.pause()
    for _ in range(steps):
        assert timer.is_paused
        timer.step(None)
    assert not timer.is_paused
