"""What a step is planned for, in figures: sequences, the batch, and what is fixed for a model.

Protocols, so that plans are made and tested without MLX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .kv.prefix_groups import PrefixGroup


class Span(Protocol):
    """State of consecutive tokens that is read and no longer written.

    Attributes:
        length: how many tokens.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)


class State(Protocol):
    """A running sequence's state; `SequenceCache` is the real one.

    Attributes:
        number: its name in plans.
        offset: tokens that it has seen.
        prefix: spans that it reads, oldest first; those it leases, and then its own.
        packed: how many of them are its own.
        suffix_length: tokens after the prefix.
        slot: its row of the batch; None where it has caches of its own.
        is_contiguous: its own caches hold all its keys in one piece.
        suffix_is_full: its own caches grow with the next token.
        windows_change: layers with a window get other arrays with the next token.
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
    """What the batch's rows hold of layers that keep equally many tokens: a `RingBuffer`.

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
    """Who is in the batch; `Placement` is the real one.

    Attributes:
        sequences: by their slots.
        rows: how many there are, free ones included.
        suffixes: the rows' tokens of layers that keep all; None if the model has none.
        windows: those of layers with a window, by its length.
        groups: who reads which spans; None where that must be looked at anew.
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
    """What is fixed for a loaded model and its budget.

    Attributes:
        exact: every call has `EXACT_ROWS` rows, and each attends by itself.
        batches: sequences decode as rows of one batch; without it one by one.
        contiguous: a single sequence's keys are copied into one piece before its first step: the
            model asks for them so, and would copy them in each step.
        chunked: lengths of those windows that are emptied when a chunk begins.
        gathers: each layer puts all keys of all rows together.
        own: tokens of its prefix's end, at most, that a row copies so as to read them as its own:
            many short spans of single rows cost more to read one by one than the copy takes.
        row_limit: tokens of its own after which a row is packed.
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
