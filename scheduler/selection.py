"""Which candidate starts next: a pure choice among those that are looked at in order."""

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .sequence import Sequence
from .times import Activity

READ_AHEAD = 8
"""Sequences that wait for the disk at once; those after them are not looked at yet."""


class Readiness(enum.Enum):
    """Whether a sequence can start, and else what it waits for."""

    READY = enum.auto()
    PREFIX = enum.auto()
    """Another sequence is computing much of its prompt."""
    DISK = enum.auto()
    """Its state is being read."""
    MEMORY = enum.auto()
    """There is no room for it beside those that run."""


WAITS_FOR = {
    Readiness.PREFIX: Activity.PREFIX,
    Readiness.DISK: Activity.DISK,
    Readiness.MEMORY: Activity.MEMORY,
}


class Selection(NamedTuple):
    """What `select` found.

    Attributes:
        start: the sequence that starts next, or None.
        short: the sequence that lacks memory and that none may overtake, or None.
        reading: sequences that wait for the disk.
    """

    start: Sequence | None
    short: Sequence | None
    reading: int


def select(candidates: Iterable[Sequence], readiness: Callable[[Sequence], Readiness]) -> Selection:
    """Choose who starts next: the first candidate that is ready.

    Those that wait for the disk or for another's prefill are passed over, and one that lacks
    memory is not. Candidates after the chosen one are not looked at.

    Args:
        candidates: in their order.
        readiness: of one of them.
    """
    reading = 0
    for sequence in candidates:
        found = readiness(sequence)
        if found is Readiness.READY:
            return Selection(sequence, None, reading)
        if found is Readiness.MEMORY:
            return Selection(None, sequence, reading)
        reading += found is Readiness.DISK
        if reading == READ_AHEAD:
            break
    return Selection(None, None, reading)
