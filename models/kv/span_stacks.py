"""All stacks of a batch: made and given up as plans say, without holding much twice meanwhile."""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..attention.splits import Reading, Source, Splits, splits_of
from ..memory_profile import Held
from .packed import PackedSpan
from .span_run import SpanRun
from .span_stack import SpanStack
from .stacking import Run, Stack


class SpanStacks:
    """All stacks of a batch."""

    def __init__(self) -> None:
        self._plan: tuple[Stack, ...] = ()
        self._stacks: list[SpanStack] = []
        self._leaving: list[SpanStack] = []  # no more read, but something may lie there still

    @property
    def plan(self) -> tuple[Stack, ...]:
        """What they hold now."""
        return tuple(map(_now, self._plan, self._stacks))

    def make(self, stacks: tuple[Stack, ...], alone: Mapping[int, Sequence[PackedSpan]]) -> None:
        """Have these stacks from now on.

        Args:
            stacks: as `stacks_of` says after `plan`.
            alone: what each slot's row alone reads.
        """
        before, made = self._stacks, [_begun(stack, alone) for stack in stacks if stack.made]
        kept = [before[stack.kept] for stack in stacks if not stack.made]
        gone = [stack for stack in before if stack not in kept]
        self._plan, self._stacks = (), []
        self._leaving += [*before, *made]  # if something fails, all go
        _move(made, gone, kept)
        there, new = iter(kept), iter(made)
        self._stacks = [next(new if stack.made else there) for stack in stacks]
        self._plan = tuple(
            _filled(stack, held.finish()) if stack.made else stack
            for stack, held in zip(stacks, self._stacks, strict=True)
        )
        self._leaving = []
        for stack, held in zip(stacks, self._stacks, strict=True):
            held.look([row.tokens for row in stack.rows])

    def adopt(self) -> None:
        """Be the only place of what has been written to disk since it was copied."""
        for stack in self._stacks:
            stack.adopt()

    def read_by(self, rows: int) -> list[tuple[SpanStack, mx.array | None]]:
        """The stacks that are read, each with the slots of its rows; None where all are in order.

        Args:
            rows: of the batch.
        """
        return [
            (held, _numbers([row.slot or 0 for row in stack.rows], rows))
            for stack, held in zip(self._plan, self._stacks, strict=True)
            if stack.slots
        ]

    def splits(
        self, private: Mapping[int, Sequence[SpanRun]], rows: int, layers: int
    ) -> Splits | None:
        """Have one kernel read stacks, and what rows alone read beside them; None where it cannot.

        Args:
            private: spans that are in no stack, by the slot of who reads them.
            rows: of the batch.
            layers: how many layers all of these hold.
        """
        there = [pair for pair in zip(self._plan, self._stacks, strict=True) if pair[0].slots]
        sources: list[Source] = [held for _, held in there]
        readings = [
            Reading(row.slot, number, place, row.tokens)
            for number, (stack, _) in enumerate(there)
            for place, row in enumerate(stack.rows)
            if row.slot is not None
        ]
        for slot, runs in private.items():
            numbers = range(len(sources), len(sources) + len(runs))
            readings += [
                Reading(slot, number, 0, run.length)
                for number, run in zip(numbers, runs, strict=True)
            ]
            sources += runs
        return splits_of(sources, readings, rows, layers)

    @property
    def readers(self) -> list[int | None]:
        """The slots of the rows of those that are read, in order; None for nobody's."""
        return [row.slot for stack in self._plan if stack.slots for row in stack.rows]

    def held(self) -> Held:
        """What they take over what has its only place there."""
        spare = [stack.spare() for stack in (*self._stacks, *self._leaving)]
        return Held(sum(held.nbytes for held in spare), sum(held.buffers for held in spare))

    @property
    def idle(self) -> bool:
        """Whether something lies there that nobody reads."""
        return any(map(_idle, self.plan))

    def release(self) -> None:
        """Give up the stacks in which something lies that nobody reads."""
        there = list(zip(self.plan, self._stacks, strict=True))
        stay = [(stack, held) for stack, held in there if not _idle(stack)]
        self._leaving += [held for stack, held in there if _idle(stack)]
        self._plan, self._stacks = tuple(s for s, _ in stay), [held for _, held in stay]
        self._leave()

    def clear(self) -> None:
        """Give up all of them. What is lodged there has a place of its own again."""
        self._plan, self._leaving, self._stacks = (), [*self._leaving, *self._stacks], []
        self._leave()

    def _leave(self) -> None:
        """One after the other, so that little is in two places at a time."""
        while self._leaving:
            _move([], self._leaving[-1:], [])
            self._leaving.pop()


def _idle(stack: Stack) -> bool:
    return any(row.slot is None and row.held for row in stack.rows)


def _move(made: Sequence[SpanStack], gone: Sequence[SpanStack], kept: Sequence[SpanStack]) -> None:
    """Make stacks, and give up others, array by array."""
    for stack in gone:
        stack.retire()
    for stack in made:
        stack.lodge(kept)
    for number in range(max((stack.parts for stack in (*made, *gone)), default=0)):
        for stack in made:
            stack.fill(number)
        for stack in gone:
            stack.empty(number)
    for stack in gone:
        stack.leave()


def _begun(stack: Stack, alone: Mapping[int, Sequence[PackedSpan]]) -> SpanStack:
    """A stack of which no array is there yet."""
    rows = []
    for row in stack.rows:
        spans, left = [], row.tokens
        for span in alone[row.slot or 0]:
            if left > 0:
                spans.append(span)
            left -= span.length
        rows.append(spans)
    return SpanStack(stack.positions, rows)


def _filled(stack: Stack, runs: Sequence[tuple[Run, ...]]) -> Stack:
    """With what is in its rows, which may have moved since it was planned."""
    rows = zip(stack.rows, runs, strict=True)
    return stack._replace(rows=tuple(row._replace(runs=there) for row, there in rows))


def _now(stack: Stack, held: SpanStack) -> Stack:
    """With what has its only place in each row at present."""
    lodged = [0] * len(stack.rows)
    for storage, row in held.lodged():
        lodged[row] += storage.length
    rows = zip(stack.rows, lodged, strict=True)
    return stack._replace(rows=tuple(row._replace(held=tokens) for row, tokens in rows))


def order_of(readers: Sequence[int | None], rows: int) -> mx.array | None:
    """Where each of so many rows is among readers; one after the last for who is not.

    Args:
        readers: slots; None for who is nobody's.
        rows: of the batch.

    Returns:
        None where that is the order of the rows.
    """
    places = {slot: place for place, slot in enumerate(readers) if slot is not None}
    order = [places.get(slot, len(readers)) for slot in range(rows)]
    return _numbers(order, len(readers))


def _numbers(numbers: list[int], count: int) -> mx.array | None:
    """As an array; None where they are all of so many in order."""
    return None if numbers == list(range(count)) else mx.array(numbers)
