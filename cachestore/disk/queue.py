"""Threads of the disk tier, the jobs that they do, and the results."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import structlog

from ..record import Record
from .files import Payload

State = Literal["on", "suspended", "off"]
Run = Callable[[], object]

log = structlog.get_logger()


class WriteJob(NamedTuple):
    """A write."""

    token: object  # the owner's; comes back with the result
    record: Record  # without its id, name, size and checksum
    payload: Payload

    @property
    def nbytes(self) -> int:
        """Bytes in the queue: tensors and tokens."""
        return self.payload.nbytes + len(self.record.tokens)


class Written(NamedTuple):
    """The result of a job; without a record it was not kept."""

    token: object
    record: Record | None


@dataclass(frozen=True)
class DiskStatistics:
    """State of the tier, its files and queue, and counts since the start."""

    state: State
    reason: str  # if the state is not "on"
    nbytes: int
    records: int
    queued_bytes: int  # with the write under way
    writes: int
    failures: int  # of writes, reads, transactions and removals


class Worker:
    """A thread, started by the owner, that does jobs. Methods are safe to call from any thread."""

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()  # guards the queue; an owner may guard more with it
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.closed = False
        self._abandoned = False
        self._jobs: deque[tuple[Run, Run | None]] = deque()
        self._added = self._done = 0

    def add(self, run: Run, refuse: Run | None = None) -> bool:
        """Queue a job; False once closed. `refuse` is called in its place if it is not done."""
        with self.changed:
            if not self.closed:
                self._jobs.append((run, refuse))
                self._added += 1
                self.changed.notify_all()
            return not self.closed

    def refuse(self, *, all_jobs: bool = False) -> None:
        """Forget the waiting jobs that can be refused, or all."""
        with self.changed:
            waiting, self._jobs = self._jobs, deque()
            for run, refuse in waiting:
                if refuse is not None:
                    refuse()
                elif not all_jobs:
                    self._jobs.append((run, refuse))
            self._done += len(waiting) - len(self._jobs)
            self.changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all jobs so far are done; False when that takes over `timeout` s."""
        with self.changed:
            last = self._added
            return self.changed.wait_for(lambda: self._done >= last, timeout)

    def end(self, *, abandon: bool = False) -> None:
        """Take no more jobs; with `abandon`, refuse all that wait, and give up the present one."""
        with self.changed:
            self.closed = True
            self._abandoned = self._abandoned or abandon
            if abandon:
                self.refuse(all_jobs=True)
            self.changed.notify_all()

    def is_abandoned(self) -> bool:
        """Return True if the present job shall be given up."""
        return self._abandoned

    def ended(self) -> None:
        """Called on the thread when it ends."""

    def failed(self) -> None:
        """Called on the thread when a job has raised an exception."""

    def _work(self) -> None:
        try:
            while (run := self._take()) is not None:
                try:
                    run()
                except Exception:
                    log.exception("a job of the disk cache failed")
                    self.failed()
                del run
                with self.changed:
                    self._done += 1
                    self.changed.notify_all()
        finally:
            self.ended()

    def _take(self) -> Run | None:
        with self.changed:
            self.changed.wait_for(lambda: self._jobs or self.closed)
            return self._jobs.popleft()[0] if self._jobs else None
