"""A step as a value: what it moves, computes and keeps, in plain integers, before it runs.

`planner.plan_step` makes one of what runs and where that lies. `StepPlan.cost` says what it takes.
Only then `ModelRunner.run` executes it, and decides nothing. Nothing here knows MLX, nor does any
I/O.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from .memory_profile import Held, MemoryProfile, PlannedChunk
from .moves import Move

EXACT_ROWS = 8
"""Rows of every call of an exact model: products of other shapes round differently."""


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
        moves: what comes before, in order.
        rows: that are computed, free ones included.
        context: the most tokens that a row looks at.
        growing: sequences whose own caches grow.
        changing: tokens seen by those whose windows get other arrays.
        slots: of `sequences`, in a batch.
        groups: rows that read the same spans there.
        regroups: whether these differ from those of the step before.
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
        """What it takes at its peak, besides what it computes with and drops."""
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
        """What it takes at its peak."""
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
        """What it takes at its peak."""
        return profile.prefill(self.chunk, logits=self.logits)


@dataclass(frozen=True)
class StepPlan:
    """What one step does: tokens for those who decode, and a chunk of a prompt.

    Attributes:
        decode: the former.
        prefill: the latter.
    """

    decode: DecodePlan | None
    prefill: PrefillPlan | None

    def cost(self, profile: MemoryProfile) -> Held:
        """What it takes at its peak, over what is held before it."""
        parts = [part.cost(profile) for part in (self.decode, self.prefill) if part is not None]
        return Held(sum(part.nbytes for part in parts), sum(part.buffers for part in parts))
