"""Dense rows: what several sequences have of their own, of all layers alike, in one array.

Every step writes one column for all rows at once, so that a step costs the same number of
operations however many rows there are. A row's tokens are the newest columns, as many as it
is long; what is older in other rows is masked for it. The columns form a ring, which needs no
order: keys carry their positions.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_LEAST_COLUMNS = 64


def bucket(count: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: few shapes, at most a third of it unused."""
    size = 1
    while size < count:
        size *= 2
    return size * 3 // 4 if size >= 4 and size * 3 // 4 >= count else size  # noqa: PLR2004


def columns_for(count: int) -> int:
    """How many columns there are where the longest row has `count` tokens."""
    return bucket(max(count, _LEAST_COLUMNS))


class DenseRows:
    """Keys and values of rows, of all layers that keep equally many tokens.

    Attributes:
        tensors: `[rows, heads, columns, size]` each; None until the first token shows a shape.
        lengths: for each row, how many of the newest columns are its tokens.
        limit: the most tokens that a row holds.
        columns: how many columns there are.
        mask: `[rows, 1, 1, columns]`, where a row may look in this step; None if everywhere.

    Args:
        limit: the most tokens that a row holds.
        scores_masked: whether readers mask scores, and not keys: what is masked may then
            stand in keys, which are the tensors of even number, as it is.
    """

    def __init__(self, limit: int, *, scores_masked: bool = False) -> None:
        self.limit = limit
        self._dirty = slice(1, None, 2) if scores_masked else slice(None)
        self.tensors: list[mx.array | None] = []
        self.lengths: list[int] = []
        self.columns = 0
        self.mask: mx.array | None = None
        self._next = 0  # the column that the next step writes

    def reserve(self, count: int) -> int:
        """Make place for tensors of a layer; returns the number of the first."""
        self.tensors += [None] * count
        return len(self.tensors) - count

    @property
    def rows(self) -> int:
        """How many rows there are, free ones included."""
        return len(self.lengths)

    def resize(self, rows: int) -> None:
        """Have this many rows; those beyond are dropped, new ones are free."""
        more = rows - self.rows
        self.lengths = self.lengths[:rows] + [0] * max(0, more)
        self.tensors = [None if t is None else resized(t, rows) for t in self.tensors]

    def put(self, row: int, tensors: Sequence[mx.array]) -> None:
        """Write a row: all its tokens, `[1, heads, tokens, size]` each, oldest first."""
        count = tensors[0].shape[2]
        self._fit(count)
        self.lengths[row] = count
        for index, tensor in enumerate(tensors):
            self._write(index, row, tensor)

    def take(self, row: int, count: int) -> list[mx.array]:
        """Copy the newest `count` tokens of a row, oldest first."""
        start = self._next - count
        wrapped = [(start % self.columns, self.columns), (0, self._next)]
        parts = wrapped if start < 0 else [(start, self._next)]
        return [
            mx.contiguous(
                mx.concatenate([t[row : row + 1, :, a:b] for a, b in parts if a < b], axis=2)
            )
            for t in self.tensors
            if t is not None
        ]

    def move(self, source: int, target: int) -> None:
        """Copy a row onto another one, and free it."""
        self.wipe(target)
        if self.lengths[source]:
            held = self.take(source, self.lengths[source])
            # A slice that still waits to be computed would make each write a copy of all rows.
            mx.eval(held)
            self.put(target, held)
        self.lengths[target] = self.lengths[source]
        self.free(source)

    def free(self, row: int) -> None:
        """Forget a row's tokens."""
        self.lengths[row] = 0

    def wipe(self, row: int) -> None:
        """Overwrite what a row held before.

        What is masked weighs nothing, but nothing times a NaN is a NaN: one that somebody left
        behind would be in all that the row's next tenant computes.
        """
        for tensor in self.tensors[self._dirty]:
            if tensor is not None:
                tensor[row : row + 1] = 0

    def keys_weigh(self) -> None:
        """Hear that keys are values too, so that what is masked may not stand in them."""
        self._dirty = slice(None)

    def clear(self) -> None:
        """Forget all rows, and free their memory."""
        self.tensors = [None] * len(self.tensors)
        self.lengths = []
        self.columns = self._next = 0
        self.mask = None

    def begin_step(self) -> bool:
        """Make room for a token in every row, and say where the rows look.

        A row that is as long as it may be loses its oldest token.

        Returns:
            Whether there are more columns now.
        """
        longest = max(self.lengths) + 1
        widened = longest > self.columns and self.columns < self.limit
        if widened:
            self._widen(longest)
        if self._next == self.columns:
            self._next = 0
        self.lengths = [min(length + 1, self.columns) for length in self.lengths]
        ages = (self._next - np.arange(self.columns)) % self.columns
        seen = ages[None] < np.array(self.lengths)[:, None]
        self.mask = None if seen.all() else mx.array(seen)[:, None, None, :]
        return widened

    def append(self, index: int, tensor: mx.array) -> mx.array:
        """Write this step's column of one tensor, `[rows, heads, 1, size]`; return all of it."""
        held = self._held(index, tensor)
        held[:, :, self._next : self._next + 1] = tensor
        return held

    def columns_with(self, longest: int) -> int:
        """How many columns there will be once a row has so many tokens."""
        return max(self.columns, min(columns_for(longest), self.limit))

    def end_step(self, used: Sequence[int]) -> None:
        """Go on to the next column; rows that are not in use stay empty."""
        self._next += 1
        for row in set(range(self.rows)) - set(used):
            self.lengths[row] = 0

    def _fit(self, count: int) -> None:
        if count > self.columns:
            self._widen(count)
        elif not any(self.lengths) and self.columns > 2 * max(count, _LEAST_COLUMNS):
            rows = self.rows  # nobody is left of those that it grew for
            self.clear()
            self.resize(rows)
            self._widen(count)

    def _widen(self, count: int) -> None:
        """Have room for `count` tokens, the oldest first."""
        columns = min(columns_for(count), self.limit)
        for index, tensor in enumerate(self.tensors):
            if tensor is not None:
                self.tensors[index] = self._widened(tensor, columns)
        self._next, self.columns = self.columns, columns

    def _widened(self, tensor: mx.array, columns: int) -> mx.array:
        # Written in place: to put them in order first would take one copy more.
        shape = (*tensor.shape[:2], columns, tensor.shape[3])
        wide, first = mx.zeros(shape, tensor.dtype), self.columns - self._next
        if first:
            wide[:, :, :first] = tensor[:, :, self._next :]
        wide[:, :, first : self.columns] = tensor[:, :, : self._next]
        return wide

    def _held(self, index: int, like: mx.array) -> mx.array:
        held = self.tensors[index]
        if held is None:
            shape = (self.rows, like.shape[1], self.columns, like.shape[3])
            held = self.tensors[index] = mx.zeros(shape, like.dtype)
        return held

    def _write(self, index: int, row: int, tensor: mx.array) -> None:
        held = self._held(index, tensor)
        start = self._next - tensor.shape[2]
        if start < 0:
            held[row : row + 1, :, self.columns + start :] = tensor[:, :, :-start]
        if self._next:
            held[row : row + 1, :, max(start, 0) : self._next] = tensor[:, :, max(-start, 0) :]


def resized(tensor: mx.array, rows: int) -> mx.array:
    """Have this many rows of zeros or of what was there; those beyond are dropped."""
    more = rows - tensor.shape[0]
    # A copy: a slice would keep what was dropped in memory.
    return _padded(tensor, 0, more) if more > 0 else mx.contiguous(tensor[:rows])


def _padded(tensor: mx.array, axis: int, more: int) -> mx.array:
    widths = [(0, 0)] * tensor.ndim
    widths[axis] = (0, more)
    return mx.pad(tensor, widths)
