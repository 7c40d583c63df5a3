"""Ring buffers: the own tokens of rows, one array for each tensor of a layer.

Invariants:

1. A step writes one position, the same for all rows: its number of operations does not depend on
   how many rows there are.
2. A row's tokens are the newest `lengths[row]` positions. Older ones are masked for it.
3. Positions form a ring. Their order does not matter, because keys are rotated already.
"""

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from .spans import TokenParts, in_one


class RingBuffer:
    """Keys and values of rows, of all layers that keep equally many tokens.

    Attributes:
        tensors: `[rows, heads, positions, size]` each; None before the first token.
        lengths: number of tokens of each row.
        limit: the most tokens that a row holds.
        positions: number of positions.
        keys_weigh: `wipe` overwrites keys, the tensors of even number, too: they are read as
            values. Otherwise readers mask scores, and masked keys may be anything.
    """

    def __init__(self, limit: int, *, keys_weigh: bool = True, count: int = 0) -> None:
        self.limit = limit
        self.keys_weigh = keys_weigh
        self.tensors: list[mx.array | None] = [None] * count
        self.lengths: list[int] = []
        self.positions = 0
        self._next = 0  # the position that the next step writes
        self._fresh: set[int] = set()  # rows of zeros

    def reserve(self, count: int) -> int:
        """Add tensors of a layer; return the number of the first."""
        self.tensors += [None] * count
        return len(self.tensors) - count

    @property
    def rows(self) -> int:
        """Number of rows, free ones included."""
        return len(self.lengths)

    def resize(self, rows: int, positions: int, kept: Sequence[int] | None = None) -> None:
        """Change the number of rows and positions, in one copy.

        Args:
            rows: afterwards; new ones are free.
            positions: afterwards. The longest row that is kept must fit.
            kept: rows that become the first ones, in order; None for the first `rows`.
        """
        if kept is None:
            kept = range(min(rows, self.rows))
        self.tensors = [
            None if t is None else self._resized(t, rows, positions, kept) for t in self.tensors
        ]
        self.lengths = [self.lengths[row] for row in kept] + [0] * (rows - len(kept))
        self._fresh = set(range(len(kept), rows))
        if positions != self.positions:
            self._next, self.positions = min(self.positions, positions), positions

    def put(self, row: int, tensors: Sequence[Sequence[mx.array]]) -> None:
        """Write a row: of each tensor its parts, `[1, heads, tokens, size]`, oldest first."""
        self.wipe(row)
        if tensors:
            self.put_before(row, tensors)

    def put_before(self, row: int, tensors: Sequence[Sequence[mx.array]]) -> None:
        """Write tokens that come before those that a row has.

        Parts are written one by one: concatenating them first would copy each twice.

        Args:
            row: its number.
            tensors: see `put`.
        """
        self._fresh.discard(row)
        self.lengths[row] += sum(part.shape[2] for part in tensors[0])
        for index, parts in enumerate(tensors):
            held, start = self._held(index, parts[0]), self._next - self.lengths[row]
            for part in parts:
                self._write(held, row, start, part)
                start += part.shape[2]

    def take(self, row: int, count: int) -> list[mx.array]:
        """Copy the newest `count` tokens of a row, oldest first."""
        return [mx.contiguous(in_one(parts)) for parts in self.newest(row, count)]

    def newest(self, row: int, count: int) -> list[TokenParts]:
        """The newest `count` tokens of a row, oldest first, as slices: two where the ring ends.

        Evaluate all that is computed from them before the next write, or that copies all rows.
        """
        return [
            [t[row : row + 1, :, a:b] for a, b in self._places(count)]
            for t in self.tensors
            if t is not None
        ]

    def _places(self, count: int) -> list[tuple[int, int]]:
        """The newest `count` positions, oldest first, as ranges."""
        start = self._next - count
        if start >= 0:
            return [(start, self._next)]
        parts = [(start % self.positions, self.positions), (0, self._next)]
        return [(a, b) for a, b in parts if a < b]

    def move(self, source: int, target: int) -> None:
        """Copy a row onto another one, and free it."""
        held = self.take(source, self.lengths[source]) if self.lengths[source] else []
        mx.eval(held)  # a slice that is not evaluated would make each write a copy of all rows
        self.put(target, [[tensor] for tensor in held])
        self.lengths[target] = self.lengths[source]
        self.free(source)

    def free(self, row: int) -> None:
        """Forget a row's tokens."""
        self.lengths[row] = 0

    def wipe(self, row: int) -> None:
        """Overwrite a row with zeros.

        A masked position has weight 0, but 0 times NaN is NaN: a NaN that one sequence left would
        be in all results of the row's next sequence.
        """
        self.lengths[row] = 0
        if row in self._fresh:
            return
        for tensor in self.tensors if self.keys_weigh else self.tensors[1::2]:
            if tensor is not None:
                tensor[row : row + 1] = 0

    def clear(self) -> None:
        """Drop all rows, and free their memory."""
        self.tensors = [None] * len(self.tensors)
        self.lengths, self._fresh = [], set()
        self.positions = self._next = 0
        vars(self).pop("mask", None)

    def begin_step(self) -> None:
        """Count a token more in every row; a full row loses its oldest token."""
        if self._next == self.positions:
            self._next = 0
        self._fresh = set()
        self.lengths = [min(length + 1, self.positions) for length in self.lengths]
        vars(self).pop("mask", None)

    @cached_property
    def mask(self) -> mx.array | None:
        """`[rows, 1, 1, positions]`, True where a row may read in this step; None if all is."""
        ages = (self._next - np.arange(self.positions)) % self.positions
        seen = (ages[None] < np.array(self.lengths)[:, None])[:, None, None, :]
        return None if seen.all() else mx.array(seen)

    def arrays_of(self, first: int, count: int) -> list[mx.array]:
        """The tensors of a layer, to evaluate."""
        return [t for t in self.tensors[first : first + count] if t is not None]

    def append(self, index: int, tensor: mx.array) -> mx.array:
        """Write this step's position of one tensor, `[rows, heads, 1, size]`; return all of it."""
        held = self._held(index, tensor)
        held[:, :, self._next : self._next + 1] = tensor
        return held

    def end_step(self, used: Sequence[int]) -> None:
        """Move to the next position; rows that are not in use stay empty."""
        self._next += 1

        for row in set(range(self.rows)) - set(used):
            self.lengths[row] = 0

    def _resized(
        self, tensor: mx.array, rows: int, positions: int, kept: Sequence[int]
    ) -> mx.array:
        if list(kept) != list(range(len(kept))):
            tensor = tensor[mx.array(list(kept))]
        else:
            tensor = tensor[: len(kept)]
        if positions == self.positions:
            return resized(tensor, rows)
        # Written in place, the oldest first: ordering them before takes one copy more.
        wide = mx.zeros((rows, tensor.shape[1], positions, tensor.shape[3]), tensor.dtype)
        start = 0
        for a, b in self._places(min(self.positions, positions)):
            wide[: len(kept), :, start : start + b - a] = tensor[:, :, a:b]
            start += b - a
        return wide

    def _held(self, index: int, like: mx.array) -> mx.array:
        held = self.tensors[index]
        if held is None:
            shape = (self.rows, like.shape[1], self.positions, like.shape[3])
            held = self.tensors[index] = mx.zeros(shape, like.dtype)
        return held

    def _write(self, held: mx.array, row: int, start: int, tensor: mx.array) -> None:
        """Write tokens from a position on; a negative one counts from the ring's end."""
        stop = start + tensor.shape[2]
        if start >= 0:
            held[row : row + 1, :, start:stop] = tensor
            return
        if stop > 0:
            held[row : row + 1, :, :stop] = tensor[:, :, -start:]
            tensor, stop = tensor[:, :, :-start], 0
        held[row : row + 1, :, self.positions + start : self.positions + stop] = tensor


def resized(tensor: mx.array, rows: int) -> mx.array:
    """Change the first dimension: rows beyond are dropped, new ones are zeros."""
    more = rows - tensor.shape[0]
    if more > 0:
        return mx.pad(tensor, [(0, more), *[(0, 0)] * (tensor.ndim - 1)])
    return mx.contiguous(tensor[:rows])  # a slice would keep the dropped rows in memory
