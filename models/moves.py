"""What a plan moves before the model is called, and what that takes. Plain integers."""

from collections.abc import Mapping
from typing import NamedTuple

from .memory_profile import GROWTH, MemoryProfile


class Seat(NamedTuple):
    """The place of a row's own tokens.

    Attributes:
        limit: of its length class.
        row: of the class's buffer.
    """

    limit: int
    row: int


class ClassShape(NamedTuple):
    """The shape of one length class.

    Attributes:
        limit: the most tokens of a row.
        rows: free ones included.
        positions: tokens that each row has room for now.
        kept: slots whose rows become the first ones of a new buffer, in order; None if the buffer
            stays as it is.
    """

    limit: int
    rows: int
    positions: int
    kept: tuple[int, ...] | None


class Leave(NamedTuple):
    """A sequence gets caches of its own.

    Attributes:
        sequence: by its number, here and in all moves.
        slot: that it had.
        offset: tokens that it has seen.
        tokens: that it does not lease.
    """

    sequence: int
    slot: int
    offset: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of what is taken out of the row's buffers."""
        return profile.sizes.token * self.tokens + profile.captured(self.offset).nbytes


class MakeContiguous(NamedTuple):
    """A sequence's keys are copied into one piece.

    Attributes:
        tokens: that it has.
    """

    sequence: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of the copy, room to grow included, and of one layer's room beside it."""
        return profile.sizes.suffix(self.tokens) + profile.sizes.one_layer(GROWTH)


class Arrange(NamedTuple):
    """The batch has other shapes, or rows have other places.

    Attributes:
        rows: free ones included.
        windows: positions of each window, by its length.
        renewed: nothing of what was there is kept.
        relocated: rows that move first, each from one slot to another.
        shapes: of every length class.
        seats: of every row that was there before, by its slot.
        moved: tokens of rows that change their class.
    """

    rows: int
    windows: tuple[tuple[int, int], ...]
    renewed: bool
    relocated: tuple[tuple[int, int], ...]
    shapes: tuple[ClassShape, ...]
    seats: Mapping[int, Seat]
    moved: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of the buffers that are made, beside the old ones, and of rows that move."""
        sizes = profile.sizes
        made = sum(shape.rows * shape.positions for shape in self.shapes if shape.kept is not None)
        room = dict(self.windows)
        windows = sum(ring.token * room[ring.window] for ring in sizes.rings)
        fixed = (self.rows + len(self.relocated)) * sizes.fixed
        return sizes.token * (made + self.moved) + self.rows * windows + fixed


class Enter(NamedTuple):
    """A sequence gets a row of the batch.

    Attributes:
        slot: of the row.
        offset: tokens that it has seen.
        seat: of its own tokens; None where no layer keeps all.
        begin: the first token that the row has of its own. What it leases of these is copied.
        tokens: that the row then has of its own.
    """

    sequence: int
    slot: int
    offset: int
    seat: Seat | None
    begin: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of what is put in order before it is written into the row: its windows."""
        return profile.sizes.in_windows(self.offset)


class Share(NamedTuple):
    """A row reads another part of its prefix where the trie has it.

    Attributes:
        slot: of the row.
        begin: the first token that the row has of its own from now on. Those between this and the
            first one until now are copied into the row, or forgotten.
        tokens: that the row then has of its own.
    """

    sequence: int
    slot: int
    begin: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes besides the row's own: none."""
        del profile
        return 0


Move = Leave | MakeContiguous | Arrange | Enter | Share
