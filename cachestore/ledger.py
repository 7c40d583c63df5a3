"""One ledger for every byte that model state takes, whoever holds it. Pure."""

import enum
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Size:
    """Memory of some state: bytes, and allocations, of which Metal allows a process 499,000."""

    nbytes: int = 0
    buffers: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.nbytes + other.nbytes, self.buffers + other.buffers)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.nbytes - other.nbytes, self.buffers - other.buffers)

    def __neg__(self) -> "Size":
        return Size(-self.nbytes, -self.buffers)

    def within(self, limit: "Size") -> bool:
        """Whether it is no more than `limit`, in both respects."""
        return self.nbytes <= limit.nbytes and self.buffers <= limit.buffers


NOTHING = Size()


class Kind(enum.StrEnum):
    """What memory is taken for."""

    KV = "kv"
    """Spans in a trie: prefixes."""
    CHECKPOINT = "checkpoint"
    """Whole states, in a trie or captured by a request that runs."""
    TAIL = "tail"
    """What running sequences have of their own."""
    PAGING = "paging"
    """On its way to the disk, and forgotten by the trie meanwhile."""
    TRANSIENT = "transient"
    """Reserved for what the step that runs computes and does not keep."""


class Account:
    """State that one owner holds of one kind. Closing it gives everything back."""

    def __init__(self, ledger: "Ledger", kind: Kind) -> None:
        self.size = NOTHING
        self._ledger = ledger
        self._kind = kind

    def add(self, size: Size) -> None:
        """Record more, or less with a negative size."""
        self.size += size
        self._ledger.record(self._kind, size)

    def set(self, size: Size) -> None:
        """Say anew what it holds."""
        self.add(size - self.size)

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        self.set(NOTHING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ledger:
    """Sum of all accounts, by kind; each is a part of `above` too. Belongs to the MLX thread."""

    def __init__(self, above: "Ledger | None" = None) -> None:
        self.total = NOTHING
        self._above = above
        self._held = dict.fromkeys(Kind, NOTHING)

    def account(self, kind: Kind) -> Account:
        """Open an account for one owner."""
        return Account(self, kind)

    def record(self, kind: Kind, size: Size) -> None:
        """Change what is held; accounts call it."""
        self._held[kind] += size
        self.total += size
        if self._above is not None:
            self._above.record(kind, size)

    def held(self, kind: Kind) -> Size:
        """What all accounts of a kind hold together."""
        return self._held[kind]

    def by_kind(self) -> dict[Kind, Size]:
        """What is held of each kind, at this moment."""
        return dict(self._held)
