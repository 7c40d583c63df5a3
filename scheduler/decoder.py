"""Tokens of answers: a decode is launched before the tokens of the step before are read."""

import time
from collections.abc import Callable

import structlog

from ..models.params import Token
from ..models.runner import ModelRunner
from ..models.sampling import ForwardOutput, PendingToken, SamplerOutput
from ..models.step_plan import StepPlan
from .kv_cache_manager import KVCacheManager
from .lifecycle import Lifecycle, Step
from .masks import MaskPool
from .request import FinishReason, TokenEvent
from .sequence import Sequence, SequenceStatus

_SOON = 0.005  # seconds that the end of a step waits to know which answers are complete

log = structlog.get_logger()


class Decoder:
    """Gives sequences their next tokens, ends complete answers, and holds the tokens under way."""

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache: KVCacheManager,
        lifecycle: Lifecycle,
        *,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._lifecycle = lifecycle
        self._eos_ids = eos_ids
        self._clock = clock
        self._masks = MaskPool()
        # tokens that may still be computed, and their sequences
        self._sampled: tuple[SamplerOutput, tuple[Sequence, ...]] | None = None

    def constrain(self, sequence: Sequence) -> None:
        """Begin to follow the grammar of a sequence's answer, if it has one."""
        grammar = sequence.request.grammar
        if grammar is not None and sequence.constraint is None:
            sequence.constraint = self._masks.constrain(grammar)

    @property
    def pending(self) -> bool:
        """True if tokens are under way."""
        return self._sampled is not None

    def drop(self) -> None:
        """Discard the tokens under way; their sequences have ended."""
        self._sampled = None

    def run(
        self, sequences: tuple[Sequence, ...], plan: StepPlan, step: Step
    ) -> ForwardOutput | None:
        """Launch the model on the sequences' next tokens, then read the tokens under way.

        A sequence for which it fails ends, once the token before is read. If a call fails for
        several together, see `Lifecycle.retry_apart`; there are no logits for `sample` then.
        """
        caches = [self._kv_cache.caches[sequence] for sequence in sequences]
        try:
            output = self._runner.run(plan, caches, list(map(self._next_token, sequences)))
        except BaseException as error:  # noqa: BLE001  (the model itself failed, under all of them)
            self.read(step)
            self._lifecycle.retry_apart(sequences, error, step)
            return None
        for place, sequence in enumerate(sequences):
            if place not in output.errors:
                sequence.num_computed_tokens += 1
        self.read(step)
        for place, fault in output.errors.items():
            self._lifecycle.fail(sequences[place], fault, step)
        for sequence in sequences:
            if sequence.status is SequenceStatus.DECODE:
                with self._lifecycle.guard(sequence, step):
                    self._kv_cache.advanced(sequence)
        return output

    def sample(self, output: ForwardOutput, sequences: tuple[Sequence, ...], step: Step) -> None:
        """Launch sampling of the next token of every sequence that has not finished.

        `output` is of a call that computed `sequences`, in this order.
        """
        for sequence in sequences:
            if _samples(sequence):
                self._end_if_complete(sequence, step)
        rows = {place: s.row for place, s in enumerate(sequences) if _samples(s)}
        if not rows:
            return
        sampled = self._runner.sample(output, rows)
        sequences = tuple(sequences[place] for place in rows)
        self._sampled = sampled, sequences
        for place, sequence in enumerate(sequences):
            if place in sampled.errors:
                self._lifecycle.fail(sequence, sampled.errors[place], step)
            else:
                sequence.pending = place

    def read(self, step: Step) -> None:
        """Wait for the tokens under way, and hand them out."""
        if self._sampled is None:
            return
        (sampled, sequences), self._sampled = self._sampled, None
        try:
            tokens = sampled.read()
        except BaseException as error:  # noqa: BLE001  (the computation failed, under all of them)
            self._lifecycle.retry_apart(sequences, error, step)
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.status is SequenceStatus.DECODE:
                with self._lifecycle.guard(sequence, step):
                    self._take(sequence, token, step)
        self._end_complete(sequences, step)

    def _next_token(self, sequence: Sequence) -> int | PendingToken:
        """The token that a step takes: an id, or one that is still computed."""
        if sequence.pending is None or self._sampled is None:
            return sequence.output[sequence.num_computed_tokens - sequence.num_prompt_tokens]
        return self._sampled[0].pending(sequence.pending)

    def _take(self, sequence: Sequence, token: Token, step: Step) -> None:
        sequence.pending = None
        ends = token.id in self._eos_ids
        if sequence.constraint is not None:
            sequence.constraint.take(token.id, ends=ends)
        if ends:
            sequence.end_with(token.id)
            self._lifecycle.finish(sequence, FinishReason.STOP, step)
            return
        sequence.output.append(token.id)
        step.emit(sequence, TokenEvent(token.id, self._clock(), token.logprobs))
        if len(sequence.output) >= sequence.request.max_tokens:
            reason = FinishReason.STOP if _is_complete(sequence) else FinishReason.LENGTH
            self._lifecycle.finish(sequence, reason, step)

    def _end_complete(self, sequences: tuple[Sequence, ...], step: Step) -> None:
        """End complete answers without another step, if that is known soon."""
        until = time.monotonic() + _SOON
        for sequence in sequences:
            if sequence.status is SequenceStatus.DECODE and sequence.constraint is not None:
                if not sequence.constraint.is_known(max(0.0, until - time.monotonic())):
                    return  # those after it are computed later
                self._end_if_complete(sequence, step)

    def _end_if_complete(self, sequence: Sequence, step: Step) -> None:
        """End an answer behind which its grammar allows nothing. Waits until that is known."""
        with self._lifecycle.guard(sequence, step):
            if sequence.constraint is not None and sequence.constraint.mask is None:
                self._lifecycle.finish(sequence, FinishReason.STOP, step)


def _samples(sequence: Sequence) -> bool:
    """True if its next token is not known from before a preemption, and it has not ended."""
    known = sequence.num_computed_tokens < sequence.num_known_tokens
    return sequence.status is SequenceStatus.DECODE and not known


def _is_complete(sequence: Sequence) -> bool:
    """True if the grammar allows only the end next. No token is chosen by it: no fault counts."""
    try:
        return sequence.constraint is not None and sequence.constraint.mask is None
    except BaseException as error:  # noqa: BLE001  (also a Rust panic)
        log.warning(
            "grammar mask failed after the final token (ignored)",
            request=sequence.request.id,
            error=error,
        )
        return False
