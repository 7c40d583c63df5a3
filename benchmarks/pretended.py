"""State that holds nothing but its length, so that the cost of what manages it is seen."""

from collections.abc import Sequence
from typing import Any


class PretendedStorage:
    """Where pretended spans lie."""

    buffers = 1

    def __init__(self, length: int, views: "list[Pretended]") -> None:
        self.length = length
        self.views = views
        self.loan: Any = None

    def trim(self) -> None:
        """Free tokens without a view; neighbours stay together."""
        if sum(view.length for view in self.views) == self.length:
            return
        kept: list[list[Pretended]] = []
        for view in self.views:
            if kept and kept[-1][-1].adjoins(view):
                kept[-1].append(view)
            else:
                kept.append([view])
        for views in kept:
            lie_together(views)


class Pretended:
    """A span of so many tokens, some bytes each, that holds nothing.

    Args:
        length: how many tokens.
        each: bytes of one.
    """

    def __init__(self, length: int, each: int = 1) -> None:
        self.length = length
        self.each = each
        self.start = 0
        self.storage = PretendedStorage(length, [self])

    @property
    def nbytes(self) -> int:
        """Return the bytes that it pretends to take."""
        return self.each * self.length

    @property
    def buffers(self) -> int:
        """One for each storage that takes something."""
        return int(self.each > 0 and self.storage.views[0] is self)

    def adjoins(self, other: "Pretended") -> bool:
        """Return True if another one is next in the same storage."""
        return self.storage is other.storage and self.start + self.length == other.start

    def split(self, at: int) -> "tuple[Pretended, Pretended]":
        """Cut in two."""
        place = self.storage.views.index(self)
        parts = Pretended(at, self.each), Pretended(self.length - at, self.each)
        for part, start in zip(parts, (self.start, self.start + at), strict=True):
            part.storage, part.start = self.storage, start
        self.storage.views[place : place + 1] = parts
        return parts

    def join(self, following: "Sequence[Pretended]") -> None:
        """Lie in one storage with what follows."""
        spans = [self, *following]
        left = {id(span.storage): span.storage for span in spans}.values()
        for storage in left:
            storage.views = [view for view in storage.views if view not in spans]
        lie_together(spans)
        for storage in left:
            storage.trim()

    def merge(self, other: "Pretended") -> "Pretended":
        """Become one with the next."""
        if not self.adjoins(other):
            self.join([other])
        self.length += other.length
        self.storage.views.remove(other)
        return self

    def close(self, *, trim: bool = True) -> None:
        """Give it back."""
        self.storage.views.remove(self)
        if trim:
            self.storage.trim()


def lie_together(spans: Sequence[Pretended]) -> None:
    """Put consecutive spans into one new storage."""
    storage, start = PretendedStorage(sum(span.length for span in spans), list(spans)), 0
    for span in spans:
        span.storage, span.start = storage, start
        start += span.length
