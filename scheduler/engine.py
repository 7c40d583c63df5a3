"""The engine: a step is schedule, plan, reserve, run, process output, sample, publish.

It lives on the MLX thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from ..cachestore.statistics import CacheStatistics
from ..models.params import Token
from .errors import ComputationError, DeadlineExceededError, RequestError, UnavailableError
from .kv_cache_manager import KVCacheManager
from .masks import MaskPool
from .memory import Affordable, MemoryPlanner
from .policy import StallBound
from .queue import RETRY_AFTER, ConversationQueue
from .request import Event, Finished, FinishReason, Started, TokenEvent
from .runner import ForwardOutput, ModelRunner, SamplerOutput, StepPlan
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus
from .statistics import EngineStatistics, describe
from .thread import Pace

_DISK_PATIENCE = 10.0
"""Seconds for which a request waits for memory that holds what is being written to disk."""

_SOON = 0.005
"""Seconds that the end of a step waits to hear which answers are complete."""

_DESCRIBED_EVERY = 1.0
"""Seconds after which the cache is described anew; at the end of a request it always is."""

log = structlog.get_logger()


Publish = Callable[[Iterable[tuple[Sequence, Event]]], None]


class Engine:
    """Works on queued sequences, one step at a time.

    Every sequence it takes ends in a `Finished` event, whatever happens on the way; what
    one sequence raises ends that sequence only.

    Args:
        runner: of the model.
        kv_cache: the cache of its state.
        memory: says what fits.
        queue: where sequences wait.
        publish: takes each step's events; must not block.
        eos_ids: tokens that end an answer.
        prefill_chunk: the most prompt tokens that one step computes.
        max_batch: the most sequences that run at once.
        max_stall: the longest that a prefill chunk may keep others from their next token, in
            seconds.
        exact: prefill chunks are never cut, so that they are the same whatever else runs.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._memory = memory
        self._scheduler = Scheduler(queue, kv_cache, memory, max_batch)
        self._publish = publish
        self._eos_ids = eos_ids
        self._prefill_chunk = prefill_chunk
        self._stall = StallBound(max_stall)
        self._exact = exact
        self._clock = clock
        self._running = self._scheduler.running
        self._masks = MaskPool()
        self._pending: tuple[SamplerOutput, list[Sequence]] | None = None  # launched, not read yet
        self._stalled = False  # the last step had a prefill chunk
        self._waits_since: float | None = None  # for memory that the disk tier holds
        self._events: list[tuple[Sequence, Event]] = []
        self._totals = Counter[str]()
        self._cache = CacheStatistics()
        self._describe_at = 0.0
        self._steps = 0
        self._last_step_at = clock()
        self._publish_statistics()

    def step(self) -> Pace:
        """Do one step's work, and say when the next one is due."""
        if not self._running:
            self._last_step_at = self._clock()  # it was idle until now, not stalled
        reading = self._kv_cache.page()
        self._admit()
        step = self._afford()
        self._publish_statistics()  # so that a step that hangs is seen with who hangs in it
        if step is not None:
            self._run(step)
        self._memory.record(self._running)
        if self._pending is None or not self._running:
            self._pending = None  # whom it was for has left
            self._memory.release()
        pace = self._pace(step, reading=reading)
        if pace is Pace.IDLE or self._clock() >= self._describe_at:
            self._describe_cache()
        self._publish_step()
        return pace

    def _pace(self, step: Affordable | None, *, reading: bool) -> Pace:
        if (step is not None and self._running) or reading:
            return Pace.BUSY
        if self._scheduler.idle:
            return Pace.IDLE
        return (
            Pace.WAITING if self._scheduler.reading or self._waits_since is not None else Pace.BUSY
        )

    def statistics(self) -> EngineStatistics:
        """Read the last published statistics. Safe to call from any thread."""
        return self._statistics

    def _admit(self) -> None:
        self._drop_ended()
        while True:
            while sequence := self._scheduler.start_next():
                self._begin(sequence)
            stuck = self._scheduler.stuck()
            if stuck is None or self._waits_for_disk():
                return
            self._finish(stuck, FinishReason.ERROR, self._no_room(stuck))

    def _afford(self) -> Affordable | None:
        """Plan what fits, and preempt sequences that must make room for it, the youngest first."""
        while self._running:
            self._kv_cache.refresh(self._running)
            step = self._memory.afford(self._running, self._chunk())
            if step is not None:
                self._waits_since = None
                return step
            victim = self._scheduler.victim()
            if victim is None and self._kv_cache.give_one_up(self._running):
                continue
            if victim is None and self._waits_for_disk():
                return None
            if victim is None:
                alone = self._running[0]
                self._finish(alone, FinishReason.ERROR, self._no_room(alone))
            else:
                self._preempt(victim)
        return None

    def _waits_for_disk(self) -> bool:
        """Whether what lacks is about to be given up by the disk tier, which writes it.

        A disk that does not answer is not waited for.
        """
        if not self._kv_cache.writing:
            return False
        if self._waits_since is None:
            self._waits_since = self._clock()
        return self._clock() - self._waits_since < _DISK_PATIENCE

    def _preempt(self, sequence: Sequence) -> None:
        """Leave a sequence's state to the cache until there is room for it again."""
        self._process_output()
        if sequence not in self._running:
            return  # it was complete with the token that was on its way
        self._scheduler.preempt(sequence)
        self._keep(sequence, trusted=True)
        sequence.preempt(replay=self._exact)
        self._memory.record(self._running)
        self._count(preemptions=1)

    def _no_room(self, sequence: Sequence) -> UnavailableError:
        pinned = self._kv_cache.pinned_bytes
        return UnavailableError(
            f"memory is short: the request needs {self._memory.needed(sequence)} bytes of "
            f"{self._memory.usable} that may be used at present"
            + (f", of which pins hold {pinned}: unpin something, or" if pinned else ";")
            + " try again later",
            retry_after=RETRY_AFTER,
        )

    def _chunk(self) -> int:
        if self._exact:
            return self._prefill_chunk
        decoding = any(not sequence.num_left_to_prefill for sequence in self._running)
        return self._stall.chunk(self._prefill_chunk) if decoding else self._prefill_chunk

    def _drop_ended(self) -> None:
        now = self._clock()
        for sequence in self._scheduler.waiting.expired(now):
            self._finish(sequence, FinishReason.ERROR, _late(sequence))
        for sequence in (*self._running, *self._scheduler.preempted):
            if sequence.cancelled:
                self._finish(sequence, FinishReason.CANCELLED)
            elif sequence.request.deadline <= now and sequence.wants_more:
                self._finish(sequence, FinishReason.ERROR, _late(sequence))

    def _begin(self, sequence: Sequence) -> None:
        self._publish_statistics()
        resumes = sequence.status is SequenceStatus.PREEMPTED
        self._guarded(sequence, self._open)
        if sequence.status is SequenceStatus.FINISHED:
            return
        sequence.status = SequenceStatus.PREFILL
        self._memory.record(self._running)
        if resumes:
            return
        started = Started(sequence.matched, sequence.cached, self._clock())
        self._events.append((sequence, started))
        self._count(prompt_tokens=sequence.num_prompt_tokens, prompt_tokens_cached=sequence.cached)

    def _open(self, sequence: Sequence) -> None:
        grammar = sequence.request.grammar
        if grammar is not None and sequence.constraint is None:
            sequence.constraint = self._masks.constrain(grammar)
        self._kv_cache.begin(sequence)

    def _run(self, step: Affordable) -> None:
        """Launch this step's decode, then see to what the last one brought."""
        batch = step.batch
        output, errors = self._decode(batch.decode, step.plan)
        self._process_output()
        for place, error in errors.items():
            self._fail(batch.decode[place], error)
        if output is not None:
            self._sample(output, batch.decode)
        stalled, self._stalled = self._stalled, batch.prefill is not None
        if batch.prefill is not None:
            # A chunk shall not keep tokens back, nor its time be taken for the decode's.
            self._process_output()
            self._publish_events()
            self._guarded(batch.prefill, partial(self._prefill, end=batch.end))
        elif stalled or not self._runner.overlaps or not any(s.wants_more for s in self._running):
            # After a chunk the streams have waited long enough to do without the overlap once;
            # else nothing is gained by launching, or left to launch, before it.
            self._process_output()

    def _prefill(self, sequence: Sequence, end: int) -> None:
        start, began = sequence.num_computed_tokens, self._clock()
        self._runner.prefill(sequence.tokens[start:end].tolist(), sequence.cache)
        sequence.num_computed_tokens = end
        self._stall.observe(end - start, self._clock() - began)
        for earlier in self._running[: self._running.index(sequence)]:
            if earlier.num_left_to_prefill:
                earlier.num_passed_over += end - start
        self._count(prefill_tokens=end - start)
        self._kv_cache.advanced(sequence)
        self._kv_cache.prefilled(sequence)

    def _decode(
        self, sequences: tuple[Sequence, ...], plan: StepPlan
    ) -> tuple[ForwardOutput | None, dict[int, BaseException]]:
        """Launch the model on the sequences' next tokens.

        Those for whom it fails are returned, not ended yet: their last tokens are on the way.
        """
        if not sequences:
            return None, {}
        caches, tokens = [s.cache for s in sequences], [s.next_token for s in sequences]
        try:
            output = self._runner.run(plan.decode, caches, tokens)
        except BaseException as error:  # noqa: BLE001  (the model itself failed, under all of them)
            return None, dict.fromkeys(range(len(sequences)), error)
        for place, sequence in enumerate(sequences):
            if place not in output.errors:
                self._ran(sequence)
        return output, output.errors

    def _ran(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.DECODE
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            self._count(prefill_tokens=1)  # the prompt's last token
        sequence.num_computed_tokens += 1

    def _sample(self, output: ForwardOutput, sequences: tuple[Sequence, ...]) -> None:
        """Launch sampling for those who go on. Their answers are known by now."""
        going = {n: s for n, s in enumerate(sequences) if s.status is SequenceStatus.DECODE}
        for sequence in going.values():
            self._guarded(sequence, self._advanced)
        going = {
            n: s for n, s in going.items() if s.status is SequenceStatus.DECODE and not s.replays
        }
        if not going:
            return
        sampled = self._runner.sample(output, {n: s.row for n, s in going.items()})
        sequences = tuple(going.values())
        self._pending = sampled, list(sequences)
        for place, sequence in enumerate(sequences):
            if place in sampled.errors:
                self._fail(sequence, sampled.errors[place])
            else:
                sequence.pending = self._runner.pending(sampled, place)

    def _advanced(self, sequence: Sequence) -> None:
        self._kv_cache.advanced(sequence)
        if not sequence.replays:
            self._end_if_complete(sequence)

    def _process_output(self) -> None:
        """Wait for the tokens that were launched last, and hand them out."""
        if self._pending is None:
            return
        (sampled, sequences), self._pending = self._pending, None
        try:
            tokens = sampled.read()
        except BaseException as error:  # noqa: BLE001  (the computation failed, under all of them)
            for sequence in sequences:
                if sequence.status is SequenceStatus.DECODE:
                    self._fail(sequence, error)
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.status is SequenceStatus.DECODE:
                self._guarded(sequence, partial(self._decoded, token=token))
        self._end_complete(sequences)

    def _decoded(self, sequence: Sequence, token: Token) -> None:
        sequence.pending = None
        ends = token.id in self._eos_ids
        if sequence.constraint is not None:
            sequence.constraint.take(token.id, ends=ends)
        if ends:
            sequence.end_token = token.id
            self._finish(sequence, FinishReason.STOP)
            return
        sequence.output.append(token.id)
        self._events.append((sequence, TokenEvent(token.id, self._clock(), token.logprobs)))
        self._count(generation_tokens=1)
        if len(sequence.output) >= sequence.request.max_tokens:
            complete = _is_complete(sequence)
            self._finish(sequence, FinishReason.STOP if complete else FinishReason.LENGTH)

    def _end_complete(self, sequences: list[Sequence]) -> None:
        """End complete answers without another step, where that is known soon."""
        until = time.monotonic() + _SOON
        for sequence in sequences:
            if sequence.status is SequenceStatus.DECODE and sequence.constraint is not None:
                if not sequence.constraint.is_known(max(0.0, until - time.monotonic())):
                    return  # those after it are computed later
                self._guarded(sequence, self._end_if_complete)

    def _end_if_complete(self, sequence: Sequence) -> None:
        """End an answer behind which its grammar allows nothing. Waits until that is known."""
        if sequence.constraint is not None and sequence.constraint.mask is None:
            self._finish(sequence, FinishReason.STOP)

    def _guarded(self, sequence: Sequence, work: Callable[[Sequence], None]) -> None:
        """Do something for one sequence; a fault ends that sequence only."""
        try:
            work(sequence)
        except BaseException as error:  # noqa: BLE001  (as said, also a Rust panic)
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        ended = sequence.status is SequenceStatus.FINISHED
        if not ended:
            log.error("request failed", request=sequence.request.id, exc_info=error)
        error.__traceback__ = None  # its frames hold the state that is freed now
        if ended:
            return  # by the token before: the step that failed was not needed
        message = f"the request failed while it was computed: {type(error).__name__}: {error}"
        self._finish(sequence, FinishReason.ERROR, ComputationError(message))

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: RequestError | None = None
    ) -> None:
        """End a sequence: free what it holds, let its conversation go on, say so."""
        if sequence in self._scheduler:
            self._scheduler.remove(sequence)
            self._keep(sequence, trusted=not isinstance(error, ComputationError))
        sequence.status = SequenceStatus.FINISHED
        sequence.cache = None
        self._events.append((sequence, Finished(reason, error)))

    def _keep(self, sequence: Sequence, *, trusted: bool) -> None:
        """Hand the sequence's state to the cache. What that raises costs the state only."""
        try:
            self._kv_cache.end(sequence, keep=trusted)
        except BaseException as error:
            # The answer is complete and must arrive, also after a panic in native code.
            log.exception("state not kept", request=sequence.request.id)
            error.__traceback__ = None  # as in _fail
            self._kv_cache.end(sequence, keep=False)
        self._describe_at = 0.0

    def _describe_cache(self) -> None:
        """Walk the cache, which takes the longer the more there is: not in every step."""
        self._cache = self._kv_cache.statistics()
        self._describe_at = self._clock() + _DESCRIBED_EVERY

    def _count(self, **more: int) -> None:
        self._totals.update(more)

    def _publish_statistics(self) -> None:
        self._statistics = EngineStatistics(
            **self._totals,
            batch_shapes=len(self._runner.shapes),
            page_ins=self._kv_cache.page_ins,
            cache=self._cache,
            memory=self._memory.use(),
            running=tuple(map(describe, (*self._running, *self._scheduler.preempted))),
            steps=self._steps,
            last_step_at=self._last_step_at,
        )

    def _publish_step(self) -> None:
        self._steps += 1
        self._last_step_at = self._clock()
        self._publish_statistics()
        self._publish_events()

    def _publish_events(self) -> None:
        events, self._events = self._events, []
        if events:
            self._publish(events)


def _is_complete(sequence: Sequence) -> bool:
    """Whether nothing but the end can follow an answer that ends here for its length.

    Waits until that is known. No token is chosen with this mask, so one that fails fails nobody.
    """
    try:
        return sequence.constraint is not None and sequence.constraint.mask is None
    except BaseException as error:  # noqa: BLE001  (also a Rust panic)
        log.warning("mask failed behind the last token", request=sequence.request.id, error=error)
        return False


def _late(sequence: Sequence) -> DeadlineExceededError:
    state = "waited" if sequence.status is SequenceStatus.WAITING else "ran"
    return DeadlineExceededError(f"the request still {state} when its time was over")
