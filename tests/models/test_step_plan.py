"""Plans: what they say of a step before it runs, and what the allocator says of it afterwards."""

import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models import planner
from umbel.models.batch_planner import ONE_CLASS, SHARED, prefix_groups
from umbel.models.memory_profile import PlannedChunk
from umbel.models.planner import Rules
from umbel.models.step_plan import (
    EXACT_ROWS,
    Arrange,
    Call,
    ClassShape,
    Enter,
    Kind,
    Leave,
    MakeContiguous,
    PrefillPlan,
    PrefixGroup,
    Seat,
    Share,
    StepPlan,
)


@dataclass(eq=False)
class Span:
    """State of so many tokens."""

    length: int


@dataclass
class State:
    """A sequence, in figures."""

    number: int
    offset: int
    leased: list[Span] = field(default_factory=list)
    slot: int | None = None
    is_contiguous: bool = False
    suffix_is_full: bool = False
    windows_change: bool = False

    @property
    def suffix_length(self) -> int:
        return self.offset - sum(span.length for span in self.leased)


@dataclass
class Buffer:
    """Rows' tokens in a window, in figures."""

    limit: int = 512
    positions: int = 0
    lengths: list[int] = field(default_factory=list)


@dataclass
class OwnTokens:
    """Rows' own tokens, in figures."""

    seats: dict[int, Seat] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def length(self, slot: int) -> int:
        """Own tokens of a row."""
        return self.lengths[slot]


@dataclass
class Batch:
    """A batch, in figures."""

    sequences: dict[int, State] = field(default_factory=dict)
    rows: int = 0
    own: OwnTokens | None = field(default_factory=OwnTokens)
    windows: dict[int, Buffer] = field(default_factory=dict)
    groups: tuple[PrefixGroup, ...] | None = None


LEAST = Rules().least_class


def plan_step(decode: Any, prefill: Any, batch: Any, rules: Rules, **more: Any) -> StepPlan:
    """Plan for sequences and a batch in figures."""
    return planner.plan_step(decode, prefill, batch, rules, **more)


def planned(
    decode: list[State], batch: Batch | None = None, rules: Rules | None = None, *, coming: int = 0
) -> Call:
    """Plan one call."""
    plan = plan_step(decode, None, batch or Batch(), rules or Rules(), coming=coming)
    assert plan.decode is not None
    (call,) = plan.decode.calls
    return call


def in_batch(*states: State, rows: int = 0, positions: int = 64) -> Batch:
    """A batch in which these have slots, and seats in the first length class."""
    batch = Batch(rows=rows or len(states), groups=())
    assert batch.own is not None
    batch.own.shapes[LEAST] = batch.rows, positions
    for slot, state in enumerate(states):
        state.slot = slot
        batch.sequences[slot] = state
        batch.own.seats[slot] = Seat(LEAST, slot)
        batch.own.lengths[slot] = state.suffix_length
    return batch


def arranged(
    rows: int, *shapes: ClassShape, seats: dict[int, Seat] | None = None, **more: Any
) -> Arrange:
    """An arrangement without windows, in which no row moves unless `more` says so."""
    said: dict[str, Any] = {"renewed": False, "relocated": (), "moved": 0} | more
    return Arrange(rows, (), shapes=shapes, seats=seats or {}, **said)


def test_planning_needs_no_mlx() -> None:
    """Its module, and all that it imports, do without."""
    code = "import sys, umbel.models.planner; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nobody_runs() -> None:
    """A step of nothing but a chunk of a prompt has no call of rows that decode."""
    plan = plan_step([], (State(7, 30), 12), Batch(), Rules(), logits=1)
    assert plan.decode is None
    assert plan.prefill == PrefillPlan(7, PlannedChunk(12, 30, 30), 1)


def test_those_who_come_get_rows() -> None:
    """Each the lowest free one; what it reads alone is copied, and what is shared is not."""
    shared, short, long = Span(SHARED + 1), Span(20), Span(3000)
    states = [
        State(1, SHARED + 1 + 5, [shared]),
        State(2, SHARED + 1 + 20 + 3, [shared, short]),
        State(3, SHARED + 1 + 3000, [shared, long]),
    ]
    call = planned(states)
    first, second = ClassShape(LEAST, 2, 64, ()), ClassShape(4 * LEAST, 1, 3072, ())
    assert call.moves == (
        arranged(3, first, second, renewed=True),
        Enter(1, 0, SHARED + 1 + 5, Seat(LEAST, 0), SHARED + 1, 5),
        Enter(2, 1, SHARED + 1 + 20 + 3, Seat(LEAST, 1), SHARED + 1, 23),
        Enter(3, 2, SHARED + 1 + 3000, Seat(4 * LEAST, 0), SHARED + 1, 3000),
    )
    assert call.kind is Kind.BATCH
    assert (call.rows, call.slots, call.context) == (3, (0, 1, 2), 3072)
    assert call.groups == (PrefixGroup((0, 1, 2), 0, 1),)
    assert call.regroups


