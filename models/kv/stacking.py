"""Which rows of a batch read what they alone lease side by side: a pure function of its lengths.

Read one by one, the spans of single rows cost operations for each row and span, which is what a
step on a GPU consists of. In a stack they are one product for all its rows, padded to one length.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

LOOSE = 2
"""Runs that are read one by one: as many operations as another stack takes."""

APART = 8
"""Where a kernel reads runs and stacks alike: half of those it has arguments for."""

_FULL_PART, _FULL_OF = 4, 5
"""A row fills at least this part of its stack's positions: the rest is computed for nothing."""

_PADDING_OF = 8
"""Of a new stack's tokens, one for so many is padding, at most."""

_USED_PART, _USED_OF = 2, 3
"""At least this part of a stack's rows is read, or it is given up."""

_HELD_PART, _HELD_OF = 4, 5
"""At least this part of its positions holds tokens of somebody, or it is given up."""

_STEP = 64
"""Positions of a stack are a multiple of this, as products want them."""


class Storage(Protocol):
    """Where spans lie.

    Attributes:
        number: its name, never given twice.
        length: how many tokens.
    """

    @property
    def number(self) -> int: ...  # noqa: D102  (described above)
    @property
    def length(self) -> int: ...  # noqa: D102

    def may_move(self, start: int, stop: int) -> bool:
        """Whether some tokens can have another place than those beside them."""
        ...


class Span(Protocol):
    """State of consecutive tokens that is read and no longer written.

    Attributes:
        length: how many tokens.
        start: where it begins in its storage.
        storage: where it lies.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def storage(self) -> Storage: ...  # noqa: D102


class Run(NamedTuple):
    """Consecutive tokens of one storage.

    Attributes:
        storage: by its number.
        start: the first of them there.
        stop: one after the last.
        moves: whether they can have their place in a stack.
        rest: tokens of the storage beside them, which have another place then.
    """

    storage: int
    start: int
    stop: int
    moves: bool = False
    rest: int = 0

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


class StackRow(NamedTuple):
    """One row of a stack.

    Attributes:
        slot: of the batch's row that reads it; None where none does.
        runs: what was written into it, oldest first.
        tokens: of these, from the first one on, that are read.
        held: those that have their only place there.
    """

    slot: int | None
    runs: tuple[Run, ...]
    tokens: int
    held: int = 0


class Stack(NamedTuple):
    """Rows side by side, as many as were there when it was made.

    Attributes:
        positions: that each row has room for.
        rows: as above.
        kept: which of the stacks before it was, or -1.
    """

    positions: int
    rows: tuple[StackRow, ...]
    kept: int = -1

    @property
    def slots(self) -> tuple[int, ...]:
        """Of the batch's rows that read it."""
        return tuple(row.slot for row in self.rows if row.slot is not None)

    @property
    def capacity(self) -> int:
        """Tokens that it has room for."""
        return self.positions * len(self.rows)

    @property
    def beside(self) -> int:
        """Tokens of the storages that what it holds was in, which have another place then."""
        return sum(run.rest for row in self.rows for run in row.runs)

    @property
    def made(self) -> bool:
        """Whether it is a new one."""
        return self.kept < 0


def runs_in(spans: Iterable[Span]) -> tuple[Run, ...]:
    """Find which of some consecutive spans are neighbours in one storage."""
    runs: list[Run] = []
    for span in spans:
        storage, stop = span.storage, span.start + span.length
        start = span.start
        if runs and (runs[-1].storage, runs[-1].stop) == (storage.number, start):
            start = runs.pop().start
        moves, rest = storage.may_move(start, stop), storage.length - (stop - start)
        runs.append(Run(storage.number, start, stop, moves, rest))
    return tuple(runs)


def moved(stacks: Iterable[Stack]) -> int:
    """How many tokens have their only place in new stacks: none that lie in one that stays."""
    stay = {run.storage for s in stacks if not s.made for row in s.rows for run in row.runs}
    runs = [run for stack in stacks if stack.made for row in stack.rows for run in row.runs]
    return sum(run.tokens for run in runs if run.moves and run.storage not in stay)


