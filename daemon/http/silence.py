"""How long one may wait for each of many things, with one timer for all of them."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Silence:
    """Bounds waits that follow each other, each as `asyncio.timeout` does.

    That sets a timer for each wait, and gives it up, which a stream would do for each token. Here
    the timer stays, and finds, when it rings, since when the present wait lasts.
    Belongs to one task at a time, on a running event loop.

    Args:
        seconds: that each wait may last.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._rang = False

    async def bound(self, work: Awaitable[T]) -> T:
        """Wait for something.

        Args:
            work: what is cancelled if it takes too long.

        Raises:
            TimeoutError: it did.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a wait outside of a task cannot be ended")
        cancelling = task.cancelling()
        self._waiting, self._since, self._rang = task, self._loop.time(), False
        if self._timer is None:
            self._set(self._seconds)
        try:
            return await work
        except asyncio.CancelledError as error:
            # What else was cancelled meanwhile stays so: see `asyncio.Timeout`.
            if self._rang and task.uncancel() <= cancelling:
                raise TimeoutError from error
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        """Give the timer up. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiting is None or self._rang:
            return  # the next wait sets it
        left = self._since + self._seconds - self._loop.time()
        if left > 0:
            self._set(left)
        else:
            self._rang = True
            self._waiting.cancel()
