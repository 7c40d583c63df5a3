"""Threads of the disk tier, and the queue of its writer: jobs, results, and the tier's state.

States: "on"; "suspended" after a write failed, until one succeeds again, tried at most every
`retry_after` seconds; "off" once the folder is gone or the tier is closed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import structlog

from ..record import Record
from .files import Payload

State = Literal["on", "suspended", "off"]
Run = Callable[[], None]

log = structlog.get_logger()


class WriteJob(NamedTuple):
    """A write. `token` is the owner's and comes back with the result.

    `record` lacks its id, name, size and checksum: they are known once the file is written.
    """

    token: object
    record: Record
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
    """State of the tier (with a reason if not on), its files and queue, and counts since the start.

    `queued_bytes` includes the write under way. `failures` are of writes, reads, transactions and
    removals.
    """

    state: State
    reason: str
    nbytes: int
    records: int
    queued_bytes: int
    writes: int
    failures: int


class Worker:
    """A thread that does jobs. No job that fails ends it. All methods are for any thread.

    Attributes:
        changed: guards the queue; an owner may guard more with it.
        thread: to be started by the owner.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
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


class WriteQueue(Worker):
    """Writes in order, their results, and the state. All methods are for any thread.

    `queue_bytes` limits the waiting writes; a larger one is taken when none waits. `do` is called
    on the thread with each, and answers it.
    """

    def __init__(
        self,
        queue_bytes: int,
        retry_after: float,
        found: Iterable[Record],
        do: Callable[[WriteJob], None],
    ) -> None:
        super().__init__("umbel-disk-writer")
        self.queue_bytes = queue_bytes
        self._retry_after = retry_after
        self._do = do
        self._completed: list[Written] = []
        self._sizes = {record.id: record.nbytes for record in found}
        self._state: State = "on"
        self._reason = ""
        self._retry_at = 0.0  # of the monotonic clock: the other one jumps
        self._queued = self._writes = self._failures = 0

    def write(self, job: WriteJob) -> bool:
        """Queue a write; False if too much waits, or nothing is written at present.

        True promises one `Written` for it. The payload is released on the writer's thread.
        """
        with self.changed:
            full = self._queued > 0 and self._queued + job.nbytes > self.queue_bytes
            resting = self._state == "suspended" and time.monotonic() < self._retry_at
            if full or resting or self.closed or self._state == "off":
                return False
            self._queued += job.nbytes
            return self.add(partial(self._do, job), partial(self.answer, job, None))

    def call(self, job: Callable[[], None]) -> None:
        """Queue something else than a write. Forgotten once the tier is off."""
        with self.changed:
            if self._state != "off":
                self.add(job)

    def answer(self, job: WriteJob, record: Record | None) -> None:
        """Note the result of a write. One that was kept ends a suspension.

        Its payload is released first: the owner counts on its memory.
        """
        nbytes = job.nbytes
        job.payload.release()
        with self.changed:
            self._completed.append(Written(job.token, record))
            self._queued -= nbytes
            if record is not None:
                self._sizes[record.id] = record.nbytes
                self._writes += 1
                if self._state == "suspended":
                    self._state, self._reason = "on", ""

    def completed(self) -> list[Written]:
        """Take the results since the last call, in the order of the jobs."""
        with self.changed:
            results, self._completed = self._completed, []
        return results

    def removed(self, records: Iterable[Record]) -> None:
        """Note that records are no longer there."""
        with self.changed:
            for record in records:
                self._sizes.pop(record.id, None)

    def failed(self) -> None:
        """Count a failure."""
        with self.changed:
            self._failures += 1

    def leave(self, state: State, reason: str) -> bool:
        """Become suspended, or off, and refuse waiting writes; True if state or reason changed."""
        with self.changed:
            if self._state == "off":
                return False
            news = (self._state, self._reason) != (state, reason)
            # Other failures during a suspension must not prolong it for ever.
            if self._state != "suspended" or time.monotonic() >= self._retry_at:
                self._retry_at = time.monotonic() + self._retry_after
            self._state, self._reason = state, reason
            self.refuse()
            return news

    def statistics(self) -> DiskStatistics:
        """Describe the queue and what is on disk."""
        with self.changed:
            return DiskStatistics(
                state="off" if self.closed else self._state,
                reason="closed" if self.closed else self._reason,
                nbytes=sum(self._sizes.values()),
                records=len(self._sizes),
                queued_bytes=self._queued,
                writes=self._writes,
                failures=self._failures,
            )
