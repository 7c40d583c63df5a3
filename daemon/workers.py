"""The few threads that decode bodies, render templates and tokenise, off the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from ..scheduler.bounds import check_waiting
from ..scheduler.errors import DeadlineExceededError
from ..scheduler.fairness.use import Places, TenantUse
from .bodies import SMALL_BODY
from .deadlines import Wait

T = TypeVar("T")

_THREADS = 2
_THREADS_FOR_LARGE = 1

Check = Callable[[], None]
"""Called between two stages of work; raises `AbandonedError` if nobody waits for it any more."""


class AbandonedError(Exception):
    """Whoever asked for this work has left, or its time was over."""


class Workers:
    """Runs work on a bounded number of threads, and bounds how much may wait for one.

    Tenants take turns, so that none waits behind all that another has sent. Large bodies have a
    thread of their own, so that they never keep small ones waiting.

    Args:
        most_waiting: how many requests may wait. It may change.
        timeout: seconds that a request may take, its work here included. It may change.
        use: what waits elsewhere; what waits here counts too.
    """

    def __init__(self, most_waiting: int, timeout: float, use: TenantUse) -> None:
        self.most_waiting = most_waiting
        self.timeout = timeout
        self._use = use
        self._places = use.join()
        self._small = _Lane(_THREADS, "umbel-text")
        self._large = _Lane(_THREADS_FOR_LARGE, "umbel-large-text")

    async def run(
        self, work: Callable[[Check], T], size: int, tenant: str, wait: Wait | None = None
    ) -> T:
        """Run work on a thread. Cancelled or late, it is ended at its next stage.

        Args:
            work: what to do; it calls what it is given between two stages.
            size: bytes of the body that it works on.
            tenant: whose it is.
            wait: how long the request may take; None for `timeout` from now on.

        Raises:
            QueueFullError: as many wait as may wait, of all or of the tenant.
            DeadlineExceededError: it did not end in time.
        """
        if wait is None or not wait.has_place:
            check_waiting(self._use, tenant, self.most_waiting, time.monotonic())
        job = _Job(work, tenant, self._places)
        del work  # or this frame, which an exception holds, would keep what the job lets go
        lane = self._small if size <= SMALL_BODY else self._large
        left = self.timeout if wait is None else wait.left(self.timeout)
        try:
            async with asyncio.timeout(left):
                return cast("T", await asyncio.wrap_future(lane.put(job)))
        except TimeoutError as error:
            raise DeadlineExceededError("the prompt was not tokenised in time") from error
        finally:
            job.abandon()

    def close(self) -> None:
        """Take nothing more, and drop what waits; what runs ends by itself."""
        for lane in (self._small, self._large):
            lane.close()
        self._use.leave(self._places)


class _Job:
    """A piece of work, for as long as somebody waits for it.

    It stays in its lane when it is abandoned. Nobody counts the body that it works on any more, so
    that is let go at once.

    Attributes:
        done: has what it returns.
        tenant: whose it is.

    Args:
        work: what to do.
        tenant: as above.
        places: counts it among those that wait, until it begins or is abandoned.
    """

    def __init__(self, work: Callable[[Check], Any], tenant: str, places: Places) -> None:
        self.done: Future[Any] = Future()
        self.tenant = tenant
        self._work: Callable[[Check], Any] | None = work
        self._abandoned = False
        self._places = places
        self._lock = threading.Lock()
        self._waits = True
        places.wait(tenant)

    def run(self) -> None:
        self._wait_no_more()
        work, self._work = self._work, None
        if work is None or not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(work(self.check))
        except BaseException as error:  # noqa: BLE001  (whoever waits for it hears of it)
            self.done.set_exception(error)

    def abandon(self) -> None:
        self._abandoned, self._work = True, None
        self._wait_no_more()

    def check(self) -> None:
        if self._abandoned:
            raise AbandonedError

    def _wait_no_more(self) -> None:
        """Count it no more among those that wait; once, by whichever thread is first."""
        with self._lock:
            waited, self._waits = self._waits, False
        if waited:
            self._places.leave(self.tenant)


class _Lane:
    """Threads, and the jobs that wait for one of them: each tenant's in the order of coming."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}  # whose turn is next comes first

    def put(self, job: _Job) -> Future[Any]:
        """Have a job run when its tenant's turn has come."""
        with self._lock:
            self._waiting.setdefault(job.tenant, deque()).append(job)
        self._threads.submit(self._run_next)
        return job.done

    def _run_next(self) -> None:
        with self._lock:
            if not self._waiting:  # it was closed
                return
            tenant, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            del self._waiting[tenant]
            if jobs:
                self._waiting[tenant] = jobs  # behind all others
        job.run()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for job in left:
            job.done.cancel()
