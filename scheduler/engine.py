"""The engine: a step is page, schedule, plan, reserve, then one call after the other, and publish.

It lives on the MLX thread. A step launches its decode before it reads the tokens of the step
before. A step leaves to the next one the tokens under way (`Decoder`) and a `StepSummary`.
Questions (`Scheduler`, `MemoryPlanner`, `KVCacheManager`) return values; the engine alone acts.
"""

import math
import time
from collections.abc import Callable, Iterable

import structlog

from ..cachestore.restoration import Known
from ..models.runner import ModelRunner
from ..models.sampling import ForwardOutput
from ..models.step_plan import StepPlan
from .decoder import Decoder
from .kv_cache_manager import KVCacheManager
from .lifecycle import Lifecycle, Step, StepSummary
from .limits import late, no_room
from .memory import Affordable, MemoryPlanner
from .pace import PrefillPace
from .policy import Batch, Call, ChunkSize
from .queue import ConversationQueue
from .report import EngineReport
from .request import Event, FinishReason, Started
from .scheduler import Look, Ranking, Scheduler
from .sequence import Sequence, SequenceStatus
from .statistics import EngineStatistics
from .thread import Pace
from .times import Activity

log = structlog.get_logger()

_STARTING = 0.1  # of the stall bound: for so long requests start in one step
_DRIFT = 16  # steps after which it is decided again which sequence yields

Publish = Callable[[Iterable[tuple[Sequence, Event]]], None]


