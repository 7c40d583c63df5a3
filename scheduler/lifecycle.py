"""How a sequence ends: its events, its state, and what a fault costs."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import ExitStack
from typing import Generic

import structlog

from .errors import ComputationError, RequestError
from .kv_cache_manager import KVCacheManager
from .request import Event, Finished, FinishReason
from .runner import C
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus

_RETRIES = 2

log = structlog.get_logger()


class Lifecycle(Generic[C]):
    """Ends sequences, each with one `Finished`, and collects the events of a step.

    Attributes:
        handed_over: state went to the cache since this was last set to False.

    Args:
        scheduler: holds those that have not ended.
        kv_cache: takes their state.
        retries: sequences may start again with what they have answered as a part of their prompt.
    """

    def __init__(self, scheduler: Scheduler, kv_cache: KVCacheManager[C], *, retries: bool) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._retries = retries
        self._events: list[tuple[Sequence, Event]] = []
        self.handed_over = True

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Have an event published with the others of its step."""
        self._events.append((sequence, event))

    def take_events(self) -> list[tuple[Sequence, Event]]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def guard(self, sequence: Sequence, work: Callable[[Sequence], None]) -> None:
        """Do something for one sequence; a fault ends that sequence only."""
        try:
            work(sequence)
        except BaseException as error:  # noqa: BLE001  (as said, also a Rust panic)
            self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """End a sequence whose computation failed."""
        ended = sequence.status is SequenceStatus.FINISHED
        if not ended:
            log.error("request failed", request=sequence.request.id, exc_info=error)
        error.__traceback__ = None  # its frames hold the state that is freed now
        if ended:
            return  # by the token before: the step that failed was not needed
        self.finish(sequence, FinishReason.ERROR, _failed(error))

    def retry_apart(self, sequences: Items[Sequence], error: BaseException) -> None:
        """Restart sequences whose call failed for several together, and whose state is lost.

        Each one's prompt and answer so far are then computed in a call of its own, which gives
        the next token: a sequence that is at fault ends there, and the others go on. One that was
        alone in its call, or has failed with others `_RETRIES` times before, ends at once.
        """
        failed = [s for s in self._scheduler.running if s in sequences]
        if failed:
            log.warning("the call of several sequences failed", exc_info=error)
        retried = [s for s in failed if self._retries and s.num_retries < _RETRIES]
        if len(failed) == 1:
            retried = []
        for sequence in failed:
            if sequence not in retried:
                self.fail(sequence, error)
        error.__traceback__ = None  # as in `fail`
        for sequence in reversed(retried):  # the oldest resumes first
            sequence.num_retries += 1
            self._scheduler.preempt(sequence)
            self.keep(sequence, trusted=False)
            sequence.preempt(replay=False)

    def end_all(self, error: BaseException) -> bool:
        """End all that a step is for, which failed; False if there is nothing to end.

        Each sequence ends whatever the end of another raises. A fault in an end is logged once.
        """
        sequences = self._scheduler.at_work()
        for sequence in sequences:
            try:
                with ExitStack() as parts:  # the last one first, each whatever the others raise
                    parts.callback(self._scheduler.waiting.release, sequence)
                    parts.callback(self._scheduler.forget, sequence)
                    parts.callback(self.fail, sequence, error)
            except BaseException as fault:
                log.exception("request not ended in order", request=sequence.request.id)
                fault.__traceback__ = None  # as in `fail`
        return bool(sequences)

    def finish(
        self, sequence: Sequence, reason: FinishReason, error: RequestError | None = None
    ) -> None:
        """End a sequence: free what it holds, let its conversation go on, publish the end.

        Each part is done, whatever the others raise.
        """
        with ExitStack() as parts:  # the last one first
            parts.callback(self._end, sequence, Finished(reason, error))
            if sequence in self._scheduler:
                trusted = not isinstance(error, ComputationError)
                parts.callback(self.keep, sequence, trusted=trusted)
                parts.callback(self._scheduler.remove, sequence)

    def keep(self, sequence: Sequence, *, trusted: bool) -> None:
        """Hand the sequence's state to the cache. A fault there costs the state only."""
        self.handed_over = True
        try:
            with ExitStack() as released:  # a no-op after a hand-over that went well
                released.callback(self._kv_cache.end, sequence, keep=False)
                self._kv_cache.end(sequence, keep=trusted)
        except BaseException as error:
            # The answer is complete and must arrive, also after a panic in native code.
            log.exception("state not kept", request=sequence.request.id)
            error.__traceback__ = None  # as in `fail`

    def _end(self, sequence: Sequence, end: Finished) -> None:
        sequence.status = SequenceStatus.FINISHED
        self.emit(sequence, end)


def _failed(error: BaseException) -> ComputationError:
    text = f"the request failed while it was computed: {type(error).__name__}: {error}"
    return ComputationError(text)
