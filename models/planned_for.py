"""Input of planning, in figures: sequences, the batch, and the rules of a model.

Protocols, so that plans are made and tested without MLX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from .backends import Limits
from .memory_profile import StateSizes
from .moves import Seat
from .step_plan import PrefixGroup

if TYPE_CHECKING:
    from .load.probe import Probed

_LEAST_CLASS = 64  # tokens; below these, overhead is all there is
_ROWS_SHARE = 4  # the rows' own tokens take at most one part in this many


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
        prefix: spans that it leases, oldest first.
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
    def suffix_length(self) -> int: ...  # noqa: D102
    @property
    def slot(self) -> int | None: ...  # noqa: D102
    @property
    def is_contiguous(self) -> bool: ...  # noqa: D102
    @property
    def suffix_is_full(self) -> bool: ...  # noqa: D102
    @property
    def windows_change(self) -> bool: ...  # noqa: D102


class OwnTokens(Protocol):
    """Own tokens of the batch's rows, of layers that keep all; `LengthClasses` is the real one.

    Attributes:
        seats: of each row, by its slot.
        shapes: rows and positions of each class, by its limit.
    """

    @property
    def seats(self) -> Mapping[int, Seat]: ...  # noqa: D102  (described above, like that below)
    @property
    def shapes(self) -> Mapping[int, tuple[int, int]]: ...  # noqa: D102

    def length(self, slot: int) -> int:
        """Number of own tokens of a row."""
        ...


class Buffer(Protocol):
    """Own tokens of the batch's rows, of layers with a window; a `RingBuffer`.

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
        own: the rows' tokens of layers that keep all; None if the model has none.
        windows: those of layers with a window, by its length.
        groups: rows that read the same spans; None after a change.
    """

    @property
    def sequences(self) -> Mapping[int, State]: ...  # noqa: D102  (described above, as those below)
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def own(self) -> OwnTokens | None: ...  # noqa: D102
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
        gathers: each layer puts all keys of all rows together: there is one class.
        least_class: the most own tokens of a row in the class of the shortest ones.
        row_multiple: of rows; see `rows_for`.
        overlaps: two steps may be under way at once.
    """

    exact: bool = False
    batches: bool = True
    contiguous: bool = False
    chunked: frozenset[int] = frozenset()
    gathers: bool = False
    least_class: int = 1024
    row_multiple: int = 1
    overlaps: bool = False


def rules_of(limits: Limits, probed: "Probed", *, exact: bool) -> Rules:
    """Rules that the model and the device determine, before the budget is known.

    Args:
        limits: of the device.
        probed: how its sequences decode together. One that decodes them one by one reads keys in
            one piece, however they are cut.
        exact: see `ModelRunner`.
    """
    return Rules(
        exact=exact,
        batches=probed.one_by_one is None,
        contiguous=limits.contiguous or not probed.reads_parts,
        gathers=probed.mask_axes > 0,
        row_multiple=limits.row_multiple,
        overlaps=limits.overlaps,
    )


def rules_within(rules: Rules, budget: int, sizes: StateSizes, *, max_batch: int) -> Rules:
    """Limit the rows of short sequences to a budget.

    Args:
        rules: without a budget.
        budget: bytes of all state.
        sizes: of state.
        max_batch: the most sequences that run at once.
    """
    limit = rules.least_class
    while limit > _LEAST_CLASS and limit * sizes.token * max_batch * _ROWS_SHARE > budget:
        limit //= 2
    return replace(rules, least_class=limit)
