"""Asks the store of responses from the event loop, which never waits for a disk."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import structlog

from ..scheduler.errors import UnavailableError
from ..scheduler.queue import RETRY_AFTER
from .response_store import ResponseStore

T = TypeVar("T")

_MOST_WAITING = 1024
_TIMEOUT = 60.0  # seconds that anybody waits for the disk

log = structlog.get_logger()


class ResponseDesk:
    """Runs what is to be done with stored responses on a thread of its own, in order.

    Args:
        store: of responses; any thread may call it, too.
    """

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, "umbel-responses")
        self._waiting = 0

    async def look(self, work: Callable[[ResponseStore], T]) -> T:
        """Run what somebody waits for.

        Raises:
            UnavailableError: too many wait already, or the disk cannot be read.
        """
        if self._waiting >= _MOST_WAITING:
            message = "too many requests for stored responses wait; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER)
        self._waiting += 1
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await asyncio.wrap_future(self.submit(work))
        except TimeoutError as error:
            message = "stored responses were not read in time; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error
        finally:
            self._waiting -= 1

    async def keep(self, work: Callable[[ResponseStore], None]) -> None:
        """Run what an answer waits for, and goes on without if the disk takes too long."""
        try:
            async with asyncio.timeout(_TIMEOUT):
                await asyncio.shield(asyncio.wrap_future(self.submit(work)))
        except TimeoutError:
            log.warning("a response is not stored in time", seconds=_TIMEOUT)

    def submit(self, work: Callable[[ResponseStore], T]) -> "Future[T]":
        """Run what nobody waits for; at most once for each response."""
        return self._thread.submit(work, self.store)

    async def close(self) -> None:
        """Finish what waits, and close the store."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown()
        self.store.close()
