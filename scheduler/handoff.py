"""Between the event loop and the MLX thread: requests one way, events the other."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .errors import SlowConsumerError, UnavailableError
from .limits import RETRY_AFTER
from .queue import ConversationQueue
from .request import Event, Finished, FinishReason, Request
from .sequence import Sequence

if TYPE_CHECKING:
    from .times import Times


class EventChannel:
    """One request's events, in order, for one reader on the event loop: `limit` may wait for it."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.finished_at: float | None = None  # when its `Finished` came, however late it is read
        self.times: Times | None = None  # the request's activities, once it was queued
        self._limit = limit
        self._clock = clock
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def deliver(self, event: Event) -> bool:
        """Add an event; False when the reader is too far behind. After the end: ignored."""
        if self.finished_at is not None:
            return True
        if isinstance(event, Finished):
            self.finished_at = self._clock()
        elif len(self._events) >= self._limit:
            return False
        self._events.append(event)
        self._arrived.set()
        return True

    async def get(self) -> Event:
        """Wait for the next event. The last one is always a `Finished`."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class Handoff:
    """Passes requests to the engine's thread, and its events back.

    All methods but `publish` belong to the event loop. `wake` tells the MLX thread that something
    waits; `channel_limit` is of each `EventChannel`.
    """

    def __init__(
        self,
        queue: ConversationQueue,
        wake: Callable[[], None],
        *,
        channel_limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock  # the engine's, in seconds
        self._queue = queue
        self._wake = wake
        self._channel_limit = channel_limit
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, tuple[Sequence, EventChannel]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live(self) -> int:
        """How many requests have not ended. For any thread."""
        return len(self._live)

    def submit(self, request: Request) -> EventChannel:
        """Queue a request as `ConversationQueue.put`, and return the channel of its events."""
        sequence, channel = Sequence(request), EventChannel(self._channel_limit, self.clock)
        self._queue.put(sequence)
        channel.times = sequence.times
        self._live[request.id] = sequence, channel
        self._idle.clear()
        self._wake()
        return channel

    def cancel(self, request_id: str) -> None:
        """End a request: at once when it waits, at the next step when it runs. Idempotent."""
        self._end(request_id, Finished(FinishReason.CANCELLED))

    def publish(self, events: Iterable[tuple[Sequence, Event]]) -> None:
        """Send one step's events to their channels. Called on the MLX thread."""
        batch = [(sequence.request.id, event) for sequence, event in events]
        try:
            self._loop.call_soon_threadsafe(self._deliver, batch)
        except RuntimeError:
            return  # the loop has ended, and with it every reader

    def refuse_waiting(self) -> None:
        """Refuse new requests from now on, and answer those that wait."""
        stopping = UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
        for sequence in self._queue.close():
            self._finish(sequence.request.id, Finished(FinishReason.ERROR, stopping))

    def end_running(self) -> None:
        """End every request that still runs, with an error that says so."""
        stopping = UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)
        for request_id in list(self._live):
            self._end(request_id, Finished(FinishReason.ERROR, stopping))

    async def wait_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def _end(self, request_id: str, event: Finished) -> None:
        if request_id not in self._live:
            return
        self._live[request_id][0].cancelled = True
        self._queue.remove(request_id)
        self._finish(request_id, event)
        self._wake()

    def _deliver(self, batch: list[tuple[str, Event]]) -> None:
        for request_id, event in batch:
            if isinstance(event, Finished):
                self._finish(request_id, event)
            elif request_id in self._live and not self._live[request_id][1].deliver(event):
                slow = SlowConsumerError("the answer was read too slowly and was cut off")
                self._end(request_id, Finished(FinishReason.ERROR, slow))

    def _finish(self, request_id: str, event: Finished) -> None:
        if request_id not in self._live:
            return
        _, channel = self._live.pop(request_id)
        channel.deliver(event)
        if not self._live:
            self._idle.set()
