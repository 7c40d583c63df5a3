"""What several rows of a batch lease alone, side by side in a few arrays.

A stack is the only place of the storages that lie in it as a whole: they are *lodged* there, their
arrays are slices of its own. What is in it of other storages is a copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx
import numpy as np

from ..memory_profile import Held
from .packed import PackedSpan, runs_of
from .stacking import Run, Stack
from .storage import SpanRun, Storage
from .token_layer import Tensors


class _Placed(NamedTuple):
    """What is written into a stack: its row, its first position there, and its tokens."""

    row: int
    at: int
    run: SpanRun


class SpanStack:
    """Tokens of spans, a row for each row of the batch that reads them. Not written again.

    Its arrays are made one after the other, and given up so: tokens are in two places for the
    time of one array only.

    Attributes:
        mask: `[rows, 1, 1, positions]`, where each may look; None if everywhere.

    Args:
        positions: tokens that each row has room for.
        rows: what each holds, oldest first.
    """

    def __init__(self, positions: int, rows: Sequence[Sequence[PackedSpan]]) -> None:
        self.mask: mx.array | None = None
        self._positions = positions
        self._rows = len(rows)
        self._content = [placed for row, spans in enumerate(rows) for placed in _placed(row, spans)]
        self._arrays: list[mx.array] = []
        self._layers: list[Tensors] = []
        self._lodged: WeakKeyDictionary[Storage, int] = WeakKeyDictionary()
        self._rests: WeakSet[Storage] = WeakSet()  # of what was divided for it

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[rows, heads, positions, size]` each."""
        return self._layers[index]

    def lodged(self) -> list[tuple[Storage, int]]:
        """The storages that have their only place here, and their rows."""
        return [(storage, row) for storage, row in self._lodged.items() if storage.host is self]

    def spare(self) -> Held:
        """What it takes over what is lodged here."""
        held = sum(storage.nbytes for storage, _ in self.lodged())
        return Held(sum(array.nbytes for array in self._arrays) - held, len(self._arrays))

    def look(self, lengths: Sequence[int]) -> None:
        """Say how many tokens of each row are read. Where it is none, nobody reads what comes."""
        seen = np.arange(self._positions)[None] < np.maximum(lengths, 1)[:, None]
        self.mask = None if seen.all() else mx.array(seen)[:, None, None, :]

    # -- making ------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """How many arrays what lies there is in."""
        there = [placed.run.storage for placed in self._content] or [s for s, _ in self.lodged()]
        return there[0].parts if there else len(self._arrays)

    def lodge(self, stay: Sequence["SpanStack"]) -> None:
        """Say what is to have its only place here: all that can.

        Args:
            stay: the stacks that stay; what is lodged there stays, too.
        """
        for row, _, run in self._content:
            free = all(run.storage.host is not host for host in stay)
            if free and run.storage.may_move(run.start, run.stop):
                self._rests.update(_apart(run))
                self._lodged[run.storage] = row

    def fill(self, number: int) -> None:
        """Make one array of what the storages have there, and have it take the place of that."""
        like = self._content[0].run.part(number)
        shape = (like.shape[0], self._rows, like.shape[1], self._positions, like.shape[3])
        # What is masked weighs nothing, but nothing times a NaN is a NaN.
        array = mx.zeros(shape, like.dtype)
        for row, at, run in self._content:
            array[:, row : row + 1, :, at : at + run.length] = run.part(number)[:, None]
        mx.eval(array)
        self._arrays.append(array)
        for row, at, run in self._content:
            if run.storage in self._lodged:
                view = array[:, row : row + 1, :, at : at + run.length].squeeze(1)
                mx.eval(view)  # a slice that is not computed keeps what it is of for itself
                run.storage.host = self
                run.storage.replace(number, view)
        for rest in self._rests:
            _own(rest, number)

    def finish(self) -> tuple[tuple[Run, ...], ...]:
        """Be read from now on; say what is in each row."""
        runs: list[list[Run]] = [[] for _ in range(self._rows)]
        for row, _, run in self._content:
            runs[row].append(Run(run.storage.number, run.start, run.stop))
        places = self._content[0].run.storage.places
        views = [[self._arrays[n][i : i + 1].squeeze(0) for n, i in place] for place in places]
        self._layers = [tuple(tensors) for tensors in views]
        mx.eval(self._layers)
        self._content, self._rests = [], WeakSet()
        return tuple(map(tuple, runs))

    # -- giving up ---------------------------------------------------------------------

    def retire(self) -> None:
        """Be read no more."""
        self._layers, self._content = [], []

    def empty(self, number: int) -> None:
        """Let go of one array: what is still lodged here has one of its own instead."""
        for storage in (*self._rests, *[storage for storage, _ in self.lodged()]):
            _own(storage, number)
        if number < len(self._arrays):
            self._arrays[number] = mx.array([])

    def leave(self) -> None:
        """Lodge nothing any more: all of it lies elsewhere."""
        for storage, _ in self.lodged():
            storage.host = None
        self._arrays = []


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


def _placed(row: int, spans: Sequence[PackedSpan]) -> Iterable[_Placed]:
    at = 0
    for run in runs_of(spans):
        yield _Placed(row, at, run)
        at += run.length


def _apart(run: SpanRun) -> list[Storage]:
    """Have a run's tokens be a storage; return those that have what was beside them."""
    storage, start, rests = run.storage, run.start, list[Storage]()
    if run.stop < storage.length:
        rests.append(storage.divide(run.stop))
    if start:
        storage.divide(start)
        rests.append(storage)
    return rests


def _own(storage: Storage, number: int) -> None:
    """Have a storage's array be a buffer of its own."""
    own = mx.contiguous(storage.part(number, 0, storage.length))
    mx.eval(own)
    storage.replace(number, own)


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
