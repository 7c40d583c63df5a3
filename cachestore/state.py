"""What the cache holds of a model, as protocols: `models` fulfils them, `trie` moves them.

Two kinds of state, after how they can be restored:

- a *span* is token-addressable: keys and values (or latents) of consecutive tokens. It can be
  cut anywhere, and joined with its neighbour. It is a view of a *storage*, which several spans
  of one path may share: what nodes a path has says nothing of how many pieces its state is in.
- a *checkpoint* is whole: the sliding-window rings and recurrent states at one offset. It is
  of use at that offset only, or a little before it while its rings have not wrapped.

Ownership is explicit, so that bytes can be counted: whoever holds one closes it, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from .spans import Loan


@dataclass(frozen=True)
class Layout:
    """What a stack's state consists of.

    Attributes:
        spans: it has token-addressable layers.
        checkpoints: it has layers that restore only as a whole.
    """

    spans: bool
    checkpoints: bool


class Storage(Protocol):
    """Where spans lie: consecutive tokens in buffers that nobody writes.

    Attributes:
        length: how many tokens.
        buffers: how many buffers.
        views: the open spans that lie there, in order.
        loan: if another thread reads it; `loans` alone writes this.
    """

    loan: "Loan | None"

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)

    @property
    def buffers(self) -> int: ...  # noqa: D102  (described above)

    @property
    def views(self) -> "Sequence[Span]": ...  # noqa: D102  (described above)

    def trim(self) -> None:
        """Free what nobody views: what stays is copied, and viewed there, neighbours together."""
        ...


class Span(Protocol):
    """Token-addressable state of consecutive tokens, all layers together.

    What it holds does not change; where it lies may.

    Attributes:
        length: how many tokens.
        nbytes: its share of its storage.
        buffers: the storage's buffers, if it is the first that views it; else 0.
        storage: where it lies.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)

    @property
    def nbytes(self) -> int: ...  # noqa: D102  (described above)

    @property
    def buffers(self) -> int: ...  # noqa: D102  (described above)

    @property
    def storage(self) -> Storage: ...  # noqa: D102  (described above)

    def adjoins(self, other: Self) -> bool:
        """Whether another span is what follows in the same storage."""
        ...

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`, without a copy. Takes ownership of itself."""
        ...

    def join(self, following: Sequence[Self]) -> None:
        """Lie in one new storage with the spans that follow. Copies them.

        Others that view the storages where they were are copied into ones of their own.
        """
        ...

    def merge(self, other: Self) -> Self:
        """Become one with the span that follows. Takes ownership of both.

        Copies nothing where that adjoins.
        """
        ...

    def close(self, *, trim: bool = True) -> None:
        """Give it back.

        Args:
            trim: free its bytes at once. Without it somebody trims the storage afterwards: where
                several go, what stays is copied once.
        """
        ...


class Checkpoint(Protocol):
    """Whole state at one offset. Immutable.

    Attributes:
        offset: how many tokens it has seen.
        nbytes: what it takes in memory; its buffers are its own.
        buffers: how many these are.
    """

    @property
    def offset(self) -> int: ...  # noqa: D102  (described above)

    @property
    def nbytes(self) -> int: ...  # noqa: D102  (described above)

    @property
    def buffers(self) -> int: ...  # noqa: D102  (described above)

    def rewinds_to(self, offset: int) -> bool:
        """Whether it can restore an earlier offset exactly."""
        ...

    def close(self) -> None:
        """Free the buffers."""
        ...
