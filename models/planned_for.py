"""Input of planning, in figures: sequences, the batch, and the rules of a model.

Protocols, so that plans are made and tested without MLX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .kv.prefix_groups import PrefixGroup


class Span(Protocol):
    """Immutable state of consecutive tokens; `PackedSpan` is the real one.

    Attributes:
        length: number of tokens.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)


class State(Protocol):
    """A running sequence's state; `SequenceCache` is the real one.

    Attributes:
        number: its name in plans.
        offset: number of tokens computed.
        prefix: spans that it reads, oldest first: leased ones, then its own.
        packed: its own ones.
        suffix_length: tokens after the prefix.
        slot: its row of the batch; None where it has caches of its own.
        is_contiguous: its own caches hold all of its keys in one piece.
        suffix_is_full: the next token makes its own caches grow.
        windows_change: the next token replaces the arrays of layers with a window.
    """

    @property
    def number(self) -> int: ...  # noqa: D102  (described above, like those that follow)
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def prefix(self) -> Sequence[Span]: ...  # noqa: D102
    @property
    def packed(self) -> Sequence[Span]: ...  # noqa: D102
    @property
    def suffix_length(self) -> int: ...  # noqa: D102
    @property
    def slot(self) -> int | None: ...  # noqa: D102
    @property
    def is_contiguous(self) -> bool: ...  # noqa: D102
    @property
    def suffix_is_full(self) -> bool: ...  # noqa: D102
    @property
    def windows_change(self) -> bool: ...  # noqa: D102


class Buffer(Protocol):
    """Own tokens of the batch's rows, of layers that keep equally many; a `RingBuffer`.

    Attributes:
        limit: the most tokens of a row.
        positions: tokens that each row has room for now.
        lengths: tokens of each row, by its slot.
    """

    @property
    def limit(self) -> int: ...  # noqa: D102  (described above, like those that follow)
    @property
    def positions(self) -> int: ...  # noqa: D102
    @property
    def lengths(self) -> Sequence[int]: ...  # noqa: D102


class Batch(Protocol):
    """The batch; `Placement` is the real one.

    Attributes:
        sequences: those in it, by slot.
        rows: number of rows, free ones included.
        suffixes: the rows' tokens of layers that keep all; None if the model has none.
        windows: those of layers with a window, by its length.
        groups: rows that read the same spans; None after a change.
    """

    @property
    def sequences(self) -> Mapping[int, State]: ...  # noqa: D102  (described above, as those below)
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def suffixes(self) -> Buffer | None: ...  # noqa: D102
    @property
    def windows(self) -> Mapping[int, Buffer]: ...  # noqa: D102
    @property
    def groups(self) -> tuple[PrefixGroup, ...] | None: ...  # noqa: D102


@dataclass(frozen=True)
class Rules:
    """Rules that are fixed for a loaded model and its budget.

    Attributes:
        exact: every call has `EXACT_ROWS` rows, and each attends separately.
        batches: sequences decode as rows of one batch, not one by one.
        contiguous: a single sequence's keys are copied into one piece before its first step: the
            model asks for them so, and would copy them in each step.
        chunked: lengths of those windows that are emptied when a chunk begins.
        gathers: each layer puts all keys of all rows together.
        own: the most tokens of its prefix's end that a row copies: reading many short private
            spans costs more than the copy.
        row_limit: own tokens after which a row is packed.
        row_multiple: of rows; see `rows_for`.
        longest: tokens that may be packed, merged or copied at a time.
        overlaps: two steps may be under way at once.
    """

    exact: bool = False
    batches: bool = True
    contiguous: bool = False
    chunked: frozenset[int] = frozenset()
    gathers: bool = False
    own: int = 256
    row_limit: int = 512
    row_multiple: int = 1
    longest: int = 1 << 62
    overlaps: bool = False
