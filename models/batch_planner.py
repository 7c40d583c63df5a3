"""Plans a call for the rows of the batch: which sequences enter and leave, and all shapes. Pure.

A row reads a span where the trie has it as long as another row reads it, too. Tokens that it reads
alone lie in the row, with its own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from .step_plan import (
    Arrange,
    Call,
    ClassShape,
    Enter,
    Kind,
    Leave,
    Move,
    PrefixGroup,
    Seat,
    Share,
)

if TYPE_CHECKING:
    from .kv.placement import Placement
    from .kv.ring_buffer import RingBuffer
    from .kv.sequence_cache import SequenceCache
    from .kv.spans import PackedSpan
    from .planner import Rules

ONE_CLASS = 1 << 62
"""Limit of the only class of a model that puts all keys of all rows together."""

SHARED = 32
"""Longest end of shared spans, in tokens, that a row copies."""


_LEAST_POSITIONS = 64


def leave(state: "SequenceCache", slot: int) -> Leave:
    """Plan that a sequence leaves its slot."""
    return Leave(state.number, slot, state.offset, state.suffix_length)


class BatchPlanner:
    """Plans one call for the rows of the batch.

    Args:
        decode: the sequences in the batch afterwards.
        batch: as it is before.
        rules: of the model.
        coming: number of sequences that will soon enter.
        may_copy: rows may be copied so that there are fewer.
    """

    def __init__(
        self,
        decode: "Sequence[SequenceCache]",
        batch: "Placement",
        rules: "Rules",
        *,
        coming: int = 0,
        may_copy: bool = True,
    ) -> None:
        self._may_copy = may_copy
        self._decode = decode
        self._coming = coming
        self._batch = batch
        self._rules = rules
        stay = {state.number for state in decode}
        gone = [(s, state) for s, state in batch.sequences.items() if state.number not in stay]
        self._moves: list[Move] = [leave(state, slot) for slot, state in gone]
        self._slots = {s: state for s, state in batch.sequences.items() if state.number in stay}
        self._new = [state for state in decode if state.slot is None]
        self._stays = len(self._new) < len(decode)  # a row does: its buffers are kept
        own = batch.own
        self._had = {} if own is None else {slot: own.length(slot) for slot in self._slots}
        self._seats = {} if own is None else {slot: own.seats[slot] for slot in self._slots}
        left = {seat.limit for seat in self._seats.values()}  # a class without rows is dropped
        shapes = {} if own is None else own.shapes
        self._shapes = {limit: shape for limit, shape in shapes.items() if limit in left}
        self._windows = {
            limit: {slot: buffer.lengths[slot] for slot in self._slots}
            for limit, buffer in batch.windows.items()
        }

    def call(self) -> Call:
        """Plan the call."""
        rows, relocated = self._rows()
        regroups = bool(self._moves or relocated or self._new) or self._batch.groups is None
        entered = [self._slot_of(state) for state in self._new]
        self._own = dict(self._had)  # own tokens of each row, after the moves
        shares = self._divide() if regroups else []
        longer = [move for move in shares if self._own[move.slot] > self._had[move.slot]]
        self._moves += [move for move in shares if move not in longer]
        before = dict(self._seats)
        shapes = self._take_seats(rows)
        moved = [slot for slot, seat in before.items() if self._seats[slot].limit != seat.limit]
        windows = self._room_in_windows()
        if (
            not self._stays
            or relocated
            or rows != self._batch.rows
            or windows != self._windows_before()
            or any(shape.kept is not None for shape in shapes)
            or moved
        ):
            self._moves.append(
                Arrange(
                    rows,
                    windows,
                    renewed=not self._stays,
                    relocated=tuple(relocated),
                    shapes=tuple(shapes),
                    seats={slot: self._seats[slot] for slot in before},
                    moved=sum(min(self._had[slot], self._own[slot]) for slot in moved),
                )
            )
        self._moves += [self._enter(slot) for slot in entered]
        self._moves += longer
        groups = self._groups() if regroups or self._moves else self._batch.groups
        positions = max((shape.positions for shape in shapes), default=0)
        slots = {state.number: slot for slot, state in self._slots.items()}
        return Call(
            Kind.BATCH,
            tuple(state.number for state in self._decode),
            tuple(self._moves),
            rows,
            max(positions, *(state.offset for state in self._decode)),
            slots=tuple(slots[state.number] for state in self._decode),
            groups=groups or (),
            regroups=regroups or bool(self._moves),
            gathered=self._gathered(groups or ()) + positions if self._rules.gathers else 0,
        )

    # -- slots -------------------------------------------------------------------------

    def _rows(self) -> tuple[int, list[tuple[int, int]]]:
        """Choose the number of rows, and the moves that make it so small."""
        needed = rows_for(len(self._decode), self._rules.row_multiple)
        soon = rows_for(len(self._decode) + self._coming, self._rules.row_multiple)
        if self._may_copy and soon < self._batch.rows:
            return soon, self._relocate(soon)
        has_room = self._stays and needed <= self._batch.rows
        return (self._batch.rows if has_room else max(soon, self._batch.rows)), []

    def _relocate(self, rows: int) -> list[tuple[int, int]]:
        relocated = []
        for source in sorted(slot for slot in self._slots if slot >= rows):
            target = next(slot for slot in range(rows) if slot not in self._slots)
            relocated.append((source, target))
            self._slots[target] = self._slots.pop(source)
            if source in self._seats:
                self._seats[target] = self._seats.pop(source)
            for lengths in (self._had, *self._windows.values()):
                if source in lengths:
                    lengths[target] = lengths.pop(source)
        return relocated

    def _slot_of(self, state: "SequenceCache") -> int:
        slot = next(slot for slot in range(len(self._slots) + 1) if slot not in self._slots)
        self._slots[slot] = state
        for limit, lengths in self._windows.items():
            lengths[slot] = self._in_window(state.offset, limit)
        return slot

    def _in_window(self, offset: int, limit: int) -> int:
        if limit in self._rules.chunked and offset:
            return (offset - 1) % limit + 1
        return min(offset, limit)

    # -- spans that rows share ---------------------------------------------------------

    def _divide(self) -> list[Share]:
        """Divide each row's tokens into shared spans and its own; return the changes."""
        if self._batch.own is None:
            return []
        readers = Counter(id(span) for state in self._decode for span in state.leased)
        shares = []
        for slot, state in self._slots.items():
            begin = end = 0  # of the spans that others read, too
            for span in state.leased:
                if readers[id(span)] == 1:
                    break
                end += span.length
                if end - begin > SHARED:
                    begin = end
            self._own[slot] = state.offset - begin
            if slot in self._had and self._own[slot] != self._had[slot]:
                shares.append(Share(state.number, slot, begin, self._own[slot]))
        return shares

    def _groups(self) -> tuple[PrefixGroup, ...]:
        return prefix_groups({slot: self._read_by(slot) for slot in self._slots})

    def _read_by(self, slot: int) -> "Sequence[PackedSpan]":
        """Leased spans that are not in the row itself."""
        state, count = self._slots[slot], 0
        left = state.offset - self._own.get(slot, state.offset)
        while left > 0:
            left -= state.leased[count].length
            count += 1
        return state.leased[:count]

    def _gathered(self, groups: Iterable[PrefixGroup]) -> int:
        return sum(
            span.length
            for slots, start, stop in groups
            for span in self._slots[slots[0]].leased[start:stop]
        )

    # -- room for own tokens -------------------------------------------------------------

    def _limit(self, slot: int) -> int:
        """The limit of a row's length class, with a token more.

        A row moves down where three quarters of its seat would be empty.
        """
        if self._rules.gathers:
            return ONE_CLASS
        limit, needed = self._rules.least_class, self._own[slot] + 1
        while limit < needed:
            limit *= 2
        seat = self._seats.get(slot)
        if seat is None or seat.limit < limit or (self._may_copy and seat.limit >= 4 * limit):
            return limit
        return seat.limit

    def _take_seats(self, rows: int) -> list[ClassShape]:
        """Give each row a seat. An only class has as many rows as the batch, in their order."""
        classes: dict[int, list[int]] = {}
        for slot in sorted(self._own):
            classes.setdefault(self._limit(slot), []).append(slot)
        only = len(classes) == 1
        return [
            self._shape(limit, slots, rows if only else bucket(len(slots)), exactly=only)
            for limit, slots in sorted(classes.items())
        ]

    def _shape(self, limit: int, slots: Sequence[int], wanted: int, *, exactly: bool) -> ClassShape:
        """Choose a class's shape, and the seats of its rows.

        Args:
            limit: of the class.
            slots: of its rows, in order.
            wanted: rows of a buffer that is made now.
            exactly: the buffer must have so many.
        """
        rows, positions = self._shapes.get(limit, (0, 0))
        longest = max(self._own[slot] for slot in slots) + 1
        needed = min(positions_for(longest), limit)
        stay = [s for s in slots if s in self._seats and self._seats[s].limit == limit]
        fits = len(slots) <= rows and needed <= positions
        if self._may_copy:
            fits &= rows == wanted if exactly else rows <= wanted * 3 // 2 + 1
        if fits:
            kept, taken = None, {self._seats[slot].row for slot in stay}
        else:
            kept, taken, rows, positions = tuple(stay), set(range(len(stay))), wanted, needed
            self._seats |= {slot: Seat(limit, row) for row, slot in enumerate(stay)}
        free = iter([row for row in range(rows) if row not in taken])
        self._seats |= {slot: Seat(limit, next(free)) for slot in slots if slot not in stay}
        return ClassShape(limit, rows, positions, kept)

    def _enter(self, slot: int) -> Enter:
        state = self._slots[slot]
        own = self._own.get(slot, 0)
        begin = state.offset - own
        return Enter(state.number, slot, state.offset, self._seats.get(slot), begin, own)

    # -- room in windows -----------------------------------------------------------------

    def _room_in_windows(self) -> tuple[tuple[int, int], ...]:
        """Positions of each window, with room for a token more in every row."""
        return tuple(
            (limit, self._room(buffer, self._windows[limit].values()))
            for limit, buffer in self._batch.windows.items()
        )

    def _windows_before(self) -> tuple[tuple[int, int], ...]:
        return tuple((limit, buffer.positions) for limit, buffer in self._batch.windows.items())

    def _room(self, buffer: "RingBuffer", lengths: Iterable[int]) -> int:
        """Positions that a buffer needs. It does not shrink while a row stays."""
        needed = min(positions_for(max(lengths, default=0) + 1), buffer.limit)
        return max(buffer.positions, needed) if self._stays else needed


