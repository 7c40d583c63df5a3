"""Who runs, who is paused, and who may start."""

from .memory import MemoryPlanner
from .queue import ConversationQueue
from .reuse import PrefixReuse
from .sequence import Sequence

_READ_AHEAD = 8
"""Sequences that wait for the disk at once; who stands after them is not looked at yet."""


class Roster:
    """The sequences that the engine has taken from the queue, and the way in.

    Paused sequences come before those that wait, and those that wait in their order: where
    memory lacks for one, none overtakes it.

    Attributes:
        running: at work, oldest first.
        paused: without state until memory is there for them, oldest first.

    Args:
        queue: where sequences wait.
        reuse: knows what is in the cache.
        memory: knows what fits.
        max_batch: the most sequences that run at once.
    """

    def __init__(
        self, queue: ConversationQueue, reuse: PrefixReuse, memory: MemoryPlanner, max_batch: int
    ) -> None:
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self._queue = queue
        self._reuse = reuse
        self._memory = memory
        self._max_batch = max_batch
        self._reading = 0  # who wait for state from the disk
        self._held: Sequence | None = None

    @property
    def paging(self) -> bool:
        """Whether somebody waits for state from the disk."""
        return self._reading > 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.running or sequence in self.paused

    def start_next(self) -> Sequence | None:
        """Let the next sequence run, if one may."""
        if len(self.running) >= self._max_batch:
            return None
        self._held, self._reading = None, 0
        if self.paused:
            sequence = self.paused[0] if self._ready(self.paused[0]) else None
        else:
            sequence = self._claim_ready()
        if sequence is not None:
            self.paused = [other for other in self.paused if other is not sequence]
            self.running.append(sequence)
        return sequence

    def stuck(self) -> Sequence | None:
        """The sequence for which memory lacks though nobody runs; it no longer waits."""
        held = self._held
        if self.running or held is None:
            return None
        if held in self.paused:
            return held
        if not self._queue.claim(held):
            return None
        self.paused.append(held)
        return held

    def youngest(self) -> Sequence | None:
        """Who is paused next; None if that would leave nobody."""
        return self.running[-1] if len(self.running) > 1 else None

    def pause(self, sequence: Sequence) -> None:
        """Move a running sequence to the paused ones; the oldest there resumes first."""
        self.running.remove(sequence)
        self.paused.insert(0, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, and let its conversation go on."""
        for among in (self.running, self.paused):
            if sequence in among:
                among.remove(sequence)
        self._queue.release(sequence)

    def _claim_ready(self) -> Sequence | None:
        """Take the oldest sequence that is ready from the queue.

        Looking at it reads the cache and starts the disk: the queue is not locked meanwhile.
        """
        for sequence in self._queue.candidates():
            if self._ready(sequence) and self._queue.claim(sequence):
                return sequence
        return None

    def _ready(self, sequence: Sequence) -> bool:
        if self._held is not None or self._reading >= _READ_AHEAD:
            return False
        if self._reuse.shall_wait(sequence, self.running):
            return False
        if self._reuse.page_in(sequence):
            self._reading += 1
            return False
        if self._memory.admits(sequence, self._reuse.known(sequence), self.running):
            return True
        self._held = sequence
        return False
