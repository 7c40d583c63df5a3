"""The engine: `step()` is schedule, run, publish. It lives on the MLX thread."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import structlog

from ..cachestore.prefix_cache import CacheStatistics
from ..models.params import Token
from .errors import ComputationError, DeadlineExceededError, RequestError
from .forward import Choice, Fed, Forward
from .policy import Batch, StallBound, plan
from .queue import ConversationQueue
from .request import Event, Finished, FinishReason, Started, TokenEvent
from .reuse import PrefixReuse
from .sequence import Sequence, SequenceStatus
from .statistics import EngineStatistics, describe

log = structlog.get_logger()


Publish = Callable[[Iterable[tuple[Sequence, Event]]], None]


class Engine:
    """Works on queued sequences, one step at a time.

    Every sequence it takes ends in a `Finished` event, whatever happens on the way; what
    one sequence raises ends that sequence only.

    Args:
        forward: the model.
        reuse: the cache of its state.
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
        forward: Forward,
        reuse: PrefixReuse,
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
        self._forward = forward
        self._reuse = reuse
        self._queue = queue
        self._publish = publish
        self._eos_ids = eos_ids
        self._prefill_chunk = prefill_chunk
        self._max_batch = max_batch
        self._stall = StallBound(max_stall)
        self._exact = exact
        self._clock = clock
        self._running: list[Sequence] = []
        self._drawn: tuple[Choice, list[Sequence]] | None = None  # launched, not read yet
        self._events: list[tuple[Sequence, Event]] = []
        self._totals = Counter[str]()
        self._cache = CacheStatistics()
        self._steps = 0
        self._last_step_at = clock()
        self._publish_statistics()

    def step(self) -> bool:
        """Do one step's work. False when there was none."""
        if not self._running:
            self._last_step_at = self._clock()  # it was idle until now, not stalled
        batch = self._schedule()
        self._publish_statistics()  # so that a step that hangs is seen with who hangs in it
        self._run(batch)
        self._publish_step()
        if not self._running:
            self._drawn = None  # whom it was for has left
        return bool(self._running) or len(self._queue) > 0

    def statistics(self) -> EngineStatistics:
        """Read the last published statistics. Safe to call from any thread."""
        return self._statistics

    def _schedule(self) -> Batch:
        self._drop_ended()
        while len(self._running) < self._max_batch and (
            sequence := self._queue.take(lambda s: not self._reuse.shall_wait(s, self._running))
        ):
            self._begin(sequence)
        self._reuse.refresh(self._running)
        return plan(self._running, self._chunk())

    def _chunk(self) -> int:
        if self._exact:
            return self._prefill_chunk
        decoding = any(not sequence.num_left_to_prefill for sequence in self._running)
        return self._stall.chunk(self._prefill_chunk) if decoding else self._prefill_chunk

    def _drop_ended(self) -> None:
        now = self._clock()
        for sequence in self._queue.expired(now):
            self._finish(sequence, FinishReason.ERROR, _late(sequence))
        for sequence in tuple(self._running):
            if sequence.cancelled:
                self._finish(sequence, FinishReason.CANCELLED)
            elif sequence.request.deadline <= now and sequence.wants_more:
                self._finish(sequence, FinishReason.ERROR, _late(sequence))

    def _begin(self, sequence: Sequence) -> None:
        self._running.append(sequence)
        self._publish_statistics()
        self._guarded(sequence, self._reuse.begin)
        if sequence.status is SequenceStatus.FINISHED:
            return
        sequence.status = SequenceStatus.PREFILL
        self._events.append(
            (
                sequence,
                Started(sequence.num_matched_tokens, sequence.num_cached_tokens, self._clock()),
            )
        )
        self._count(
            prompt_tokens=sequence.num_prompt_tokens,
            prompt_tokens_cached=sequence.num_cached_tokens,
        )

    def _run(self, batch: Batch) -> None:
        """Launch this step's decode, then see to what the last one brought."""
        fed, errors = self._feed(batch.decode)
        self._collect()
        for number, error in errors.items():
            self._fail(batch.decode[number], error)
        if fed is not None:
            self._choose(fed, batch.decode)
        if batch.prefill is not None:
            # A chunk shall not keep tokens back, nor its time be taken for the decode's.
            self._collect()
            self._publish_events()
            self._guarded(batch.prefill, partial(self._prefill, end=batch.end))
        elif not self._forward.overlaps or not any(s.wants_more for s in self._running):
            self._collect()  # nothing is gained by launching, or left to launch, before it

    def _prefill(self, sequence: Sequence, end: int) -> None:
        start, began = sequence.num_computed_tokens, self._clock()
        self._forward.prefill(sequence.request.prompt[start:end], sequence.states)
        sequence.num_computed_tokens = end
        self._stall.observe(end - start, self._clock() - began)
        self._count(prefill_tokens=end - start)
        self._reuse.advanced(sequence)
        self._reuse.prefilled(sequence)

    def _feed(self, sequences: tuple[Sequence, ...]) -> tuple[Fed | None, dict[int, BaseException]]:
        """Launch the model on the sequences' next tokens.

        Whom it fails for is told, not failed yet: their last tokens are still on the way.
        """
        if not sequences:
            return None, {}
        try:
            fed = self._forward.feed([(s.states, s.next_token) for s in sequences])
        except BaseException as error:  # noqa: BLE001  (the model itself failed, under all of them)
            return None, dict.fromkeys(range(len(sequences)), error)
        for number, sequence in enumerate(sequences):
            if number not in fed.errors:
                self._fed(sequence)
        return fed, fed.errors

    def _fed(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.DECODE
        if sequence.num_computed_tokens < sequence.num_prompt_tokens:
            self._count(prefill_tokens=1)  # the prompt's last token
        sequence.num_computed_tokens += 1

    def _choose(self, fed: Fed, sequences: tuple[Sequence, ...]) -> None:
        """Launch the choice of tokens for those who go on. Their answers are known by now."""
        going = {n: s for n, s in enumerate(sequences) if s.status is SequenceStatus.DECODE}
        for sequence in going.values():
            self._guarded(sequence, self._reuse.advanced)
        going = {n: s for n, s in going.items() if s.status is SequenceStatus.DECODE}
        if not going:
            return
        choice = self._forward.choose(fed, {n: s.row for n, s in going.items()})
        chosen = list(going.values())
        self._drawn = choice, chosen
        for place, sequence in enumerate(chosen):
            if place in choice.errors:
                self._fail(sequence, choice.errors[place])
            else:
                sequence.drawn = self._forward.drawn(choice, place)

    def _collect(self) -> None:
        """Wait for the tokens that were launched last, and hand them out."""
        if self._drawn is None:
            return
        (choice, sequences), self._drawn = self._drawn, None
        try:
            tokens = choice.read()
        except BaseException as error:  # noqa: BLE001  (the computation failed, under all of them)
            for sequence in sequences:
                if sequence.status is SequenceStatus.DECODE:
                    self._fail(sequence, error)
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.status is SequenceStatus.DECODE:
                self._guarded(sequence, partial(self._decoded, token=token))

    def _decoded(self, sequence: Sequence, token: Token) -> None:
        sequence.drawn = None
        if token.id in self._eos_ids:
            sequence.end_token = token.id
            self._finish(sequence, FinishReason.STOP)
            return
        sequence.output.append(token.id)
        self._events.append((sequence, TokenEvent(token.id, self._clock(), token.logprobs)))
        self._count(generation_tokens=1)
        if len(sequence.output) >= sequence.request.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

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
        if sequence in self._running:
            self._running.remove(sequence)
            self._queue.release(sequence)
            self._keep(sequence, trusted=not isinstance(error, ComputationError))
        sequence.status = SequenceStatus.FINISHED
        sequence.states = None
        self._events.append((sequence, Finished(reason, error)))

    def _keep(self, sequence: Sequence, *, trusted: bool) -> None:
        """Hand the sequence's state to the cache. What that raises costs the state only."""
        try:
            self._reuse.end(sequence, keep=trusted)
        except BaseException as error:
            # The answer is complete and must arrive, also after a panic in native code.
            log.exception("state not kept", request=sequence.request.id)
            error.__traceback__ = None  # as in _fail
            self._reuse.end(sequence, keep=False)
        self._cache = self._reuse.statistics()

    def _count(self, **more: int) -> None:
        self._totals.update(more)

    def _publish_statistics(self) -> None:
        self._statistics = EngineStatistics(
            **self._totals,
            batch_shapes=len(self._forward.shapes),
            cache=self._cache,
            running=tuple(describe(sequence) for sequence in self._running),
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


def _late(sequence: Sequence) -> DeadlineExceededError:
    state = "waited" if sequence.status is SequenceStatus.WAITING else "ran"
    return DeadlineExceededError(f"the request still {state} when its time was over")