def test_a_row_reads_with_others_what_it_had_copied() -> None:
    """It forgets its copy when another reads the same, and makes one when that has gone."""
    branch = Span(300)
    first, other, late = State(1, 304, [branch]), State(2, 9), State(3, 310, [branch])
    batch = in_batch(first, other, positions=384)
    assert batch.own is not None
    batch.own.lengths[0] = 304
    call = planned([first, other, late], batch)
    assert call.moves == (
        Share(1, 0, 300, 4),
        arranged(3, ClassShape(LEAST, 3, 64, (0, 1)), seats=seats(2)),
        Enter(3, 2, 310, Seat(LEAST, 2), 300, 10),
    )
    assert call.groups == (PrefixGroup((0, 2), 0, 1),)
    batch = in_batch(first, other)
    call = planned([first, other], replace(batch, groups=None))
    assert call.moves == (
        arranged(2, ClassShape(LEAST, 2, 384, (0, 1)), seats=seats(2)),
        Share(1, 0, 0, 304),
    )
    assert call.groups == ()


def seats(rows: int) -> dict[int, Seat]:
    """Seats of so many rows in the first length class."""
    return {slot: Seat(LEAST, slot) for slot in range(rows)}


def test_a_row_that_becomes_short_moves_down() -> None:
    """Where three quarters of its seat would be empty; and not before."""
    branch = Span(5000)
    state, other, late = State(1, 5001, [branch]), State(2, 9), State(3, 5002, [branch])
    batch = in_batch(state, other)
    assert batch.own is not None
    batch.own.lengths[0], batch.own.seats[0] = 5001, Seat(8 * LEAST, 0)
    batch.own.seats[1], batch.own.shapes = Seat(LEAST, 0), {LEAST: (1, 64), 8 * LEAST: (1, 6144)}
    call = planned([state, other, late], batch)
    assert call.moves[:2] == (
        Share(1, 0, 5000, 1),
        arranged(
            3,
            ClassShape(LEAST, 3, 64, (1,)),
            seats={0: Seat(LEAST, 1), 1: Seat(LEAST, 0)},
            moved=1,
        ),
    )