class Engine:
    """Works on queued sequences, one step at a time.

    Every sequence it takes ends in a `Finished` event, whatever happens on the way; what
    one sequence raises ends that sequence only, and what a step raises those at work.

    Args:
        publish: takes each step's events; must neither block nor raise.
        prefill_chunk: the most prompt tokens that one step computes.
        max_batch: the most sequences that run at once.
        max_stall: the longest that a chunk may keep others from their next token, in seconds.
        exact: prefill chunks are never cut, so that they are the same whatever else runs.
        token_bytes: see `Scheduler`.
        clock: seconds, monotonic; the one that deadlines are on.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache: KVCacheManager,
        memory: MemoryPlanner,
        queue: ConversationQueue,
        publish: Publish,
        *,
        eos_ids: frozenset[int],
        prefill_chunk: int,
        max_batch: int = 1,
        max_stall: float = 0.2,
        exact: bool = False,
        token_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._memory = memory
        self._publish = publish
        self._exact = exact
        self._clock = clock
        self._scheduler = Scheduler(queue, kv_cache, memory, max_batch, token_bytes)
        self._pace = PrefillPace(max_stall, prefill_chunk)
        self._report = EngineReport(runner, kv_cache, memory, clock)
        self._lifecycle = Lifecycle(self._scheduler, kv_cache, retries=not exact)
        self._decoder = Decoder(runner, kv_cache, self._lifecycle, eos_ids=eos_ids, clock=clock)
        self._last = StepSummary()

    def step(self) -> Pace:
        """Do one step's work, and say when the next one is due."""
        step = Step(self._last)
        try:
            pace = self._step(step)
        except BaseException as error:  # noqa: BLE001  (also a panic in native code)
            pace = self._recover(error, step)
        short = step.selection.short is not None or step.waits_for_memory
        step.summary = step.summary._replace(is_short=short or bool(self._scheduler.preempted))
        self._last = step.summary
        return pace

    def _step(self, step: Step) -> Pace:
        running = self._scheduler.running
        if not running:
            self._report.begin_work()
        pages = self._kv_cache.paging.step(busy=bool(running) and not self._last.is_short)
        self._end_cancelled_and_late(step)
        self._start_waiting(step)
        planned = self._plan(step)
        self._report.publish(self._scheduler.at_work)  # so that a step that hangs is seen
        if planned is not None:
            self._compute(planned.batch, planned.plan, step)
        self._give_back()
        pace = self._next_pace(step, pages=pages, computed=planned is not None)
        changed = step.cache_changed or pace is Pace.IDLE
        self._report.end_step(self._scheduler.at_work, step.counts, cache_changed=changed)
        self._publish_events(step)
        return pace

    def close(self) -> None:
        """Give all memory back. No sequence may wait or run."""
        self._decoder.drop()
        self._memory.close()

    def statistics(self) -> EngineStatistics:
        """Read the last published statistics. Safe to call from any thread."""
        return self._report.latest

    # -- who runs ----------------------------------------------------------------------

    def _end_cancelled_and_late(self, step: Step) -> None:
        now = self._clock()
        for sequence in self._scheduler.waiting.expired(now):
            self._lifecycle.finish(sequence, FinishReason.ERROR, step, late(sequence))
        for sequence in self._scheduler.at_work:
            if sequence.cancelled:
                self._lifecycle.finish(sequence, FinishReason.CANCELLED, step)
            elif sequence.request.deadline <= now and sequence.wants_more:
                self._lifecycle.finish(sequence, FinishReason.ERROR, step, late(sequence))

    def _start_waiting(self, step: Step) -> None:
        """Start all that may, have one yield to another, and end those that can never start."""
        self._start(step)
        if self._yield_slot(step):
            self._start(step)
        while (stuck := self._scheduler.take_stuck(step.selection.short)) is not None:
            if self._awaits_disk(step) or self._awaits_others(step):
                return
            self._refuse(stuck, step)
            self._start(step)

    def _start(self, step: Step) -> None:
        """Start all sequences that may start; beside decoding ones only a few in one step."""
        most = _STARTING * self._pace.max_stall if self._scheduler.decoding else math.inf
        until = self._clock() + most
        if len(self._scheduler.waiting):
            self._scheduler.charge()
        while True:
            ranking = self._scheduler.ranking()
            while self._start_one(ranking, step):
                if self._clock() >= until:
                    return
            if not self._publish_awaited(step):
                return

    def _start_one(self, ranking: Ranking, step: Step) -> bool:
        """Start the next sequence, and see to what those before it wait for."""
        found = self._scheduler.next_start(ranking, step.summary.reserved_for)
        step.selection = found
        step.summary = step.summary._replace(reserved_for=found.reserved_for)
        self._see_to(found.waiting)
        if found.start is None:
            self._scheduler.waiting.note(found.waits)
            return False
        if not self._scheduler.start(found.start, self._known(found.start)):
            return False  # it has left the queue: the next step looks again
        self._begin(found.start, step)
        return True

    def _see_to(self, looks: Iterable[Look]) -> None:
        """Act on what sequences wait for."""
        for sequence, waits_for, awaited in looks:
            if awaited is not None:
                self._kv_cache.publish_early(awaited)
            elif waits_for is Activity.DISK:
                self._kv_cache.paging.page_in(sequence)
            elif sequence.times is not None:
                sequence.times.needs = self._memory.needed(sequence), self._memory.usable

    def _known(self, sequence: Sequence) -> Known:
        """Make room for a sequence that starts alone; returns what of it is in the cache then."""
        known = self._kv_cache.known(sequence)
        if not self._scheduler.running and self._memory.make_room(sequence, known):
            known = self._kv_cache.known(sequence)
        return known

    def _begin(self, sequence: Sequence, step: Step) -> None:
        self._report.publish(self._scheduler.at_work)
        with self._lifecycle.guard(sequence, step):
            self._decoder.constrain(sequence)
            self._kv_cache.begin(sequence)
        if sequence.status is SequenceStatus.FINISHED or (lease := sequence.lease) is None:
            return
        sequence.status = SequenceStatus.PREFILL
        sequence.note(Activity.PREFILL, self._clock())
        self._record()
        if sequence.started is None:
            sequence.started = Started(lease.matched, lease.cached, self._clock())
            step.emit(sequence, sequence.started)

    def _publish_awaited(self, step: Step) -> bool:
        """Publish computed state that other requests wait for; True if one may start by that."""
        running = self._scheduler.running
        due = [s for s in running if s.is_awaited and not s.num_left_to_share]
        for sequence in due:
            with self._lifecycle.guard(sequence, step):
                self._kv_cache.prefilled(sequence)
        return any(not sequence.is_awaited for sequence in due)

    def _yield_slot(self, step: Step) -> bool:
        """Move a slot from one sequence to another; False if none has to yield."""
        scheduler, changes = self._scheduler, self._scheduler.waiting.changes
        settled = step.summary.fair_at == changes and self._report.latest.steps % _DRIFT
        if settled or not scheduler.may_yield(step.selection):
            return False
        scheduler.charge()
        found = scheduler.next_to_yield(scheduler.ranking())
        self._see_to(found.waiting)
        step.summary = step.summary._replace(fair_at=changes if found.is_fair else None)
        if found.victim is None:
            return False
        step.summary = step.summary._replace(reserved_for=found.claimant)
        self._put_back(found.victim, step)
        return True

    def _put_back(self, sequence: Sequence, step: Step) -> None:
        if self._suspend(sequence, step):
            self._scheduler.put_back(sequence)
            # One that was cancelled while it ran is not looked for in the queue any more.
            if sequence.cancelled and self._scheduler.waiting.remove(sequence.request.id):
                self._lifecycle.finish(sequence, FinishReason.CANCELLED, step)
            step.counts["yields"] += 1

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        if self._suspend(sequence, step):
            self._scheduler.preempt(sequence)
            step.counts["preemptions"] += 1
            sequence.note(Activity.MEMORY, self._clock())
            self._memory.note_preemption(self._scheduler.running)

    def _suspend(self, sequence: Sequence, step: Step) -> bool:
        """Leave a sequence's state to the cache; False if it has ended instead."""
        self._decoder.read(step)
        if sequence not in self._scheduler.running:
            return False  # it was complete with the token that was on its way
        self._lifecycle.keep(sequence, step, trusted=True)
        sequence.preempt(replay=self._exact)
        self._record()
        return True

    # -- what is computed --------------------------------------------------------------

    def _compute(self, batch: Batch, plan: StepPlan, step: Step) -> None:
        """Make the calls. Only the tokens of a lone decode are left under way."""
        for call in batch.calls:
            if call.end is None:
                output = self._decoder.run(call.sequences, plan, step)
            else:  # a chunk is waited for: neither tokens nor events are kept back
                self._decoder.read(step)
                self._publish_events(step)
                output = self._prefill(call, step)
            if output is not None:
                self._decoder.sample(output, call.sequences, step)
        overlaps = self._runner.overlaps and any(s.wants_more for s in self._scheduler.running)
        if batch.prefill is not None or not overlaps:
            self._decoder.read(step)
        self._publish_events(step)
        for sequence in () if batch.prefill is None else batch.prefill.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                with self._lifecycle.guard(sequence, step):
                    self._kv_cache.capture_if_due(sequence)
                    self._kv_cache.prefilled(sequence)

    def _plan(self, step: Step) -> Affordable | None:
        """Plan what fits, and preempt sequences that must make room for it, the youngest first."""
        running = self._scheduler.running
        self._record()  # evictions since the last step left gaps in the batch
        while running:
            self._kv_cache.refresh(running)
            size, precedence = self._chunk_size(), self._scheduler.prompt_precedence()
            planned = self._memory.afford(running, size, self._kv_cache.caches, precedence)
            if planned is not None:
                step.summary = step.summary._replace(disk_wait=None)
                return planned
            if not self._kv_cache.give_copies_back() and not self._make_way(step):
                return None
        return None

    def _make_way(self, step: Step) -> bool:
        """Take memory from a running sequence, the youngest; False to wait for the disk.

        The last one restarts, in a batch of its own size, where that fits.
        """
        running = self._scheduler.running
        victim = running[-1]
        if len(running) == 1:
            if self._kv_cache.drop_one_checkpoint(running):
                return True
            if not self._memory.may_restart(victim):
                if self._awaits_disk(step):
                    return False
                if not self._awaits_others(step):  # two models could wait for each other for ever
                    self._refuse(victim, step)
                    return True
        self._preempt(victim, step)
        return True

    def _chunk_size(self) -> ChunkSize:
        """The length of the next chunk: fewer tokens while others decode."""
        completing = self._runner.max_completing
        if self._exact:
            return ChunkSize(self._pace.limit, self._pace.limit, completing)
        beside = len(self._scheduler.decoding)
        return ChunkSize(self._pace.prefill_tokens(beside), completing=completing)

    def _prefill(self, call: Call, step: Step) -> ForwardOutput | None:
        """Compute a chunk, and wait for it; returns the logits that follow a complete prompt."""
        began, sequence = self._clock(), call.sequences[0]
        tokens = sequence.tokens[sequence.num_computed_tokens : call.end].tolist()
        cache, output = self._kv_cache.caches[sequence], None
        try:
            if call.completes:
                output = self._runner.complete(tokens, cache)
            else:
                self._runner.prefill(tokens, cache)
        except BaseException as error:  # noqa: BLE001  (also a panic in native code)
            self._lifecycle.fail(sequence, error, step)
            return None
        self._scheduler.advance_prompt(sequence, len(tokens))
        step.counts["prefill_tokens"] += len(tokens)
        if call.completes:
            sequence.status = SequenceStatus.DECODE
            sequence.note(Activity.DECODE, self._clock())
        self._pace.observe(len(tokens), self._clock() - began)
        return output

    # -- memory, and the end of a step -------------------------------------------------

    def _awaits_disk(self, step: Step) -> bool:
        """Return True if the disk tier is about to free memory by a write."""
        writes = self._kv_cache.paging.writes
        return self._kv_cache.writing and step.await_disk(self._clock(), writes)

    def _awaits_others(self, step: Step) -> bool:
        """Return True if requests of another model will free memory. Their ends are waited for."""
        step.awaits_others = self._memory.others_busy
        return step.awaits_others

    def _refuse(self, sequence: Sequence, step: Step) -> None:
        """End a sequence for which there is no memory."""
        pinned = self._kv_cache.pinned_by(sequence.request.tenant)
        error = no_room(self._memory.needed(sequence), self._memory.usable, pinned)
        self._lifecycle.finish(sequence, FinishReason.ERROR, step, error)

    def _record(self) -> None:
        self._memory.record(self._kv_cache.caches.values())

    def _give_back(self) -> None:
        """Give back what was reserved, unless tokens are under way."""
        self._record()
        if not self._scheduler.running:
            self._decoder.drop()
        if not self._decoder.pending:
            self._memory.release()

    def _next_pace(self, step: Step, *, pages: bool, computed: bool) -> Pace:
        if pages or (computed and self._scheduler.running):
            return Pace.BUSY
        if self._scheduler.idle:
            return Pace.WAITING if self._kv_cache.paging.unwritten else Pace.IDLE
        waits = step.selection.reads or step.waits_for_memory or self._scheduler.held
        return Pace.WAITING if waits else Pace.BUSY

    def _publish_events(self, step: Step) -> None:
        if events := step.take_events():
            self._publish(events)

    def _recover(self, error: BaseException, step: Step) -> Pace:
        """End the requests at work, as a step has failed that was for all of them."""
        log.error("a step failed; the requests at work end", exc_info=error)
        self._decoder.drop()
        ended = self._lifecycle.end_all(error, step)
        self._publish_events(step)
        try:
            self._record()
            self._memory.release()
            self._report.end_step(self._scheduler.at_work, step.counts)
        except BaseException:
            log.exception("memory is not counted after a step that failed")
        return Pace.BUSY if ended else Pace.IDLE
