"""The one thread that touches MLX.

MLX's streams belong to the thread that made them: a lazy array can be evaluated on no
other. So load, prefill, decode and every read of an array happen here.
"""

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import structlog

P = ParamSpec("P")
T = TypeVar("T")

_SOON = 0.5  # seconds

log = structlog.get_logger()


class Pace(enum.IntEnum):
    """When a worker's next step is due. True where it has something to do."""

    IDLE = 0  # when it is woken
    BUSY = 1  # at once
    WAITING = 2  # when it is woken, and soon in any case: what it waits for may never come


class ThreadStoppedError(RuntimeError):
    """The thread was stopped; it runs nothing any more."""


class MLXThread:
    """Runs calls in order and, between them, steps of the attached workers in turn.

    After each call every worker that has something to do gets a step. A failing call ends its own
    future and nothing else. All methods may be called from any thread.

    Args:
        on_exit: the thread's last call. It must release the thread's MLX streams: without
            that, a process that exits afterwards is aborted by the C++ runtime.
    """

    def __init__(self, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._workers: dict[Callable[[], int], Pace] = {}  # and when each one's next step is due
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._condition = threading.Condition()
        self._woken = False
        self._stopping = False
        self._busy_since: float | None = None
        self._busy_seconds = 0.0  # before that
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def attach(self, work: Callable[[], int]) -> None:
        """Run `work`, again and again, at the pace that it returns."""
        with self._condition:
            self._workers[work] = Pace.IDLE
        self.wake()

    def detach(self, work: Callable[[], int]) -> None:
        """Run `work` no more. To be called on the thread itself, or it may run once more."""
        with self._condition:
            self._workers.pop(work, None)

    def submit(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the thread; `ThreadStoppedError` after `stop`."""
        future: Future[T] = Future()
        with self._condition:
            if self._stopping:
                raise ThreadStoppedError("the MLX thread was stopped")
            self._jobs.append((future, partial(fn, *args, **kwargs)))
            self._condition.notify()
        return future

    def wake(self) -> None:
        """Tell the thread that a worker has something to do."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def busy_for(self) -> float:
        """Seconds since the call or step began that runs now; 0 where none does."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def busy_seconds(self) -> float:
        """Seconds for which calls and steps have run since the start."""
        return self._busy_seconds + self.busy_for()

    def stop(self, timeout: float) -> None:
        """Finish the call or step that runs, cancel calls that wait, end the thread. Idempotent.

        Raises:
            TimeoutError: the thread did not end in time; it still will, unless it hangs.
        """
        with self._condition:
            self._stopping = True
            waiting = list(self._jobs)
            self._jobs.clear()
            self._condition.notify()
        for future, _ in waiting:
            future.cancel()
        if self._thread.ident is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the MLX thread did not stop within {timeout:g} s")

    def _run(self) -> None:
        try:
            while self._wait():
                self._busy_since = time.monotonic()
                self._run_next_job()
                self._step()
        finally:
            self._workers.clear()
            self._on_exit()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread shall end."""
        busy_for, self._busy_since = self.busy_for(), None
        self._busy_seconds += busy_for
        with self._condition:
            paces = set(self._workers.values())
            if Pace.BUSY not in paces:
                self._condition.wait_for(
                    lambda: self._stopping or self._woken or self._jobs,
                    _SOON if Pace.WAITING in paces else None,
                )
            if self._woken or self._jobs:
                self._workers = dict.fromkeys(self._workers, Pace.BUSY)
            self._woken = False
            return not self._stopping

    def _run_next_job(self) -> None:
        with self._condition:
            if not self._jobs:
                return
            job = self._jobs.popleft()
        _fulfil(*job)
        del job  # as in `_fulfil`, whose frame knows this one

    def _step(self) -> None:
        """Let each worker that does not sleep do a step."""
        for work, pace in list(self._workers.items()):
            if pace is Pace.IDLE or self._stopping or work not in self._workers:
                continue
            try:
                due = Pace(work())
            except BaseException:
                # The worker answers for its own faults; one that escapes (a panic in a Rust
                # extension is no Exception) must not end the thread, nor be repeated at once
                # for ever.
                log.exception("step failed")
                due = Pace.IDLE
            with self._condition:
                if work in self._workers:
                    self._workers[work] = due


def _fulfil(future: Future[T], fn: Callable[[], T]) -> None:
    """Call a function for its future."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(fn())
        except BaseException as error:  # noqa: BLE001  (it belongs to the future)
            future.set_exception(cast("Exception", error))
    # The error's traceback holds this frame: with these it would keep itself alive,
    # and the arrays it failed over, until some thread collects the cycle.
    del future, fn
