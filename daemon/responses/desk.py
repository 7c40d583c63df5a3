"""The event loop's access to stored responses: it never waits for a disk."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import structlog

from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER
from .store import ResponseStore

T = TypeVar("T")

_MOST_WAITING = 1024
_MOST_KEPT = 256  # responses that wait to be stored
_MOST_KEPT_BYTES = 64 << 20
_TIMEOUT = 60.0  # seconds that a request waits for the disk

log = structlog.get_logger()


class _Job(NamedTuple):
    """Some work, and the bytes that it would store; None for a look."""

    work: Callable[[ResponseStore], Any]
    nbytes: int | None


class ResponseDesk:
    """Runs work on stored responses on a thread of its own, in order.

    It owns the waiting jobs. A look is dropped with its request. Responses that wait to be stored
    have a bound, in number and in bytes; one beyond it is not stored, nor is one that comes after
    the desk has closed, and the log says so.

    Args:
        store: of responses; any thread may call it, too.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "umbel-responses")
        self._looking = 0
        self._lock = threading.Lock()  # for the next three
        self._jobs: dict[Future[Any], _Job] = {}
        self._is_running = False
        self._is_closed = False

    async def look(self, work: Callable[[ResponseStore], T]) -> T:
        """Run work that a request waits for.

        Raises:
            UnavailableError: too many wait already, the disk cannot be read, or the desk has
                closed.
        """
        if self._looking >= _MOST_WAITING:
            message = "too many requests for stored responses wait; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER)
        self._looking += 1
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await asyncio.wrap_future(self._submit(_Job(work, None)))
        except TimeoutError as error:
            message = "stored responses were not read in time; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error
        finally:
            self._looking -= 1

    async def keep(self, work: Callable[[ResponseStore], None], nbytes: int) -> None:
        """Store about so many bytes, and wait; the answer goes on if that fails or takes long."""
        stored = self.leave(work, nbytes)
        if stored is None:
            return
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        stored.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        try:
            async with asyncio.timeout(_TIMEOUT):
                await done.wait()
        except TimeoutError:
            log.warning("a response is not stored in time", seconds=_TIMEOUT)

    def leave(self, work: Callable[[ResponseStore], None], nbytes: int) -> "Future[None] | None":
        """Store about so many bytes without waiting; None if they will not be stored."""
        try:
            stored = self._submit(_Job(work, nbytes))
        except UnavailableError as error:
            log.warning("a response is not stored", reason=str(error))
            return None
        stored.add_done_callback(_report)
        return stored

    def _submit(self, job: _Job) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
            if job.nbytes is not None:
                self._check_room(job.nbytes)
            self._jobs[future] = job
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._run)
        future.add_done_callback(self._forget)
        return future

    def _check_room(self, nbytes: int) -> None:
        kept = [job.nbytes for job in self._jobs.values() if job.nbytes is not None]
        if len(kept) >= _MOST_KEPT or sum(kept) + nbytes > _MOST_KEPT_BYTES:
            message = "too many responses wait to be stored"
            raise UnavailableError(message, retry_after=RETRY_AFTER)

    def _forget(self, future: "Future[Any]") -> None:
        with self._lock:
            self._jobs.pop(future, None)

    def _run(self) -> None:
        while (following := self._next()) is not None:
            future, work = following
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(self.store))
            except BaseException as error:  # noqa: BLE001  (the waiting request gets it)
                future.set_exception(error)

    def _next(self) -> "tuple[Future[Any], Callable[[ResponseStore], Any]] | None":
        with self._lock:
            future = next(iter(self._jobs), None)
            self._is_running = future is not None
            return None if future is None else (future, self._jobs.pop(future).work)

    async def close(self) -> None:
        """Take nothing more, finish the waiting jobs, and close the store."""
        with self._lock:
            self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self.store.close)


def _report(stored: "Future[None]") -> None:
    if not stored.cancelled() and (error := stored.exception()) is not None:
        log.error("a response is not stored", exc_info=error)
