"""What a plan moves before the model is called, and what that takes. Plain integers."""

from typing import NamedTuple

from .memory_profile import GROWTH, MemoryProfile


class Leave(NamedTuple):
    """A sequence gets caches of its own; its suffix becomes a span.

    Attributes:
        sequence: by its number, here and in all moves.
        slot: that it had.
        offset: tokens that it has seen.
        tokens: of its suffix.
        merges: how often the newest of its own spans is merged with the one before it.
        merged: tokens of what comes of that; 0 without.
    """

    sequence: int
    slot: int
    offset: int
    tokens: int
    merges: int
    merged: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied: a row's tokens are taken out of its buffers, and then packed."""
        copied = profile.sizes.token * (2 * self.tokens + self.merged)
        return copied + profile.captured(self.offset).nbytes


class Pack(NamedTuple):
    """A sequence's suffix becomes a span; see `Leave`, also for the price."""

    sequence: int
    tokens: int
    merges: int
    merged: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied, and not given back before the step is over."""
        return profile.sizes.token * (2 * self.tokens + self.merged)


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


class Relocate(NamedTuple):
    """A row moves to another slot, so that the batch can become smaller."""

    source: int
    target: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied. The row's buffers are priced where they are resized."""
        return profile.sizes.fixed


class Resize(NamedTuple):
    """The batch has other shapes.

    Attributes:
        rows: free ones included.
        positions: of the suffixes.
        windows: positions of each window, by its length.
        renewed: nothing of what was there is kept.
    """

    rows: int
    positions: int
    windows: tuple[tuple[int, int], ...]
    renewed: bool = False

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied. The buffers are priced with the call that they are for."""
        del profile
        return 0


class Enter(NamedTuple):
    """A sequence gets a row of the batch.

    Attributes:
        slot: of the row.
        offset: tokens that it has seen.
        spans: how many at its prefix's end are copied into the row.
        tokens: that the row then has of its own.
        reused: somebody else had the slot before.
    """

    sequence: int
    slot: int
    offset: int
    spans: int
    tokens: int
    reused: bool

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is put in order before it is written into the row: its windows."""
        return profile.sizes.in_windows(self.offset)


Move = Leave | Pack | MakeContiguous | Relocate | Resize | Enter
