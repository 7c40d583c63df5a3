"""Which of those that wait are late."""

import heapq
from collections.abc import Iterator, Mapping

from .sequence import Sequence


class Deadlines:
    """A heap of the deadlines of those that wait, and of some that have left since.

    Args:
        waiting: those that wait, by their ids; it changes.
    """

    def __init__(self, waiting: Mapping[str, Sequence]) -> None:
        self._waiting = waiting
        self._heap: list[tuple[float, str]] = []

    def add(self, sequence: Sequence) -> None:
        """Note the deadline of one that waits from now on, and is among the waiting already."""
        if len(self._heap) > 2 * len(self._waiting) + 64:
            there = self._waiting.values()
            self._heap = [(each.request.deadline, each.request.id) for each in there]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (sequence.request.deadline, sequence.request.id))

    def take_late(self, now: float) -> Iterator[str]:
        """Take out the ids of those whose deadline has passed, the earliest first."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
