"""A step as a value: what it moves, computes and keeps, in plain integers, before it runs.

`planner.plan_step` makes one from the running sequences and the places of their state.
`StepPlan.cost` is its memory. Only then `ModelRunner.run` executes it, and decides nothing. Nothing
here knows MLX, nor does any I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .memory_profile import GROWTH, Held, MemoryProfile, PlannedChunk

EXACT_ROWS = 8
"""Rows of every call of an exact model: products of other shapes round differently."""


# -- moves, which come before a call -----------------------------------------------------


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
        sequence: its number, here and in all moves.
        slot: that it had.
        offset: tokens that it has computed.
        tokens: that it does not lease.
    """

    sequence: int
    slot: int
    offset: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of the copy of its row."""
        return profile.sizes.token * self.tokens + profile.captured(self.offset).nbytes


class MakeContiguous(NamedTuple):
    """A sequence's keys are copied into one piece.

    Attributes:
        tokens: that it has computed.
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
        renewed: all rows and buffers are dropped first.
        relocated: rows that move first, each from one slot to another.
        shapes: of every length class.
        seats: of every row of before, by its slot.
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
        """Bytes of new buffers, beside the old ones, and of rows that move."""
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
        offset: tokens that it has computed.
        seat: of its own tokens; None where no layer keeps all.
        begin: the row's first own token. Leased tokens from there on are copied.
        tokens: of the row's own.
    """

    sequence: int
    slot: int
    offset: int
    seat: Seat | None
    begin: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of its windows, which are put in order before they are written into the row."""
        return profile.sizes.in_windows(self.offset)


class Share(NamedTuple):
    """A row reads another part of its prefix where the trie has it.

    Attributes:
        slot: of the row.
        begin: the row's first own token from now on. Tokens between this and the first one until
            now are copied into the row, or dropped.
        tokens: of the row's own, afterwards.
    """

    sequence: int
    slot: int
    begin: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """No bytes besides the row's own."""
        del profile
        return 0


Move = Leave | MakeContiguous | Arrange | Enter | Share


# -- calls -------------------------------------------------------------------------------


class PrefixGroup(NamedTuple):
    """Rows that read the same spans.

    Attributes:
        slots: of these rows, ascending.
        start: the first of these spans, as a number in each row's prefix.
        stop: one after the last.
    """

    slots: tuple[int, ...]
    start: int
    stop: int


class Kind(Enum):
    """How a call runs its sequences."""

    SINGLE = auto()
    """One, in caches of its own."""
    BATCH = auto()
    """Several, as rows of the batch."""
    EXACT = auto()
    """Several, each attending by itself, among `EXACT_ROWS` rows."""


@dataclass(frozen=True)
class Call:
    """One call of the model.

    Attributes:
        kind: how it runs.
        sequences: numbers of those that get a token, in the order of their tokens.
        moves: before the call, in order.
        rows: that are computed, free ones included.
        context: the most tokens that a row looks at.
        growing: sequences whose own caches grow.
        changing: tokens of each sequence whose windows get other arrays.
        slots: of `sequences`, in a batch.
        groups: rows that read the same spans there.
        regroups: these differ from those of the step before.
        gathered: tokens that each layer puts together for each row, where the model attends by
            itself.
    """

    kind: Kind
    sequences: tuple[int, ...]
    moves: tuple[Move, ...]
    rows: int
    context: int
    growing: int = 0
    changing: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    groups: tuple[PrefixGroup, ...] = ()
    regroups: bool = False
    gathered: int = 0

    def nbytes(self, profile: MemoryProfile) -> int:
        """Bytes of its state at the peak, besides the arrays that computing needs for a while."""
        sizes = profile.sizes
        taken = sum(move.nbytes(profile) for move in self.moves)
        taken += sizes.growth * self.growing
        taken += sum(sizes.non_trimmable(offset + 1) for offset in self.changing)
        taken += profile.gathered(self.rows)  # recurrent layers replace their states
        if self.kind is Kind.EXACT:
            # Rows are put together in each layer, and given back to each sequence.
            taken += profile.gathered(self.rows) + len(self.sequences) * sizes.fixed
        if self.gathered:
            taken += profile.put_together(self.rows, self.gathered)
        return taken


# -- plans -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodePlan:
    """One token for each of some sequences.

    Attributes:
        calls: of the model, in order; each sequence is in one of them.
        overlaps: the step before may still be under way.
    """

    calls: tuple[Call, ...]
    overlaps: bool

    def cost(self, profile: MemoryProfile) -> Held:
        """Memory at its peak."""
        rows = sum(call.rows for call in self.calls)
        context = max(max(call.context, call.gathered) for call in self.calls)
        taken = sum(call.nbytes(profile) for call in self.calls)
        # Where the device computes on while the host goes on, two steps are under way.
        taken += profile.compute(rows, context) * (2 if self.overlaps else 1)
        return Held(taken, 2 * profile.sizes.arrays)


@dataclass(frozen=True)
class PrefillPlan:
    """A chunk of a prompt, which is a call of the model.

    Attributes:
        sequence: its number.
        chunk: of its prompt.
        logits: tokens of the call whose logits are computed; 0 unless the prompt is complete.
    """

    sequence: int
    chunk: PlannedChunk
    logits: int = 0

    def cost(self, profile: MemoryProfile) -> Held:
        """Memory at its peak."""
        return profile.prefill(self.chunk, logits=self.logits)


@dataclass(frozen=True)
class StepPlan:
    """One step: tokens for the sequences that decode, and a chunk of a prompt."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None

    def cost(self, profile: MemoryProfile) -> Held:
        """Memory at its peak, over the state before it."""
        parts = [part.cost(profile) for part in (self.decode, self.prefill) if part is not None]
        return Held(sum(part.nbytes for part in parts), sum(part.buffers for part in parts))
