"""What the cache holds of a model, as protocols: `models` fulfils them, `trie` moves them.

Two kinds of state, after how they can be restored:

- a *span* is token-addressable: keys and values (or latents) of consecutive tokens. It can be
  cut anywhere, and joined with its neighbour.
- a *checkpoint* is whole: the sliding-window rings and recurrent states at one offset. It is
  of use at that offset only, or a little before it while its rings have not wrapped.

Ownership is explicit, so that bytes can be counted: whoever holds one closes it, once.
"""

from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True)
class Layout:
    """What a stack's state consists of.

    Attributes:
        spans: it has token-addressable layers.
        checkpoints: it has layers that restore only as a whole.
    """

    spans: bool
    checkpoints: bool


class Span(Protocol):
    """Token-addressable state of consecutive tokens, all layers together. Immutable.

    Attributes:
        length: how many tokens.
        nbytes: what it takes in memory; its buffers are its own.
        buffers: how many these are.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)

    @property
    def nbytes(self) -> int: ...  # noqa: D102  (described above)

    @property
    def buffers(self) -> int: ...  # noqa: D102  (described above)

    def split(self, at: int) -> tuple[Self, Self]:
        """Cut into `[0, at)` and `[at, length)`. Takes ownership of itself."""
        ...

    def first(self, count: int) -> Self:
        """Keep `[0, count)` only. Takes ownership of itself."""
        ...

    def merge(self, other: Self) -> Self:
        """Join with the span that follows. Takes ownership of both."""
        ...

    def close(self) -> None:
        """Free the buffers."""
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