def stacks_of(
    private: Mapping[int, Sequence[Run]],
    before: Sequence[Stack] = (),
    *,
    most: int = 1 << 62,
    fewest: bool = False,
    apart: bool = False,
    may_copy: bool = True,
) -> tuple[Stack, ...]:
    """Say which rows read side by side.

    Stacks that are there stay as they are while at most `LOOSE` runs are in none of them, or
    `APART`, and they are of use. Else those who are in none get stacks of their own, or all are
    made anew.

    Args:
        private: for each slot what its row alone reads, oldest first.
        before: the stacks of the step before.
        most: tokens of a stack, padding included; a row that is longer is in none.
        fewest: what is read apart, and the stacks, are as few as can be.
        apart: a kernel reads what is in none, too, at no cost.
        may_copy: stacks may be made, and given up.

    Returns:
        The stacks. Runs that are in none are read one by one.
    """
    wanted = {slot: tuple(runs) for slot, runs in sorted(private.items()) if runs}
    there = _there(wanted, before)
    if not may_copy:
        return tuple(there)
    kept = [stack for stack in there if _useful(stack)]
    late, loose = runs_apart(wanted, kept), APART if apart else 0 if fewest else LOOSE
    if loose and sum(late.values()) <= loose:
        return tuple(kept)
    if sum(map(len, wanted.values())) <= loose:
        return ()
    held = {slot for stack in kept for slot in stack.slots}
    anew = _anew(wanted, most)
    more = _anew({slot: runs for slot, runs in wanted.items() if slot not in held}, most)
    behind = sum(late[slot] for slot in held)
    if behind <= loose and len(kept) + len(more) <= len(anew) + bool(loose):
        return (*kept, *more)
    same = {_content(stack): stack for stack in kept}
    return tuple(same.get(_content(stack), stack) for stack in anew)


def runs_apart(wanted: Mapping[int, tuple[Run, ...]], stacks: Iterable[Stack]) -> dict[int, int]:
    """Count the runs of each row that are in no stack."""
    left = {slot: len(runs) for slot, runs in wanted.items()}
    for row in (row for stack in stacks for row in stack.rows if row.slot is not None):
        tokens = row.tokens
        for run in wanted[row.slot] if row.slot is not None else ():
            tokens -= run.tokens
            left[row.slot or 0] -= tokens >= 0
    return left


def _there(wanted: Mapping[int, tuple[Run, ...]], before: Sequence[Stack]) -> list[Stack]:
    """The stacks that are there, with who reads them now."""
    by_first = {runs[0][:2]: slot for slot, runs in wanted.items()}
    there = []
    for number, stack in enumerate(before):
        rows = []
        for row in stack.rows:
            slot = by_first.get(row.runs[0][:2])
            tokens = 0 if slot is None else _common(row.runs, wanted[slot])
            rows.append(row._replace(slot=slot if tokens else None, tokens=tokens))
        there.append(Stack(stack.positions, tuple(rows), number))
    return there


def _common(held: Sequence[Run], wanted: Sequence[Run]) -> int:
    """How many tokens of what a row holds are the first ones that somebody reads."""
    tokens = 0
    for one, other in zip(held, wanted, strict=False):
        if one[:2] != other[:2] or one.stop < other.stop:
            break
        tokens += other.tokens
        if one.stop > other.stop:
            break
    return tokens


def _useful(stack: Stack) -> bool:
    """Whether enough of its rows are read, and enough of it holds tokens of somebody."""
    held = sum(max(row.tokens, row.held) for row in stack.rows)
    few = _STEP * len(stack.rows)  # to which positions are rounded
    return (
        len(stack.slots) * _USED_OF >= len(stack.rows) * _USED_PART
        and (held + few) * _HELD_OF >= stack.capacity * _HELD_PART
    )


def _anew(wanted: Mapping[int, tuple[Run, ...]], most: int) -> tuple[Stack, ...]:
    """Put rows of similar length together, the longest first."""
    rows = [StackRow(slot, runs, sum(run.tokens for run in runs)) for slot, runs in wanted.items()]
    groups: list[list[StackRow]] = []
    for row in sorted(rows, key=lambda row: -row.tokens):
        if padded(row.tokens) > most:
            continue
        if groups and _fits(row, groups[-1], most):
            groups[-1].append(row)
        else:
            groups.append([row])
    return tuple(
        Stack(padded(group[0].tokens), tuple(sorted(group, key=lambda row: row.slot or 0)))
        for group in groups
    )


def _fits(row: StackRow, group: Sequence[StackRow], most: int) -> bool:
    positions, rows = padded(group[0].tokens), len(group) + 1
    tokens = row.tokens + sum(other.tokens for other in group)
    full = row.tokens * _FULL_OF >= positions * _FULL_PART or row.tokens >= positions - _STEP
    padding = group[0].tokens * rows - tokens
    little = padding <= max(tokens // _PADDING_OF, _STEP * rows // 2)
    return full and little and positions * rows <= most


def _content(stack: Stack) -> frozenset[tuple[int | None, int, tuple[Run, ...]]]:
    return frozenset(
        (row.slot, row.tokens, tuple(Run(*run[:3]) for run in row.runs)) for row in stack.rows
    )


def padded(tokens: int) -> int:
    """Round up to what products want."""
    return -(-tokens // _STEP) * _STEP
