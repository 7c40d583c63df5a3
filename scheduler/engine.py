"""The engine: a step is schedule, plan, reserve, run, process output, sample, publish.

It lives on the MLX thread. A step launches its decode before it reads the tokens of the step
before, and publishes events after that launch and at its end.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Generic

import structlog

from .decoder import Decoder
from .errors import UnavailableError
from .kv_cache_manager import KVCacheManager
from .lifecycle import Lifecycle
from .limits import late, no_room
from .masks import MaskPool
from .memory import Affordable, MemoryPlanner, Shortage
from .policy import Batch, PrefillChunk
from .prefiller import Prefiller
from .queue import ConversationQueue
from .report import EngineReport
from .request import Event, FinishReason, Started
from .runner import C, ModelRunner, O, P, T
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .statistics import EngineStatistics
from .thread import Pace
from .times import Activity

log = structlog.get_logger()

_STARTING = 0.1
"""Of the longest that a chunk may keep others waiting: for so long requests start in one step."""

Publish = Callable[[Iterable[tuple[Sequence, Event]]], None]


class Engine(Generic[C, P, O, T]):
    """Works on queued sequences, one step at a time.

    Every sequence it takes ends in a `Finished` event, whatever happens on the way; what
    one sequence raises ends that sequence only, and what a step raises those at work.

    Args:
        runner: of the model.
        kv_cache: the cache of its state.
        memory: says what fits.
        queue: where sequences wait.
        publish: takes each step's events; must neither block nor raise.
        eos_ids: tokens that end an answer.
        prefill_chunk: the most prompt tokens that one step computes.
        max_batch: the most sequences that run at once.
        max_stall: the longest that a prefill chunk may keep others from their next token, in
            seconds.
        exact: prefill chunks are never cut, so that they are the same whatever else runs.
        token_bytes: see `Scheduler`.
        clock: seconds, monotonic; the one that deadlines are on.
    """

    def __init__(
        self,
        runner: ModelRunner[C, P, O, T],
        kv_cache: KVCacheManager[C],
        memory: MemoryPlanner[C, P],
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
        self._scheduler = Scheduler(queue, kv_cache, memory, max_batch, token_bytes)
        self._publish = publish
        self._exact = exact
        self._clock = clock
        self._running = self._scheduler.running
        self._masks = MaskPool()
        self._starting = _STARTING * max_stall
        self._shortage = Shortage(kv_cache, memory, clock)
        self._report = EngineReport(runner, kv_cache, memory, self._scheduler, clock)
        self._totals = self._report.totals
        self._lifecycle = Lifecycle(self._scheduler, kv_cache, retries=not exact)
        self._decoder = Decoder(
            runner, kv_cache, self._lifecycle, self._totals, eos_ids=eos_ids, clock=clock
        )
        self._prefiller = Prefiller(
            runner,
            kv_cache,
            self._scheduler,
            self._lifecycle,
            self._totals,
            most=prefill_chunk,
            max_stall=max_stall,
            exact=exact,
            clock=clock,
        )

    def step(self) -> Pace:
        """Do one step's work, and say when the next one is due."""
        try:
            return self._step()
        except BaseException as error:  # noqa: BLE001  (also a Rust panic)
            return self._recover(error)

    def _recover(self, error: BaseException) -> Pace:
        """End the requests at work, as a step has failed that was for all of them."""
        log.error("a step failed; the requests at work end", exc_info=error)
        self._decoder.drop()
        ended = self._lifecycle.end_all(error)
        self._publish_events()
        try:
            self._record()
            self._memory.release()
            self._report.end_step()
        except BaseException:
            log.exception("memory is not counted after a step that failed")
        return Pace.BUSY if ended else Pace.IDLE

    def _step(self) -> Pace:
        if not self._running:
            self._report.begin_work()
        short = self._scheduler.short or self._shortage.waits
        reading = self._kv_cache.page(busy=bool(self._running) and not short)
        self._shortage.begin_step()
        self._admit()
        step = self._afford()
        self._report.publish()  # so that a step that hangs is seen with who hangs in it
        if step is not None:
            self._run(step.batch, step.plan)
        self._record()
        if not self._running:
            self._decoder.drop()
        if not self._decoder.pending:
            self._memory.release()
        pace = self._pace(step, reading=reading)
        if pace is Pace.IDLE or self._lifecycle.handed_over or self._report.is_cache_due:
            self._report.describe_cache()
            self._lifecycle.handed_over = False
        self._report.end_step()
        self._publish_events()
        return pace

    def _pace(self, step: Affordable[P] | None, *, reading: bool) -> Pace:
        if reading:
            return Pace.BUSY
        if step is not None and self._running:
            return Pace.BUSY
        if self._scheduler.idle:
            return Pace.WAITING if self._kv_cache.unwritten else Pace.IDLE
        waits = self._scheduler.reading or self._shortage.waits or self._scheduler.held
        return Pace.WAITING if waits else Pace.BUSY

    def close(self) -> None:
        """Give all memory back. No sequence may wait or run."""
        self._decoder.drop()
        self._memory.close()

    def statistics(self) -> EngineStatistics:
        """Read the last published statistics. Safe to call from any thread."""
        return self._report.latest

    def _admit(self) -> None:
        self._drop_ended()
        self._start()
        if (yielding := self._scheduler.yielding()) is not None:
            self._yield(yielding)
            self._start()
        while True:
            stuck = self._scheduler.take_stuck()
            if stuck is None or self._shortage.awaits_disk() or self._shortage.awaits_others():
                return
            self._lifecycle.finish(stuck, FinishReason.ERROR, self._no_room(stuck))
            self._start()

    def _start(self) -> None:
        """Start all who may, and beside those who decode no more than a few at a time."""
        until = self._clock() + (self._starting if self._scheduler.decoding else math.inf)
        while True:
            with self._scheduler.starting():
                while sequence := self._scheduler.start_next():
                    self._begin(sequence)
                    if self._clock() >= until:
                        return
            if not self._prefiller.share():
                return

    def _afford(self) -> Affordable[P] | None:
        """Plan what fits, and preempt sequences that must make room for it, the youngest first.

        The last of them starts anew, in a batch of its own size, where that fits.
        """
        self._record()  # what lies side by side has gaps where stored state has gone since
        self._scheduler.weigh()
        while self._running:
            self._kv_cache.refresh(self._running)
            step = self._memory.afford(
                self._running,
                self._prefiller.chunk_size(),
                self._kv_cache.caches,
            )
            if step is not None:
                self._shortage.end()
                return step
            victim = self._scheduler.victim()
            if victim is None and self._kv_cache.give_one_up(self._running):
                continue
            if victim is None and self._memory.may_restart(self._running[0]):
                victim = self._running[0]
            if victim is None and self._shortage.awaits_disk():
                return None
            if victim is None and self._shortage.awaits_others():
                victim = self._running[0]  # two models that wait for each other's would for ever
            if victim is None:
                alone = self._running[0]
                self._lifecycle.finish(alone, FinishReason.ERROR, self._no_room(alone))
            else:
                self._preempt(victim)
        return None

    def _preempt(self, sequence: Sequence) -> None:
        """Have a sequence without state until there is room for it again."""
        if self._leave(sequence):
            self._scheduler.preempt(sequence)
            self._totals.update(preemptions=1)
            sequence.note(Activity.MEMORY, self._clock())
            self._memory.preempted(self._running)

    def _yield(self, sequence: Sequence) -> None:
        """Have a sequence give its slot to another, and wait again."""
        if self._leave(sequence):
            self._scheduler.put_back(sequence)
            # Who was cancelled while it ran is not looked for in the queue any more.
            if sequence.cancelled and self._scheduler.waiting.remove(sequence.request.id):
                self._lifecycle.finish(sequence, FinishReason.CANCELLED)
            self._totals.update(yields=1)

    def _leave(self, sequence: Sequence) -> bool:
        """Leave a sequence's state to the cache; False if it has ended instead."""
        self._decoder.process_output()
        if sequence not in self._running:
            return False  # it was complete with the token that was on its way
        self._lifecycle.keep(sequence, trusted=True)
        sequence.preempt(replay=self._exact)
        self._record()
        return True

    def _no_room(self, sequence: Sequence) -> UnavailableError:
        pinned = self._kv_cache.pinned_by(sequence.request.tenant)
        return no_room(self._memory.needed(sequence), self._memory.usable, pinned)

    def _drop_ended(self) -> None:
        now = self._clock()
        for sequence in self._scheduler.waiting.expired(now):
            self._lifecycle.finish(sequence, FinishReason.ERROR, late(sequence))
        for sequence in (*self._running, *self._scheduler.preempted):
            if sequence.cancelled:
                self._lifecycle.finish(sequence, FinishReason.CANCELLED)
            elif sequence.request.deadline <= now and sequence.wants_more:
                self._lifecycle.finish(sequence, FinishReason.ERROR, late(sequence))

    def _begin(self, sequence: Sequence) -> None:
        self._report.publish()
        resumes = sequence.status is SequenceStatus.PREEMPTED
        self._lifecycle.guard(sequence, self._open)
        if sequence.status is SequenceStatus.FINISHED:
            return
        sequence.status = SequenceStatus.PREFILL
        sequence.note(Activity.PREFILL, self._clock())
        self._record()
        if resumes:
            return
        started = Started(sequence.matched, sequence.cached, self._clock())
        self._lifecycle.emit(sequence, started)
        self._totals.update(
            prompt_tokens=sequence.num_prompt_tokens, prompt_tokens_cached=sequence.cached
        )

    def _open(self, sequence: Sequence) -> None:
        grammar = sequence.request.grammar
        if grammar is not None and sequence.constraint is None:
            sequence.constraint = self._masks.constrain(grammar)
        self._kv_cache.begin(sequence)

    def _run(self, batch: Batch, plan: P) -> None:
        """Launch the decode, hand out the tokens of the step before, then compute the chunk."""
        output = self._decoder.run(batch.decode, plan)
        if output is not None:
            self._decoder.sample(output, batch.decode)
        overlaps = self._runner.overlaps and any(s.wants_more for s in self._running)
        if batch.prefill is not None or not overlaps:
            self._decoder.process_output()  # a chunk must not keep tokens back
        self._publish_events()
        if batch.prefill is not None:
            self._prefill(batch.prefill)

    def _prefill(self, chunk: PrefillChunk) -> None:
        """Compute a chunk, hand out the token that follows a complete prompt, store the state."""
        output = self._prefiller.run(chunk)
        if output is not None:
            self._decoder.sample(output, (chunk.sequence,))
            self._decoder.process_output()
            self._publish_events()  # what is stored is packed first, which takes a while
        self._prefiller.store(chunk.sequence)

    def _record(self) -> None:
        self._memory.record(self._kv_cache.caches.values())

    def _publish_events(self) -> None:
        if events := self._lifecycle.take_events():
            self._publish(events)
