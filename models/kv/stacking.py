"""Which rows of a batch read what they alone lease side by side: a pure function of its lengths.

Read one by one, the spans of single rows cost operations for each row and span, which is what a
step on a GPU consists of. In a stack they are one product for all its rows, padded to one length.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

LOOSE = 2
"""Spans that are read one by one: as many operations as another stack takes."""

_FULL_PART, _FULL_OF = 4, 5
"""A row fills at least this part of its stack's positions, so that padding stays small."""

_USED_PART, _USED_OF = 3, 5
"""At least this part of a stack's rows is in use, or it is made anew."""

_STEPS_AN_OCTAVE = 8
_LEAST_STEP = 64
_SPARE = 8
"""A stack has a free row for each so many: who comes next is written there."""


class Span(Protocol):
    """State of consecutive tokens that is read and no longer written.

    Attributes:
        number: its name, never given twice.
        length: how many tokens.
    """

    @property
    def number(self) -> int: ...  # noqa: D102  (described above)
    @property
    def length(self) -> int: ...  # noqa: D102


class StackRow(NamedTuple):
    """What one row of a stack holds.

    Attributes:
        slot: of the batch's row that reads it.
        spans: by their numbers, oldest first.
        tokens: of all of them.
    """

    slot: int
    spans: tuple[int, ...]
    tokens: int


class Stack(NamedTuple):
    """Rows side by side.

    Attributes:
        positions: that each row has room for.
        rows: what they hold; None where one is free.
        kept: which of the stacks before it was, or -1; rows that hold what they held there are
            not written again.
    """

    positions: int
    rows: tuple[StackRow | None, ...]
    kept: int = -1

    @property
    def slots(self) -> tuple[int, ...]:
        """Of the batch's rows that read it."""
        return tuple(row.slot for row in self.rows if row is not None)

    def written(self, before: Sequence["Stack"]) -> tuple[int, ...]:
        """The rows that are to be written, if these stacks were before."""
        had = before[self.kept].rows if self.kept >= 0 else ()
        return tuple(
            place
            for place, row in enumerate(self.rows)
            if row is not None
            and (place >= len(had) or (old := had[place]) is None or old.spans != row.spans)
        )


def stacks_of(
    private: Mapping[int, Sequence[Span]], before: Sequence[Stack] = ()
) -> tuple[Stack, ...]:
    """Say which rows read side by side.

    Stacks that are there stay as they are while at most `LOOSE` spans are in none of them and
    their rows are in use; what is free in them is given to those who come. Otherwise all are made
    anew.

    Args:
        private: for each slot the spans that its row alone reads, oldest first.
        before: the stacks of the step before.

    Returns:
        The stacks. Spans that are in none are read one by one.
    """
    wanted = {slot: _row(slot, spans) for slot, spans in sorted(private.items()) if spans}
    kept = _kept(wanted, before)
    held = {row.slot: row for stack in kept for row in stack.rows if row is not None}
    come = [row for slot, row in wanted.items() if slot not in held]
    kept, loose = _placed(kept, come)
    late = sum(len(wanted[slot].spans) - len(row.spans) for slot, row in held.items())
    if late + sum(len(row.spans) for row in loose) <= LOOSE and all(map(_dense, kept)):
        return tuple(kept)
    if sum(len(row.spans) for row in wanted.values()) <= LOOSE:
        return ()
    return _anew(wanted.values(), kept)


def _row(slot: int, spans: Sequence[Span]) -> StackRow:
    return StackRow(slot, tuple(span.number for span in spans), sum(span.length for span in spans))


def _kept(wanted: Mapping[int, StackRow], before: Sequence[Stack]) -> list[Stack]:
    """What is still read of the stacks that are there, by whichever slots now."""
    by_first = {row.spans[0]: row for row in wanted.values()}
    kept = []
    for number, stack in enumerate(before):
        rows: list[StackRow | None] = []
        for row in stack.rows:
            now = None if row is None else by_first.get(row.spans[0])
            same = row and now and now.spans[: len(row.spans)] == row.spans
            rows.append(row._replace(slot=now.slot) if row and now and same else None)
        if any(rows):
            kept.append(Stack(stack.positions, tuple(rows), number))
    return kept


def _placed(stacks: list[Stack], come: Sequence[StackRow]) -> tuple[list[Stack], list[StackRow]]:
    """Give those who come the free rows that fit them; the others are left."""
    loose = []
    for row in come:
        fitting = (
            number
            for number, stack in enumerate(stacks)
            if None in stack.rows and _fits(row.tokens, stack.positions)
        )
        number = next(fitting, None)
        if number is None:
            loose.append(row)
            continue
        rows = list(stacks[number].rows)
        rows[rows.index(None)] = row
        stacks[number] = stacks[number]._replace(rows=tuple(rows))
    return stacks, loose


def _fits(tokens: int, positions: int) -> bool:
    room = min(positions * _FULL_PART // _FULL_OF, positions - _LEAST_STEP)
    return room <= tokens <= positions


def _dense(stack: Stack) -> bool:
    """Whether enough of its rows are in use."""
    return len(stack.slots) * _USED_OF >= len(stack.rows) * _USED_PART


def _anew(rows: Iterable[StackRow], before: Iterable[Stack]) -> tuple[Stack, ...]:
    """Put rows of similar length together, the longest first; a stack of the same rows stays."""
    groups: list[list[StackRow]] = []
    for row in sorted(rows, key=lambda row: -row.tokens):
        if groups and _fits(row.tokens, padded(groups[-1][0].tokens)):
            groups[-1].append(row)
        else:
            groups.append([row])
    there = {frozenset(filter(None, stack.rows)): stack for stack in before if _dense(stack)}
    return tuple(there.get(frozenset(group)) or _stack(group) for group in groups)


def _stack(rows: Sequence[StackRow]) -> Stack:
    ordered = sorted(rows, key=lambda row: row.slot)
    return Stack(padded(rows[0].tokens), (*ordered, *[None] * (len(rows) // _SPARE)))


def padded(tokens: int) -> int:
    """Round up to one of few lengths: at most an eighth of it is padding, or `_LEAST_STEP`."""
    step = max(_LEAST_STEP, (1 << (tokens - 1).bit_length()) // 2 // _STEPS_AN_OCTAVE)
    return -(-tokens // step) * step
