"""The disk tier: state that outlives memory and restarts, in files that an index describes.

The owner, one thread, decides what is written and deleted; the tier's threads do it and report.
One thread writes, one verifies files before they are read: neither blocks the owner, and no disk
failure reaches it as an exception. State reported as written survives the death of the process at
any moment: a record is inserted after its file is complete, and removed before it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import structlog

from ..errors import DiskTierError
from ..record import Pin, Record
from .recovery import Collected, open_folder
from .verifier import DiskVerifier, Verified
from .writer import DiskStatistics, DiskWriter, WriteJob, WriteQueue, Written

log = structlog.get_logger()

_clock = time.monotonic


_GRACE = 2.0  # seconds that the threads get to notice that they shall give up
_WARN_EVERY = 60.0  # seconds between warnings of what may happen thousands of times


class DiskTier:
    """An open folder. Its methods are the owner's, except `statistics`, which is anyone's.

    Only `flush` and `close` wait for a disk.

    Args:
        folder: created if need be, private to the user.
        fingerprint: of the loaded model. Records of others are collected at the start.
        queue_bytes: limit of waiting writes; a larger job is taken when nothing waits.
        wake: called on the tier's threads when `completed` or a future has something new.
        retry_after: seconds until a write is tried again after one failed.

    Attributes:
        records: those found at the start, ascending by start.
        collected: files removed at the start.

    Raises:
        FolderInUseError: another tier holds the folder.
        DiskTierError: the folder cannot be used. The message says why, and what to do.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        queue_bytes: int,
        wake: Callable[[], None] = lambda: None,
        retry_after: float = 60.0,
    ) -> None:
        self.folder = folder.absolute()
        self.queue_bytes = queue_bytes
        opened = open_folder(self.folder, fingerprint)
        self.records: list[Record] = opened.records
        self.collected: Collected = opened.collected
        self._pins = opened.pins
        self._queue = WriteQueue(queue_bytes, retry_after, opened.records)
        self._writer = DiskWriter(opened, self._queue, fingerprint, wake)
        self._guard = threading.Lock()  # guards the two that follow
        self._unread = 0
        self._silent_until = 0.0
        self._verifier = DiskVerifier(
            self.folder, wake, self._writer.folder_is_there, self.cannot_read
        )
        self._threads = (self._writer.thread, self._verifier.thread)
        for thread in self._threads:
            thread.start()

    def write(self, job: WriteJob) -> bool:
        """Queue a write; False if too much waits, or nothing is written at present.

        True promises one `Written` for it. The payload is released on the writer's thread.
        """
        return self._queue.write(job)

    def completed(self) -> list[Written]:
        """Take the results since the last call, in the order of the jobs."""
        return self._queue.completed()

    def verify(self, records: Sequence[Record]) -> Future[Verified]:
        """Read files, and compare them with what was written; the result has those that differ.

        A DiskTierError if the tier is closed first.
        """
        return self._verifier.verify(records)

    def cannot_read(self, reason: str) -> None:
        """Note that a file cannot be read at present. Safe to call from any thread."""
        self._queue.fail()
        with self._guard:
            self._unread += 1
            now = _clock()
            if now < self._silent_until:
                return
            count, self._unread = self._unread, 0
            self._silent_until = now + _WARN_EVERY
        log.warning("state on disk cannot be read at present", reason=reason, count=count)

    def path(self, record: Record) -> Path:
        """Where a record's file is."""
        return self.folder / record.name

    def delete(self, records: Iterable[Record]) -> None:
        """Remove records and their files, after what was queued before."""
        self._writer.delete(records)

    def touch(self, ids: Iterable[int], used: int) -> None:
        """Set the recency counters of records; several calls may share a transaction."""
        self._queue.touch(ids, used)

    def pin(self, name: str, tenant: str, tokens: bytes) -> None:
        """Have the index remember a path, in place of the tenant's older one of that name."""
        self._writer.pin(Pin(name, tenant, tokens))

    def unpin(self, name: str, tenant: str) -> None:
        """Have the index forget a path."""
        self._writer.unpin(name, tenant)

    def pins(self) -> list[Pin]:
        """The model's pins as they were at the start."""
        return list(self._pins)

    def turn_off(self, reason: str) -> None:
        """Write nothing any more, for good; what waits is refused."""
        self._queue.leave("off", reason)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was queued is done; False when that takes over `timeout` s."""
        deadline = time.monotonic() + timeout
        if not self._queue.flush(timeout):
            return False
        try:
            self._verifier.verify([]).result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return False
        except DiskTierError:  # closed: nothing waits there
            pass
        return True

    def close(self, timeout: float) -> None:
        """Finish what is queued, but give up after `timeout` s. Idempotent.

        Returns at most two seconds later than that. The folder is given up when the writer
        has ended: if a disk never answers, that is when the process does.
        """
        self._queue.close()
        self._verifier.close()
        self._join(timeout)
        self._queue.abandon()
        self._verifier.abandon()
        self._join(_GRACE)
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the disk cache's threads are left behind: the disk does not answer")

    def statistics(self) -> DiskStatistics:
        """Describe the tier."""
        return self._queue.statistics()

    def _join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
