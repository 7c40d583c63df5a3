"""Length classes: the own tokens of a batch's rows, in few buffers by how many tokens they have.

A class has a ring buffer whose rows hold at most `limit` tokens, and the next class has twice that
limit. A row that is full moves up. So a decode step launches as many operations for 16 rows with
histories of 100 to 10,000 tokens as there are classes, and at most half of a row is empty.

Invariants:

1. Each row of the batch has one seat: a row of one class.
2. Each own token of a row lies in its seat, once.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from ..step_plan import ClassShape, Seat
from .ring_buffer import RingBuffer
from .spans import TokenParts


class Members(NamedTuple):
    """A class, as a step reads it.

    Attributes:
        buffer: of its tokens.
        slots: `[rows]`, the slot of each row of the buffer; None if they are the batch's own rows.
    """

    buffer: RingBuffer
    slots: mx.array | None

    def of(self, array: mx.array) -> mx.array:
        """Take the class's rows of an array that has a row for each slot."""
        return array if self.slots is None else array[self.slots]


class LengthClasses:
    """Own tokens of rows, of layers that keep all.

    Attributes:
        seats: of each row, by its slot.
    """

    def __init__(self) -> None:
        self.seats: dict[int, Seat] = {}
        self._keys_weigh = False
        self._count = 0
        self._classes: dict[int, RingBuffer] = {}
        self._rows = 0

    def reserve(self, count: int) -> int:
        """Add tensors of a layer; return the number of the first."""
        self._count += count
        return self._count - count

    def keys_weigh(self) -> None:
        """Wipe keys of new rows, too; see `RingBuffer`."""
        self._keys_weigh = True
        for buffer in self._classes.values():
            buffer.keys_weigh = True

    @property
    def shapes(self) -> Mapping[int, tuple[int, int]]:
        """Rows and positions of each class, by its limit."""
        return {limit: (ring.rows, ring.positions) for limit, ring in self._classes.items()}

    def length(self, slot: int) -> int:
        """Number of own tokens of a row; 0 for one that has no seat."""
        seat = self.seats.get(slot)
        return 0 if seat is None else self._classes[seat.limit].lengths[seat.row]

    def arrays(self) -> list[mx.array]:
        """Every array, to evaluate."""
        return self.arrays_of(0, self._count)

    def arrays_of(self, first: int, count: int) -> list[mx.array]:
        """The arrays of a layer, to evaluate."""
        return [t for ring in self._classes.values() for t in ring.arrays_of(first, count)]

    # -- rows --------------------------------------------------------------------------

    def arrange(self, rows: int, shapes: Sequence[ClassShape], seats: Mapping[int, Seat]) -> None:
        """Give rows other seats, and classes other shapes.

        Args:
            rows: of the batch.
            shapes: of every class afterwards.
            seats: of every row afterwards, by its slot.
        """
        moved = {
            slot: self.newest(slot, self.length(slot)) if self.length(slot) else []
            for slot, seat in seats.items()
            if slot in self.seats and self.seats[slot].limit != seat.limit
        }
        copies = {
            slot: [[mx.contiguous(part) for part in parts] for parts in tensors]
            for slot, tensors in moved.items()
        }
        # A slice that is not evaluated would make each write a copy of all rows.
        mx.eval([*copies.values()])
        del moved
        before, self.seats = self.seats, dict(seats)
        old, self._classes = self._classes, {}
        for shape in shapes:
            buffer = old.get(shape.limit) or RingBuffer(
                shape.limit, keys_weigh=self._keys_weigh, count=self._count
            )
            if shape.kept is not None:
                kept = [before[slot].row for slot in shape.kept]
                buffer.resize(shape.rows, shape.positions, kept)
            self._classes[shape.limit] = buffer
        for slot in (before.keys() - seats.keys()) | copies.keys():
            left = before[slot]
            held = self._classes.get(left.limit)
            if held is not None and left.row < held.rows and left not in seats.values():
                held.free(left.row)
        for slot, tensors in copies.items():
            self._classes[seats[slot].limit].put(seats[slot].row, tensors)
        self._rows = rows
        self._changed()

    def put(self, slot: int, seat: Seat, tensors: Sequence[Sequence[mx.array]]) -> None:
        """Write a row: of each tensor its parts, oldest first; none for a row without tokens."""
        self.seats[slot] = seat
        self._classes[seat.limit].put(seat.row, tensors)
        self._changed()

    def put_before(self, slot: int, tensors: Sequence[Sequence[mx.array]]) -> None:
        """Write tokens that come before a row's own; see `RingBuffer.put_before`."""
        seat = self.seats[slot]
        self._classes[seat.limit].put_before(seat.row, tensors)

    def shorten(self, slot: int, tokens: int) -> None:
        """Drop a row's oldest tokens; `tokens` stay."""
        seat = self.seats[slot]
        self._classes[seat.limit].lengths[seat.row] = tokens

    def newest(self, slot: int, count: int) -> list[TokenParts]:
        """See `RingBuffer.newest`."""
        seat = self.seats[slot]
        return self._classes[seat.limit].newest(seat.row, count)

    def free(self, slot: int) -> None:
        """Drop a row and its seat, and a class without rows."""
        seat = self.seats.pop(slot, None)
        if seat is None:
            return
        self._classes[seat.limit].free(seat.row)
        if all(other.limit != seat.limit for other in self.seats.values()):
            del self._classes[seat.limit]
        self._changed()

    def relocate(self, source: int, target: int) -> None:
        """Give a row's seat to another slot. Nothing is computed."""
        self.seats[target] = self.seats.pop(source)
        self._changed()

    def clear(self) -> None:
        """Drop all rows, and free their memory."""
        self.seats, self._classes, self._rows = {}, {}, 0
        self._changed()

    # -- steps -------------------------------------------------------------------------

    @cached_property
    def members(self) -> list[Members]:
        """The classes, as a step reads them."""
        return [self._members(limit, ring) for limit, ring in self._classes.items()]

    def _members(self, limit: int, ring: RingBuffer) -> Members:
        used = {slot: seat.row for slot, seat in self.seats.items() if seat.limit == limit}
        in_place = len(used) == len(self.seats) and ring.rows == self._rows
        if in_place and all(slot == row for slot, row in used.items()):
            return Members(ring, None)
        slots = [0] * ring.rows
        for slot, row in used.items():
            slots[row] = slot
        return Members(ring, mx.array(slots))

    @cached_property
    def order(self) -> mx.array | None:
        """`[rows]`, for each slot its row in all classes' rows after each other; None if in order.

        A free slot has the row of another: its output is dropped.
        """
        if len(self._classes) == 1 and self.members[0].slots is None:
            return None
        first, starts = 0, {}
        for limit, ring in self._classes.items():
            starts[limit], first = first, first + ring.rows
        order = [0] * self._rows
        for slot, seat in self.seats.items():
            order[slot] = starts[seat.limit] + seat.row
        return mx.array(order)

    def begin_step(self) -> None:
        """Count a token more in every row."""
        for ring in self._classes.values():
            ring.begin_step()

    def append(self, index: int, tensor: mx.array) -> list[mx.array]:
        """Write this step's tokens of one tensor, `[slots, heads, 1, size]`.

        Returns:
            All of that tensor, `[rows, heads, positions, size]` for each class.
        """
        return [each.buffer.append(index, each.of(tensor)) for each in self.members]

    def in_order(self, of_classes: list[mx.array]) -> mx.array:
        """Put arrays with a row for each row of a class, class after class, in order of slots."""
        whole = of_classes[0] if len(of_classes) == 1 else mx.concatenate(of_classes, axis=0)
        return whole if self.order is None else whole[self.order]

    def end_step(self, used: Iterable[int]) -> None:
        """Move to the next position; rows that are not in use stay empty."""
        rows: dict[int, list[int]] = {limit: [] for limit in self._classes}
        for slot in used:
            seat = self.seats[slot]
            rows[seat.limit].append(seat.row)
        for limit, ring in self._classes.items():
            ring.end_step(rows[limit])

    def _changed(self) -> None:
        """Drop the values computed from the seats."""
        for name in ("members", "order"):
            vars(self).pop(name, None)
