"""The thread of the disk tier that writes. Nothing that fails on a disk ends it."""

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from ..errors import DiskTierError
from ..record import Pin, Record
from .files import DIGEST, identity, new_name, write_file
from .index import is_damage
from .recovery import Opened, reason_of
from .write_queue import State, Work, WriteJob, WriteQueue

log = structlog.get_logger()


class DiskWriter:
    """Does the queue's jobs, and gives the folder up when it ends.

    Args:
        opened: the folder; it is this object's from now on.
        queue: what to do.
        fingerprint: of the model whose records these are.
        wake: called after a write was answered.
    """

    def __init__(
        self, opened: Opened, queue: WriteQueue, fingerprint: str, wake: Callable[[], None]
    ) -> None:
        self._folder = opened.folder
        self._index = opened.index
        self._lock_fd = opened.lock_fd
        self._identity = opened.identity
        self._queue = queue
        self._fingerprint = fingerprint
        self._wake = wake
        self._unremoved: set[int] = set()  # rows that could not be removed with their files
        self.thread = threading.Thread(target=self._run, name="umbel-disk-writer", daemon=True)

    def delete(self, records: Iterable[Record]) -> None:
        """Queue the removal of records and their files."""
        if found := list(records):
            self._queue.call(partial(self._delete, found))

    def pin(self, pin: Pin) -> None:
        """Queue the keeping of a pin."""
        self._queue.call(lambda: self._transact(lambda: self._index.pin(self._fingerprint, pin)))

    def unpin(self, name: str, tenant: str) -> None:
        """Queue the forgetting of a pin."""
        forget = partial(self._index.unpin, self._fingerprint, name, tenant)
        self._queue.call(lambda: self._transact(forget))

    def folder_is_there(self) -> bool:
        """Look whether folder, lock and index are still those that were opened.

        If not, the tier is off: the rows describe files that are elsewhere, and another tier
        may have the folder.
        """
        try:
            if identity(self._folder) == self._identity is not None:
                return True
        except OSError:
            return True  # as far as can be told
        reason = f"{self._folder} was removed or replaced: restart umbel to use it again"
        self._leave("off", reason)
        return False

    # -- on the thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step(self._queue.take()):
                pass
        finally:
            self._index.close()
            os.close(self._lock_fd)

    def _step(self, work: Work | None) -> bool:
        """Do what was taken from the queue; False when there is nothing and will be nothing."""
        if work is None:
            return False
        try:
            if work.touched:
                self._transact(lambda: self._index.touch(work.touched))
            if isinstance(work.job, WriteJob):
                self._answer(work.job)
            elif work.job is not None:
                work.job()
        except Exception:
            log.exception("a job of the disk cache failed")
            self._queue.fail()
        finally:
            self._queue.done(work)
        return True

    def _answer(self, job: WriteJob) -> None:
        """Write, and say what came of it."""
        record, failure = None, None
        try:
            record = self._write(job)
        except (OSError, sqlite3.Error) as error:
            failure = _meaning(error)  # not the error: its traceback would keep the payload
        except DiskTierError:  # the tier is being closed
            pass
        except Exception:
            log.exception("a payload cannot be written")
            self._queue.fail()
        self._queue.answer(job, record)
        if failure is not None:
            self._suspend(*failure)
        elif record is not None and self._unremoved:  # now there is room for that
            self._transact(self._remove_rows)
        self._wake()

    def _write(self, job: WriteJob) -> Record:
        """Write the file, then its row."""
        if identity(self._folder) != self._identity:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
        name = new_name()
        metadata = job.payload.metadata | {DIGEST: job.digest.hex()}
        nbytes, checksum = write_file(
            self._folder,
            name,
            job.payload._replace(metadata=metadata),
            self._queue.is_abandoned,
        )
        record = _record_of(job, name, nbytes, checksum)
        try:
            return self._index.add(self._fingerprint, record)
        except BaseException:
            (self._folder / name).unlink(missing_ok=True)
            raise

    def _delete(self, records: list[Record]) -> None:
        """Remove the rows, then the files.

        The files go even if the rows cannot: a full disk has no room for the transaction, and
        could otherwise never be freed. A row without its file is collected at the next start.
        """
        self._unremoved.update(record.id for record in records)
        self._transact(self._remove_rows)
        for record in records:
            try:
                (self._folder / record.name).unlink(missing_ok=True)
            except OSError as error:
                self._queue.fail()
                log.warning("a file of the disk cache stays", reason=reason_of(error))
        self._queue.removed(records)

    def _remove_rows(self) -> None:
        self._index.remove(self._unremoved)
        self._unremoved.clear()

    def _transact(self, transaction: Callable[[], None]) -> None:
        """Change the index; a failure suspends writing."""
        try:
            transaction()
        except sqlite3.Error as error:
            self._suspend(*_meaning(error))

    def _suspend(self, state: State, reason: str) -> None:
        self._queue.fail()
        if self.folder_is_there():
            self._leave(state, reason)

    def _leave(self, state: State, reason: str) -> None:
        if self._queue.leave(state, reason):
            log.warning("the disk cache takes nothing more", state=state, reason=reason)
        self._wake()  # what waited was refused


def _record_of(job: WriteJob, name: str, nbytes: int, checksum: bytes) -> Record:
    return Record(
        id=0,  # the index gives it one
        kind=job.kind,
        tenant=job.tenant,
        start=job.start,
        end=job.end,
        prefix=job.prefix,
        digest=job.digest,
        tokens=job.tokens,
        name=name,
        nbytes=nbytes,
        checksum=checksum,
        used=job.used,
    )


def _meaning(error: OSError | sqlite3.Error) -> tuple[State, str]:
    """Return the state after a failure, and why: a damaged index is never written to."""
    if isinstance(error, sqlite3.Error) and is_damage(error):
        return "off", f"its index is damaged ({error}): restart umbel to begin anew"
    return "suspended", reason_of(error)