def prefix_groups(prefixes: Mapping[int, Sequence[object]]) -> tuple[PrefixGroup, ...]:
    """Find the runs of spans that the same rows read.

    Rows lease paths of one trie, so rows that share a span share all before it.

    Args:
        prefixes: for each slot the spans that its row reads, oldest first. Spans are compared by
            identity.

    Returns:
        A group for each run, those of several rows and those of one; each run once.
    """
    readers: dict[int, list[int]] = {}
    for slot, spans in sorted(prefixes.items()):
        for span in spans:
            readers.setdefault(id(span), []).append(slot)
    groups: dict[PrefixGroup, None] = {}
    for _, spans in sorted(prefixes.items()):
        start = 0
        for slots, run in groupby(spans, lambda span: readers[id(span)]):
            stop = start + len(list(run))
            groups[PrefixGroup(tuple(slots), start, stop)] = None
            start = stop
    return tuple(groups)


def bucket(count: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …: few shapes, at most a third of it unused."""
    size = 1
    while size < count:
        size *= 2
    return size * 3 // 4 if size >= 4 and size * 3 // 4 >= count else size  # noqa: PLR2004


def rows_for(count: int, multiple: int) -> int:
    """Number of rows of a batch.

    Args:
        count: of its sequences.
        multiple: of rows for which products are the fastest; batches of up to half of it stay as
            small as they are.
    """
    rows = bucket(count)
    return rows if rows * 2 <= multiple else -(-rows // multiple) * multiple


def positions_for(tokens: int) -> int:
    """Positions of rows whose longest has this many tokens: 64, 96, 128, 192, 256 and so on."""
    return bucket(max(tokens, _LEAST_POSITIONS))
