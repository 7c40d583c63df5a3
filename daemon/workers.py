"""The few threads that decode bodies, render templates and tokenise, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from ..scheduler.bounds import queue_full
from ..scheduler.errors import DeadlineExceededError
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

    Large bodies have a thread of their own, so that they never keep small ones waiting.

    Args:
        most_waiting: how many requests may wait. It may change.
        timeout: seconds that a request may take, its work here included. It may change.
        queued: says how many requests wait elsewhere; they count too.
    """

    def __init__(self, most_waiting: int, timeout: float, queued: Callable[[], int]) -> None:
        self.most_waiting = most_waiting
        self.timeout = timeout
        self._queued = queued
        self._waiting: set[_Job] = set()
        self._small = ThreadPoolExecutor(_THREADS, "umbel-text")
        self._large = ThreadPoolExecutor(_THREADS_FOR_LARGE, "umbel-large-text")

    async def run(self, work: Callable[[Check], T], size: int, wait: Wait | None = None) -> T:
        """Run work on a thread. Cancelled or late, it is ended at its next stage.

        Args:
            work: what to do; it calls what it is given between two stages.
            size: bytes of the body that it works on.
            wait: how long the request may take; None for `timeout` from now on.

        Raises:
            QueueFullError: as many wait as may wait.
            DeadlineExceededError: it did not end in time.
        """
        counted = wait is not None and wait.has_place
        if not counted and self._queued() + len(self._waiting) >= self.most_waiting:
            raise queue_full(self.most_waiting)
        job = _Job(work)
        del work  # or this frame, which an exception holds, would keep what the job lets go
        self._waiting.add(job)
        lane = self._small if size <= SMALL_BODY else self._large
        left = self.timeout if wait is None else wait.left(self.timeout)
        try:
            async with asyncio.timeout(left):
                return cast("T", await asyncio.wrap_future(lane.submit(self._start, job)))
        except TimeoutError as error:
            raise DeadlineExceededError("the prompt was not tokenised in time") from error
        finally:
            job.abandon()
            self._waiting.discard(job)

    def _start(self, job: "_Job") -> Any:
        self._waiting.discard(job)
        return job.run()

    def close(self) -> None:
        """Take nothing more, and drop what waits; what runs ends by itself."""
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)


class _Job:
    """A piece of work, for as long as somebody waits for it.

    A pool keeps cancelled calls in its queue. Nobody counts the body that this one works on any
    more, so it is let go at once.
    """

    def __init__(self, work: Callable[[Check], Any]) -> None:
        self._work: Callable[[Check], Any] | None = work
        self._abandoned = False

    def run(self) -> Any:
        work, self._work = self._work, None
        if work is None:
            raise AbandonedError
        return work(self.check)

    def abandon(self) -> None:
        self._abandoned, self._work = True, None

    def check(self) -> None:
        if self._abandoned:
            raise AbandonedError
