"""One ledger for every byte that model state takes, whatever owns it. Pure."""

import enum
from dataclasses import dataclass


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
        """True if it is no more than `limit`, in both respects."""
        return self.nbytes <= limit.nbytes and self.buffers <= limit.buffers


NOTHING = Size()
_RESERVE = 16  # a part of the budget is kept for copies: one in this many


def max_copy_bytes(budget: int) -> int:
    """The most bytes of state that are copied at a time, under a budget."""
    return budget // _RESERVE


class Kind(enum.StrEnum):
    """The use of memory."""

    KV = "kv"  # spans in a trie: prefixes
    CHECKPOINT = "checkpoint"  # whole states, in a trie or captured by a request that runs
    TAIL = "tail"  # state of running sequences that is in no trie
    PAGING = "paging"  # on its way to the disk, and forgotten by the trie meanwhile
    TRANSIENT = "transient"  # reserved for results that the running step does not keep


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
        """Record how much it holds now."""
        self.add(size - self.size)

    def close(self) -> None:
        """Give back all that it holds. Idempotent."""
        self.set(NOTHING)


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
        """Change the amount held; accounts call it."""
        self._held[kind] += size
        self.total += size
        if self._above is not None:
            self._above.record(kind, size)

    def held(self, kind: Kind) -> Size:
        """Size that all accounts of a kind hold together."""
        return self._held[kind]

    def by_kind(self) -> dict[Kind, Size]:
        """Size held of each kind, at this moment."""
        return dict(self._held)
