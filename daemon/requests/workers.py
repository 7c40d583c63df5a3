"""The threads that decode bodies, render templates and tokenise, off the event loop."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from ...scheduler.errors import DeadlineExceededError
from ...scheduler.limits import check_room, check_waiting
from ...scheduler.tenants import Places, TenantUse
from ..errors import panics_as_errors
from ..http.bodies import SMALL_BODY
from .arrivals import Wait

T = TypeVar("T")

_THREADS = 3
_THREADS_FOR_LARGE = 1

Check = Callable[[], None]
"""Called between two stages of work; raises `AbandonedError` if no request waits for it."""


class AbandonedError(Exception):
    """The request of this work has left, or its time was over."""


class Workers:
    """Runs work on a bounded number of threads, and bounds how much may wait for one.

    Tenants take turns, so that none waits behind all work of another, and none has all the
    threads, so that slow work of one (a schema to compile) does not delay another's. Large bodies
    have a thread of their own, so that small ones never wait for them.
    """

    def __init__(self, most_waiting: int, timeout: float, use: TenantUse) -> None:
        self.most_waiting = most_waiting  # requests. It may change
        self.timeout = timeout  # seconds that a request may take, its work here included; likewise
        self._use = use  # counts the tenants' waiting requests, here and elsewhere
        self._places = use.join()
        self._small = _Lane(_THREADS, "umbel-text")
        self._large = _Lane(_THREADS_FOR_LARGE, "umbel-large-text")

    async def run(
        self,
        work: Callable[[Check], T],
        size: int,
        tenant: str,
        wait: Wait | None = None,
        *,
        admitted: bool = False,
    ) -> T:
        """Run work on a thread. Cancelled or late, it is ended at its next stage.

        Args:
            work: calls its argument between two stages.
            size: bytes of the body that it works on.
            tenant: of the request.
            wait: the request's deadline; None for `timeout` from now on.
            admitted: the request was let in already, and is not refused for this.

        Raises:
            QueueFullError: no more may wait, of all or of the tenant.
            DeadlineExceededError: it did not end in time.
        """
        lane = self._small if size <= SMALL_BODY else self._large
        let_in, now = admitted or (wait is not None and wait.has_place), time.monotonic()
        counts = lane.is_full(tenant) and not let_in
        if counts:
            check_waiting(self._use, tenant, self.most_waiting, now)
        elif not let_in:
            check_room(self._use, self.most_waiting, now)
        job = _Job(work, tenant, self._places if counts else None)
        del work  # or this frame, which an exception holds, would keep the body
        left = self.timeout if wait is None else wait.left(self.timeout)
        try:
            async with asyncio.timeout(left):
                return cast("T", await asyncio.wrap_future(lane.put(job)))
        except TimeoutError as error:
            raise DeadlineExceededError("the prompt was not tokenised in time") from error
        finally:
            lane.drop(job)
            del job  # it holds an error that holds this frame

    def close(self) -> None:
        """Take nothing more, and drop the waiting work; running work ends by itself."""
        for lane in (self._small, self._large):
            lane.close()
        self._use.leave(self._places)


class _Job:
    """A piece of work, for as long as a request waits for it.

    When it is abandoned, or has failed, the body that it works on is counted no more, so it is
    released at once.
    """

    def __init__(self, work: Callable[[Check], Any], tenant: str, places: Places | None) -> None:
        self.done: Future[Any] = Future()
        self.tenant = tenant
        self._work: Callable[[Check], Any] | None = work
        self._abandoned = threading.Event()
        # that count it as waiting until it begins or is abandoned; None if it is not counted here
        self._places = places
        self._lock = threading.Lock()
        if places is not None:
            places.wait(tenant)

    def run(self) -> None:
        self._leave_places()
        work, self._work = self._work, None
        if work is None or not self.done.set_running_or_notify_cancel():
            return
        try:
            with panics_as_errors():
                result = work(partial(_check, self._abandoned))
        except BaseException as error:  # noqa: BLE001  (the waiting request gets it)
            self.done.set_exception(error)
            # `done` holds the error, which holds this frame and those that it went through. If one
            # of them held the job, all would stay until garbage is collected, the body too.
            del work, self
        else:
            self.done.set_result(result)

    def abandon(self) -> None:
        self._abandoned.set()
        self._work = None
        self._leave_places()

    def _leave_places(self) -> None:
        """Count it as waiting no more; once, by the first thread that comes here."""
        with self._lock:
            places, self._places = self._places, None
        if places is not None:
            places.leave(self.tenant)


def _check(abandoned: threading.Event) -> None:
    if abandoned.is_set():
        raise AbandonedError


class _Lane:
    """Threads, and the jobs that wait for one of them: each tenant's first in, first out.

    Of several threads, a tenant has all but one at most.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._count = threads
        self._most = max(1, threads - 1)  # that one tenant has
        self._threads = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[_Job, None]] = {}  # in the order of turns
        self._running: Counter[str] = Counter()

    def is_full(self, tenant: str) -> bool:
        """Return True if a tenant's next job would wait for a thread."""
        with self._lock:
            of_all = self._running.total() + sum(map(len, self._waiting.values()))
            own = self._running[tenant] + len(self._waiting.get(tenant, ()))
            return of_all >= self._count or own >= self._most

    def put(self, job: _Job) -> Future[Any]:
        with self._lock:
            self._waiting.setdefault(job.tenant, {})[job] = None
        self._threads.submit(self._run_jobs)
        return job.done

    def drop(self, job: _Job) -> None:
        """Abandon a job: its tenant's next one has the turn. Idempotent."""
        with self._lock:
            jobs = self._waiting.get(job.tenant, {})
            jobs.pop(job, None)
            if not jobs:
                self._waiting.pop(job.tenant, None)
        job.abandon()

    def _run_jobs(self) -> None:
        """Run jobs while there are any: a tenant's next job when one of its jobs has ended."""
        while (job := self._take()) is not None:
            tenant = job.tenant
            try:
                job.run()
            finally:
                del job
                with self._lock:
                    self._running[tenant] -= 1
                    if not self._running[tenant]:
                        del self._running[tenant]

    def _take(self) -> _Job | None:
        with self._lock:
            free = (name for name in self._waiting if self._running[name] < self._most)
            tenant = next(free, None)
            if tenant is None:
                return None
            jobs = self._waiting.pop(tenant)
            job = next(iter(jobs))
            del jobs[job]
            if jobs:
                self._waiting[tenant] = jobs  # behind all others
            self._running[tenant] += 1
            return job

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for job in left:
            job.done.cancel()
