"""Who waits, who runs, who is preempted, and who starts next."""

import enum
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from ..cachestore.restoration import Known
from .queue import ConversationQueue
from .sequence import Sequence

_READ_AHEAD = 8
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
        if reading == _READ_AHEAD:
            break
    return Selection(None, None, reading)


class PrefixLookup(Protocol):
    """Knows what is in the cache; `KVCacheManager` is the real one."""

    def shall_wait(self, sequence: Sequence, running: Iterable[Sequence], /) -> bool:
        """Whether another's prefill is about to bring much of a prompt into the cache."""
        ...

    def page_in(self, sequence: Sequence, /) -> bool:
        """Whether to wait until what is on disk of a sequence's tokens is read."""
        ...

    def known(self, sequence: Sequence, /) -> Known:
        """How much of a sequence is in the cache."""
        ...


class Room(Protocol):
    """Knows what fits; `MemoryPlanner` is the real one."""

    def admits(self, sequence: Sequence, known: Known, running: list[Sequence], /) -> bool:
        """Whether a sequence can start beside those that run."""
        ...


class Scheduler:
    """Holds every sequence between its arrival and its end.

    Preempted sequences start before those that wait, and those that wait in their order.

    Attributes:
        waiting: not started yet, in order within each conversation.
        running: at work, oldest first.
        preempted: without state until there is memory for them, oldest first.

    Args:
        waiting: the queue.
        kv_cache: knows what is in the cache.
        memory: knows what fits.
        max_batch: the most sequences that run at once.
    """

    def __init__(
        self,
        waiting: ConversationQueue,
        kv_cache: PrefixLookup,
        memory: Room,
        max_batch: int,
    ) -> None:
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self._kv_cache = kv_cache
        self._memory = memory
        self._max_batch = max_batch
        self._last = Selection(None, None, 0)

    @property
    def idle(self) -> bool:
        """Whether it holds no sequence."""
        return not (self.running or self.preempted or len(self.waiting))

    @property
    def reading(self) -> bool:
        """Whether a sequence waits for state from the disk."""
        return self._last.reading > 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.running or sequence in self.preempted

    def start_next(self) -> Sequence | None:
        """Let the next sequence run, if one may."""
        if len(self.running) >= self._max_batch:
            return None
        sequence = self._resume() if self.preempted else self._claim()
        if sequence is not None:
            self.running.append(sequence)
        return sequence

    def stuck(self) -> Sequence | None:
        """The sequence that lacks memory though none runs; it no longer waits."""
        short = self._last.short
        if self.running or short is None:
            return None
        if short in self.preempted:
            return short
        if not self.waiting.claim(short):
            return None
        self.preempted.append(short)
        return short

    def victim(self) -> Sequence | None:
        """The running sequence that is preempted next: the youngest, but not the only one."""
        return self.running[-1] if len(self.running) > 1 else None

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the preempted ones; the oldest there resumes first."""
        self.running.remove(sequence)
        self.preempted.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, and let its conversation go on."""
        for among in (self.running, self.preempted):
            if sequence in among:
                among.remove(sequence)
        self.waiting.release(sequence)

    def _resume(self) -> Sequence | None:
        self._last = select(self.preempted[:1], self._readiness)
        if self._last.start is not None:
            self.preempted.remove(self._last.start)
        return self._last.start

    def _claim(self) -> Sequence | None:
        """Take the next sequence from the queue.

        To look at one reads the cache and starts the disk: the queue is not locked meanwhile,
        and the chosen one may have left it since.
        """
        candidates = self.waiting.candidates()
        while True:
            self._last = select(candidates, self._readiness)
            chosen = self._last.start
            if chosen is None or self.waiting.claim(chosen):
                return chosen
            candidates.remove(chosen)

    def _readiness(self, sequence: Sequence) -> Readiness:
        if self._kv_cache.shall_wait(sequence, self.running):
            return Readiness.PREFIX
        if self._kv_cache.page_in(sequence):
            return Readiness.DISK
        if self._memory.admits(sequence, self._kv_cache.known(sequence), self.running):
            return Readiness.READY
        return Readiness.MEMORY
