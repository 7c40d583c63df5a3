"""State of a model as protocols, which `models` implements and `trie` moves.

Two kinds of state, after how they can be restored:

- a *span* is token-addressable: keys and values (or latents) of consecutive tokens. It can be
  cut anywhere, and joined with its neighbour. It is a view of a *storage*, which several spans
  of one path may share: the number of nodes of a path is not the number of pieces of its state.
- a *checkpoint* is whole: the sliding-window rings and recurrent states at one offset. It is
  of use at that offset only, or a little before it while its rings have not wrapped.

Ownership is explicit, so that bytes can be counted: its owner closes it, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from .spans import Loan


@dataclass(frozen=True)
class Layout:
    """Kinds of layers of a stack: addressable by token, restorable only as a whole."""

    spans: bool
    checkpoints: bool


class State(Protocol):
    """State in memory."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def buffers(self) -> int:
        """Buffers; those of a storage count for the first span that views it."""


class Storage(Protocol):
    """Consecutive tokens in buffers that are never written; spans are views of it."""

    loan: "Loan | None"  # while another thread reads it; `spans` alone sets it

    @property
    def length(self) -> int:
        """Tokens."""

    @property
    def buffers(self) -> int:
        """Buffers of all its tokens."""

    @property
    def views(self) -> "Sequence[Span]":
        """Open spans that lie there, in order."""

    def trim(self) -> None:
        """Free what no span views: what stays is copied, neighbours together."""


class Span(State, Protocol):
    """State of consecutive tokens, all layers together. Its contents stay; its place may change."""

    @property
    def length(self) -> int:
        """Tokens."""

    @property
    def storage(self) -> Storage:
        """Where it lies."""

    def adjoins(self, other: Self) -> bool:
        """True if another span follows in the same storage."""

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`, without a copy. Takes ownership of itself."""

    def join(self, following: Sequence[Self]) -> None:
        """Copy itself and the spans that follow to one storage; others there to their own."""

    def merge(self, other: Self) -> Self:
        """Become one with the span that follows, by a copy unless that adjoins. Owns both."""

    def close(self, *, trim: bool = True) -> None:
        """Free its bytes; without `trim`, the caller trims the storage, once for several spans."""


class Checkpoint(State, Protocol):
    """Whole state at one offset, in buffers of its own. Immutable."""

    @property
    def offset(self) -> int:
        """Tokens that it has seen."""

    def rewinds_to(self, offset: int) -> bool:
        """True if it can restore an earlier offset exactly."""

    def close(self) -> None:
        """Free the buffers."""


# State for the thread that writes it: by name the fields of a `HostTensor`, and metadata.
Exported = tuple[Mapping[str, tuple[str, tuple[int, ...], Sequence[Any]]], dict[str, str]]


class Codec(Protocol):
    """Hands state to the thread that writes files, at next to no cost, and reads files.

    Loading raises a ValueError where a file is not what was written, and an OSError where it
    cannot be read at present.
    """

    @property
    def copies(self) -> bool:
        """True if the state handed over is a copy; else its own buffers, kept until written."""

    def export_span(self, span: Any, start: int, stop: int, /) -> Exported:
        """Hand over some tokens of a span, counted from its first."""

    def export_checkpoint(self, checkpoint: Any, /) -> Exported:
        """Hand over a checkpoint."""

    def load_span(self, parts: Sequence[tuple[Path, int, int]], /) -> Any:
        """Read consecutive tokens: for each file, which of its tokens."""

    def load_checkpoint(self, path: Path, /) -> Any:
        """Read a checkpoint."""
