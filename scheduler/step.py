"""What one step finds and does, and the frozen summary that it leaves to the next one."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from .request import Event, Started, TokenEvent
from .sequence import Sequence
from .start import Selection

DISK_PATIENCE = 10.0
"""Seconds without a write for which a request waits for memory that holds what is being written."""


class DiskWait(NamedTuple):
    """A wait for memory that the disk tier is about to free."""

    since: float  # when it began, or a write ended, in seconds
    writes: int  # states that were written by then


@dataclass(frozen=True)
class StepSummary:
    """All that a step leaves to the next one, beside the tokens under way."""

    is_short: bool = False  # a sequence waits for memory
    # the sequence for which another one has yielded its slot, or None
    reserved_for: Sequence | None = None
    # the queue's changes when no sequence had to yield; None if one had to
    fair_at: int | None = None
    disk_wait: DiskWait | None = None  # the wait for the disk, if memory is short


class Step:
    """A step's record. It ends with its step.

    Attributes:
        events: not published yet.
        counts: totals by which the statistics grow.
        selection: the last choice of a sequence to start.
        reserved_for, fair_at, disk_wait: see `StepSummary`.
        awaits_others: memory is awaited that requests of another model hold.
        cache_changed: state went to the cache.
    """

    def __init__(self, last: StepSummary) -> None:
        self.events: list[tuple[Sequence, Event]] = []
        self.counts = Counter[str]()
        self.selection = Selection()
        self.reserved_for = last.reserved_for
        self.fair_at = last.fair_at
        self.disk_wait = last.disk_wait
        self.awaits_others = False
        self.cache_changed = False

    @property
    def waits_for_memory(self) -> bool:
        """True if a sequence waits for memory that the disk or another model will free."""
        return self.disk_wait is not None or self.awaits_others

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
        if self.disk_wait is None or self.disk_wait.writes != writes:
            self.disk_wait = DiskWait(now, writes)
        return now - self.disk_wait.since < DISK_PATIENCE

    def summary(self, *, preempted: bool) -> StepSummary:
        """Freeze what the next step must know."""
        short = preempted or self.selection.short is not None or self.waits_for_memory
        return StepSummary(short, self.reserved_for, self.fair_at, self.disk_wait)