def test_a_full_row_moves_up() -> None:
    """It takes a seat in the next class, and no other row is copied."""
    states = [State(1, LEAST), State(2, 9)]
    batch = in_batch(*states, positions=LEAST)
    call = planned(states, batch)
    assert call.moves == (
        arranged(
            2,
            ClassShape(LEAST, 2, LEAST, None),
            ClassShape(2 * LEAST, 1, 3 * LEAST // 2, ()),
            seats={0: Seat(2 * LEAST, 0), 1: Seat(LEAST, 1)},
            moved=LEAST,
        ),
    )


def in_classes(states: list[State], rows: dict[int, int]) -> Batch:
    """A batch in which these have slots, and seats in as many rows of each length class."""
    batch = in_batch(*states)
    assert batch.own is not None
    batch.own.shapes = {limit: (count, 3 * limit // 4) for limit, count in rows.items()}
    seats = {limit: iter(range(count)) for limit, count in rows.items()}
    for slot, state in enumerate(states):
        limit = LEAST if state.offset < LEAST else 4 * LEAST
        batch.own.seats[slot] = Seat(limit, next(seats[limit]))
    return batch


@pytest.mark.parametrize("left", [8, 3])
def test_no_class_is_copied_where_memory_is_short(left: int) -> None:
    """Neither to have as many rows as the batch, nor to have fewer."""
    states = [State(n, 2500) for n in range(8)] + [State(8, 10)]
    batch = in_classes(states, {LEAST: 1, 4 * LEAST: 8})
    for slot in range(left, 9):
        del batch.sequences[slot]
    sparing = plan_step(states[:left], None, batch, Rules(), may_copy=False).decode
    assert sparing is not None
    assert sparing.calls[0].moves == ()


def test_a_class_that_its_last_row_leaves_is_made_anew() -> None:
    """Also where another row takes a seat in it in the same step."""
    states = [State(0, 10), State(1, 10), State(2, 2500)]
    batch = in_classes(states, {LEAST: 2, 4 * LEAST: 1})
    call = planned([*states[:2], State(3, 2600)], batch)
    (move,) = [move for move in call.moves if isinstance(move, Arrange)]
    assert move.shapes[1] == ClassShape(4 * LEAST, 1, 3 * LEAST, ())


def test_a_model_that_puts_all_keys_together_has_one_class() -> None:
    """However long its rows are; and each layer puts together what is shared and what is not."""
    shared = Span(100)
    states = [State(1, 5000, [shared]), State(2, 109, [shared])]
    call = planned(states, rules=Rules(gathers=True))
    assert call.moves[0] == arranged(2, ClassShape(ONE_CLASS, 2, 6144, ()), renewed=True)
    assert call.gathered == 100 + 6144


def test_a_steady_step_moves_nothing() -> None:
    """The same rows with a token more."""
    states = [State(1, 20), State(2, 9)]
    call = planned(states, in_batch(*states))
    assert (call.moves, call.regroups, call.groups) == ((), False, ())
    assert (call.slots, call.rows) == ((0, 1), 2)


@pytest.mark.parametrize(("tokens", "positions"), [(63, 64), (64, 96), (96, 128), (511, 512)])
def test_rows_grow_before_they_are_full(tokens: int, positions: int) -> None:
    """There is always room for a token more."""
    states = [State(1, tokens), State(2, 9)]
    before = max(64, 2 * tokens // 3 if tokens > 96 else tokens)
    call = planned(states, in_batch(*states, positions=before))
    grown = arranged(2, ClassShape(LEAST, 2, positions, (0, 1)), seats=seats(2))
    assert call.moves == (() if positions == before else (grown,))


def test_those_who_do_not_run_leave() -> None:
    """A batch whose sequences all leave is renewed, though it has the same shape."""
    states = [State(n, 10) for n in range(4)]
    call = planned(states[2:], in_batch(*states[:2]))
    assert call.moves == (
        Leave(0, 0, 10, 10),
        Leave(1, 1, 10, 10),
        arranged(2, ClassShape(LEAST, 2, 64, ()), renewed=True),
        Enter(2, 0, 10, Seat(LEAST, 0), 0, 10),
        Enter(3, 1, 10, Seat(LEAST, 1), 0, 10),
    )


def test_a_batch_shrinks_when_fewer_rows_are_enough() -> None:
    """Rows beyond move into free ones."""
    states = [State(n, 10) for n in range(4)]
    batch = in_batch(*states)
    del batch.sequences[1], batch.sequences[2]
    left = [states[0], states[3]]
    call = planned(left, batch)
    shape = ClassShape(LEAST, 2, 64, (0, 1))
    assert call.moves == (arranged(2, shape, relocated=((3, 1),), seats=seats(2)),)
    assert call.slots == (0, 1)


def test_a_batch_has_the_rows_that_are_computed_the_fastest() -> None:
    """Nine sequences are 16 rows where 16 take less time than 12."""
    states = [State(n, 10) for n in range(9)]
    assert planned(states, in_batch(*states[:2]), Rules()).rows == 12
    assert planned(states, in_batch(*states[:2]), Rules(row_multiple=16)).rows == 16


def test_a_batch_that_grows_has_rows_for_those_who_come() -> None:
    """It grows once; one that has a free row for who is there waits until that is taken."""
    states = [State(n, 10) for n in range(5)]
    assert planned(states[:2], coming=3).rows == 6
    rules = Rules(row_multiple=16)
    assert planned(states[:2], rules=rules, coming=8).rows == 16
    assert planned(states[:2], rules=rules, coming=1).rows == 3
    assert planned(states[:4], in_batch(*states[:3], rows=4), coming=11).rows == 4
    assert planned(states, in_batch(*states[:4]), coming=11).rows == 16
    left = [State(n, 10) for n in range(7, 10)]
    assert planned(left, in_batch(*[State(n, 10) for n in range(4)]), coming=5).rows == 8
    assert planned(left, in_batch(*[State(n, 10) for n in range(16)]), coming=5).rows == 8


def test_a_batch_does_not_shrink_while_others_come() -> None:
    """Nor does the last one leave it; who has no row yet gets none by itself."""
    states = [State(n, 10) for n in range(4)]
    batch = in_batch(*states)
    for slot in (1, 2, 3):
        del batch.sequences[slot]
    for _ in range(2):
        call = planned(states[:1], batch, coming=3)
        assert (call.kind, call.moves, call.rows) == (Kind.BATCH, (), 4)
    assert planned(states[:1], batch).kind is Kind.SINGLE
    assert planned([State(9, 10)], batch, coming=3).kind is Kind.SINGLE
    call = planned(states[:1], in_batch(*states[:1], rows=8), coming=3)
    assert call.rows == 4, "eight are more than will be needed"


@pytest.mark.parametrize("left", [1, 2])
def test_a_batch_does_not_shrink_where_memory_is_short(left: int) -> None:
    """Fewer rows are a copy of those that stay; without it these go on as they lie."""
    states = [State(n, 10) for n in range(4)]
    batch = in_batch(*states)
    for slot in range(left, 4):
        del batch.sequences[slot]
    sparing = plan_step(states[:left], None, batch, Rules(), may_copy=False).decode
    assert sparing is not None
    (call,) = sparing.calls
    assert (call.kind, call.moves, call.rows) == (Kind.BATCH, (), 4)


def test_windows_have_room_for_what_they_keep() -> None:
    """A new chunk holds the tokens since its start; a ring no more than its window."""
    batch = Batch(windows={100: Buffer(100), 40: Buffer(40)})
    rules = Rules(chunked=frozenset({40}))
    call = planned([State(1, 205), State(2, 81)], batch, rules)
    assert windows(call) == {100: 100, 40: 40}
    assert windows(planned([State(1, 9), State(2, 3)], batch, rules)) == {100: 64, 40: 40}


def windows(call: Call) -> dict[int, int]:
    """Positions of each window that a call arranges."""
    (move,) = [move for move in call.moves if isinstance(move, Arrange)]
    return dict(move.windows)


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_single_sequences_keys_are_put_in_one_piece(*, contiguous: bool) -> None:
    """Where the model asks for them so, and only where memory may be taken for it."""
    state, rules = State(1, 90, [Span(80)]), Rules(contiguous=contiguous)
    assert planned([state], rules=rules).moves == ((MakeContiguous(1, 90),) if contiguous else ())
    sparing = plan_step([state], None, Batch(), rules, may_copy=False).decode
    assert sparing is not None
    assert sparing.calls[0].moves == ()


def test_a_single_sequence_stays_in_the_batch_where_memory_is_short() -> None:
    """It leaves for caches of its own, which takes a copy; without one it goes on as a row."""
    state = State(1, 20)
    batch = in_batch(state)
    assert planned([state], batch).moves == (Leave(1, 0, 20, 20),)
    sparing = plan_step([state], None, batch, Rules(), may_copy=False).decode
    assert sparing is not None
    assert (sparing.calls[0].kind, sparing.calls[0].moves) == (Kind.BATCH, ())


def test_exact_calls_have_all_their_rows() -> None:
    """Nine sequences are two calls; those whose keys are in one piece already stay so."""
    states = [State(n, 10, is_contiguous=n != 3) for n in range(EXACT_ROWS + 1)]
    plan = plan_step(states, None, Batch(), Rules(exact=True)).decode
    assert plan is not None
    assert [call.rows for call in plan.calls] == [EXACT_ROWS] * 2
    assert [len(call.sequences) for call in plan.calls] == [EXACT_ROWS, 1]
    assert plan.calls[0].moves == (MakeContiguous(3, 10),)


@given(st.data())
def test_groups_read_each_span_of_each_row_once(data: st.DataObject) -> None:
    """All rows that share a span are in one group; rows read their prefixes in order."""
    path, prefixes = [[Span(1)]], dict[int, list[Span]]()
    for slot in data.draw(st.sets(st.integers(0, 9), max_size=8)):
        begin = data.draw(st.sampled_from(path))
        more = [Span(1) for _ in range(data.draw(st.integers(0, 3)))]
        path.append([*begin, *more])
        prefixes[slot] = path[-1][: data.draw(st.integers(0, len(path[-1])))]
    groups = prefix_groups(prefixes)
    for slot, spans in prefixes.items():
        read = [group for group in groups if slot in group.slots]
        assert [n for g in read for n in range(g.start, g.stop)] == list(range(len(spans)))
    for slots, start, stop in groups:
        runs = {tuple(map(id, prefixes[slot][start:stop])) for slot in slots}
        assert len(runs) == 1
        readers = {s for s, spans in prefixes.items() if prefixes[slots[0]][start] in spans}
        assert readers == set(slots)
