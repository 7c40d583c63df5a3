"""A step's record, what it leaves to the next one, and how sequences end in it."""

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import structlog

from .errors import ComputationError, RequestError
from .kv_cache_manager import KVCacheManager
from .request import Event, Finished, FinishReason, Started, TokenEvent
from .scheduler import Scheduler, Selection
from .sequence import Sequence, SequenceStatus

# seconds without a write for which a request waits for memory that holds what is being written
_DISK_PATIENCE = 10.0


_RETRIES = 2

log = structlog.get_logger()


class DiskWait(NamedTuple):
    """A wait for memory that the disk tier is about to free."""

    since: float  # when it began, or a write ended, in seconds
    writes: int  # states that were written by then


class StepSummary(NamedTuple):
    """All that a step leaves to the next one, beside the tokens under way."""

    is_short: bool = False  # a sequence waits for memory
    reserved_for: Sequence | None = None  # another one has yielded its slot for it
    fair_at: int | None = None  # the queue's changes when no sequence had to yield; else None
    disk_wait: DiskWait | None = None  # if memory is short


class Step:
    """A step's record. It ends with its step."""

    def __init__(self, last: StepSummary) -> None:
        self.events: list[tuple[Sequence, Event]] = []  # not published yet
        self.counts = Counter[str]()  # totals by which the statistics grow
        self.selection = Selection()  # the last choice of a sequence to start
        self.summary = last  # as far as it is known
        self.awaits_others = False  # memory is awaited that requests of another model hold
        self.cache_changed = False  # state went to the cache

    @property
    def waits_for_memory(self) -> bool:
        """True if a sequence waits for memory that the disk or another model will free."""
        return self.summary.disk_wait is not None or self.awaits_others

    def emit(self, sequence: Sequence, event: Event) -> None:
        """Add an event to those that are published next."""
        self.events.append((sequence, event))
        if isinstance(event, TokenEvent):
            self.counts["generation_tokens"] += 1
        elif isinstance(event, Started):
            prompt = sequence.num_prompt_tokens
            self.counts.update(prompt_tokens=prompt, prompt_tokens_cached=event.cached)

    def take_events(self) -> list[tuple[Sequence, Event]]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def await_disk(self, now: float, writes: int) -> bool:
        """Wait for a write; returns False if the disk has not answered for too long."""
        wait = self.summary.disk_wait
        if wait is None or wait.writes != writes:
            wait = DiskWait(now, writes)
            self.summary = self.summary._replace(disk_wait=wait)
        return now - wait.since < _DISK_PATIENCE


class Lifecycle:
    """Ends sequences, each with one `Finished`.

    With `retries` they may start again with their answer so far as a part of their prompt.
    """

    def __init__(self, scheduler: Scheduler, kv_cache: KVCacheManager, *, retries: bool) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._retries = retries

    @contextmanager
    def guard(self, sequence: Sequence, step: Step) -> Iterator[None]:
        """Do something for one sequence; a fault in the block ends that sequence only."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  (also a panic in native code)
            self.fail(sequence, error, step)

    def fail(self, sequence: Sequence, error: BaseException, step: Step) -> None:
        """End a sequence whose computation failed, unless the token before has ended it."""
        ended = sequence.status is SequenceStatus.FINISHED
        if not ended:
            log.error("request failed", request=sequence.request.id, exc_info=error)
        error.__traceback__ = None  # its frames hold the state that is freed now
        if not ended:
            text = f"the request failed while it was computed: {type(error).__name__}: {error}"
            self.finish(sequence, FinishReason.ERROR, step, ComputationError(text))

    def retry_apart(self, sequences: Items[Sequence], error: BaseException, step: Step) -> None:
        """Restart sequences whose call failed for several together, and whose state is lost.

        Each one's prompt and answer so far are then computed in a call of its own, which gives
        the next token: a sequence that is at fault ends there, and the others go on. One that was
        alone in its call, or has failed with others `_RETRIES` times before, ends at once.
        """
        failed = [s for s in self._scheduler.running if s in sequences]
        if failed:
            log.warning("the call of several sequences failed", exc_info=error)
        several = self._retries and len(failed) > 1
        retried = [s for s in failed if several and s.num_retries < _RETRIES]
        for sequence in failed:
            if sequence not in retried:
                self.fail(sequence, error, step)
        error.__traceback__ = None  # as in `fail`
        for sequence in reversed(retried):  # the oldest resumes first
            sequence.num_retries += 1
            self._scheduler.preempt(sequence)
            self.keep(sequence, step, trusted=False)
            sequence.preempt(replay=False)

    def end_all(self, error: BaseException, step: Step) -> bool:
        """End all sequences that a failed step was for; False if there are none.

        Those are at work, or if none is, those that wait. Each ends whatever another's end raises.
        """
        scheduler = self._scheduler
        sequences = scheduler.at_work or scheduler.waiting.expired(math.inf)
        for sequence in sequences:
            try:
                with ExitStack() as parts:  # the last one first, each whatever the others raise
                    parts.callback(self._scheduler.waiting.release, sequence)
                    parts.callback(self._scheduler.forget, sequence)
                    parts.callback(self.fail, sequence, error, step)
            except BaseException as fault:
                log.exception("request not ended in order", request=sequence.request.id)
                fault.__traceback__ = None  # as in `fail`
        return bool(sequences)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        step: Step,
        error: RequestError | None = None,
    ) -> None:
        """End a sequence: free what it holds, let its conversation go on, publish the end.

        Each part is done, whatever the others raise.
        """
        with ExitStack() as parts:  # the last one first
            parts.callback(step.emit, sequence, Finished(reason, error))
            parts.callback(setattr, sequence, "status", SequenceStatus.FINISHED)
            if sequence in self._scheduler:
                trusted = not isinstance(error, ComputationError)
                parts.callback(self.keep, sequence, step, trusted=trusted)
                parts.callback(self._scheduler.remove, sequence)

    def keep(self, sequence: Sequence, step: Step, *, trusted: bool) -> None:
        """Hand the sequence's state to the cache. A fault there costs the state only."""
        step.cache_changed = True
        try:
            with ExitStack() as released:  # a no-op after a hand-over that went well
                released.callback(self._kv_cache.end, sequence, keep=False)
                self._kv_cache.end(sequence, keep=trusted)
        except BaseException as error:
            # The answer is complete and must arrive, also after a panic in native code.
            log.exception("state not kept", request=sequence.request.id)
            error.__traceback__ = None  # as in `fail`
