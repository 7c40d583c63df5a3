"""What several rows of a batch lease alone, side by side in a few arrays: one stack.

A stack is the only place of the storages that lie in it as a whole: they are *lodged* there, their
arrays are slices of its own. What is in it of other storages is a copy.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx
import numpy as np

from ..memory_profile import Held
from .lodging import apart, divided
from .packed import PackedSpan, runs_of
from .span_run import SpanRun
from .stacking import Run
from .storage import Storage
from .token_layer import Tensors, starts


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
        self._starts: list[Tensors] = []
        self._lodged: WeakKeyDictionary[Storage, int] = WeakKeyDictionary()
        self._copied: WeakKeyDictionary[Storage, tuple[int, int]] = WeakKeyDictionary()
        self._rests: WeakSet[Storage] = WeakSet()  # of what was divided for it

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[rows, heads, positions, size]` each."""
        return self._layers[index]

    def start_of(self, index: int) -> Tensors:
        """The first token of `layer`, of its first row: where it begins in memory."""
        return self._starts[index]

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
        for row, at, run in self._content:
            free = all(run.storage.host is not host for host in stay)
            if free and run.storage.may_move(run.start, run.stop):
                self._rests.update(divided(run))
                self._lodged[run.storage] = row
            elif run.length == run.storage.length:
                self._copied[run.storage] = row, at

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
        moved = [placed for placed in self._content if placed.run.storage in self._lodged]
        self._take(number, [(run.storage, row, at) for row, at, run in moved])
        apart(self._rests, number)

    def _take(self, number: int, there: Sequence[tuple[Storage, int, int]]) -> None:
        """Have storages lie in one array, where their tokens are: each in a row, from a position.

        Of a slice that is not computed nobody knows yet that it shares the array's buffer.
        """
        views = [
            self._arrays[number][:, row : row + 1, :, at : at + storage.length].squeeze(1)
            for storage, row, at in there
        ]
        mx.eval(views)
        for (storage, _, _), view in zip(there, views, strict=True):
            storage.host = self
            storage.replace(number, view)

    def finish(self) -> tuple[tuple[Run, ...], ...]:
        """Be read from now on; say what is in each row."""
        runs: list[list[Run]] = [[] for _ in range(self._rows)]
        for row, _, run in self._content:
            runs[row].append(Run(run.storage.number, run.start, run.stop))
        places = self._content[0].run.storage.places
        views = [[self._arrays[n][i : i + 1].squeeze(0) for n, i in place] for place in places]
        self._layers = [tuple(tensors) for tensors in views]
        self._starts = [starts(tensors) for tensors in self._layers]
        mx.eval(self._layers, self._starts)
        self._content, self._rests = [], WeakSet()
        return tuple(map(tuple, runs))

    def adopt(self) -> None:
        """Be the only place of what is here as a copy because it was being written to disk.

        Frees memory, and takes none.
        """
        for storage, (row, at) in list(self._copied.items()):
            if storage.movable and not storage.lodged:
                del self._copied[storage]
                self._lodged[storage] = row
                for number in range(storage.parts):  # none where nobody holds it any more
                    self._take(number, [(storage, row, at)])

    # -- giving up ---------------------------------------------------------------------

    def retire(self) -> None:
        """Be read no more."""
        self._layers, self._starts, self._content = [], [], []

    def empty(self, number: int) -> None:
        """Let go of one array: what is still lodged here has one of its own instead."""
        apart([*self._rests, *[storage for storage, _ in self.lodged()]], number)
        if number < len(self._arrays):
            self._arrays[number] = mx.array([])

    def leave(self) -> None:
        """Lodge nothing any more: all of it lies elsewhere."""
        for storage, _ in self.lodged():
            storage.host = None
        self._arrays = []


def _placed(row: int, spans: Sequence[PackedSpan]) -> Iterable[_Placed]:
    at = 0
    for run in runs_of(spans):
        yield _Placed(row, at, run)
        at += run.length
