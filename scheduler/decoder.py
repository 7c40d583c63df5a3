"""Decode steps: one token each, launched before the last step's tokens are read."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic

import structlog

from ..models.params import Token
from .kv_cache_manager import KVCacheManager
from .lifecycle import Lifecycle
from .request import FinishReason, TokenEvent
from .runner import C, ModelRunner, O, P, SamplerOutput, T
from .sequence import Sequence, SequenceStatus

_SOON = 0.005
"""Seconds that the end of a step waits to hear which answers are complete."""

log = structlog.get_logger()


class Decoder(Generic[C, P, O, T]):
    """Gives sequences their next tokens, and ends those whose answers are complete.

    Args:
        runner: of the model.
        kv_cache: has the sequences' state.
        lifecycle: ends them.
        totals: of the engine; what is computed is counted there.
        eos_ids: tokens that end an answer.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: ModelRunner[C, P, O, T],
        kv_cache: KVCacheManager[C],
        lifecycle: Lifecycle[C],
        totals: Counter[str],
        *,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._kv_cache = kv_cache
        self._lifecycle = lifecycle
        self._totals = totals
        self._eos_ids = eos_ids
        self._clock = clock
        self._sampled: tuple[SamplerOutput[T], tuple[Sequence, ...]] | None = None  # not read yet

    @property
    def pending(self) -> bool:
        """True if tokens were sampled and are not read yet."""
        return self._sampled is not None

    def drop(self) -> None:
        """Discard sampled tokens; their sequences have ended."""
        self._sampled = None

    def run(self, sequences: tuple[Sequence, ...], plan: P) -> O | None:
        """Launch the model on the sequences' next tokens, then read those before.

        A sequence for which it fails ends, once the token before is read. If a call fails for
        several together, each is retried in a call of its own; see `Lifecycle.retry_apart`.

        Args:
            sequences: that get a token.
            plan: of the step.
        """
        if not sequences:
            self.process_output()
            return None
        caches = [self._kv_cache.caches[sequence] for sequence in sequences]
        try:
            tokens = list(map(self._next_token, sequences))
            output = self._runner.run(plan, caches, tokens)
        except BaseException as error:  # noqa: BLE001  (the model itself failed, under all of them)
            self.process_output()
            self._lifecycle.retry_apart(sequences, error)
            return None
        for place, sequence in enumerate(sequences):
            if place not in output.errors:
                sequence.num_computed_tokens += 1
        self.process_output()
        for place, fault in output.errors.items():
            self._lifecycle.fail(sequences[place], fault)
        for sequence in sequences:
            if sequence.status is SequenceStatus.DECODE:
                self._lifecycle.guard(sequence, self._kv_cache.capture_if_due)
        return output

    def sample(self, output: O, sequences: tuple[Sequence, ...]) -> None:
        """Launch sampling of the next token of every sequence that has not finished.

        Args:
            output: of the call in which they were computed.
            sequences: of that call, in its order.
        """
        going = {
            n: s
            for n, s in enumerate(sequences)
            if s.status is SequenceStatus.DECODE and not s.replays
        }
        for sequence in going.values():
            self._lifecycle.guard(sequence, self._end_if_complete)
        going = {n: s for n, s in going.items() if s.status is SequenceStatus.DECODE}
        if not going:
            return
        sampled = self._runner.sample(output, {n: s.row for n, s in going.items()})
        sequences = tuple(going.values())
        self._sampled = sampled, sequences
        for place, sequence in enumerate(sequences):
            if place in sampled.errors:
                self._lifecycle.fail(sequence, sampled.errors[place])
            else:
                sequence.pending = place

    def process_output(self) -> None:
        """Wait for the tokens that were launched last, and hand them out."""
        if self._sampled is None:
            return
        (sampled, sequences), self._sampled = self._sampled, None
        try:
            tokens = sampled.read()
        except BaseException as error:  # noqa: BLE001  (the computation failed, under all of them)
            self._lifecycle.retry_apart(sequences, error)
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.status is SequenceStatus.DECODE:
                self._lifecycle.guard(sequence, partial(self._decoded, token=token))
        self._end_complete(sequences)

    def _next_token(self, sequence: Sequence) -> int | T:
        """The token that a step takes: an id, or one that is still computed."""
        if sequence.pending is None or self._sampled is None:
            return sequence.last_known_token
        return self._sampled[0].pending(sequence.pending)

    def _decoded(self, sequence: Sequence, token: Token) -> None:
        sequence.pending = None
        ends = token.id in self._eos_ids
        if sequence.constraint is not None:
            sequence.constraint.take(token.id, ends=ends)
        if ends:
            sequence.end_token = token.id
            self._lifecycle.finish(sequence, FinishReason.STOP)
            return
        sequence.output.append(token.id)
        self._lifecycle.emit(sequence, TokenEvent(token.id, self._clock(), token.logprobs))
        self._totals["generation_tokens"] += 1
        if len(sequence.output) >= sequence.request.max_tokens:
            complete = _is_complete(sequence)
            self._lifecycle.finish(sequence, FinishReason.STOP if complete else FinishReason.LENGTH)

    def _end_complete(self, sequences: tuple[Sequence, ...]) -> None:
        """End complete answers without another step, where that is known soon."""
        until = time.monotonic() + _SOON
        for sequence in sequences:
            if sequence.status is SequenceStatus.DECODE and sequence.constraint is not None:
                if not sequence.constraint.is_known(max(0.0, until - time.monotonic())):
                    return  # those after it are computed later
                self._lifecycle.guard(sequence, self._end_if_complete)

    def _end_if_complete(self, sequence: Sequence) -> None:
        """End an answer behind which its grammar allows nothing. Waits until that is known."""
        if sequence.constraint is not None and sequence.constraint.mask is None:
            self._lifecycle.finish(sequence, FinishReason.STOP)


def _is_complete(sequence: Sequence) -> bool:
    """Whether nothing but the end can follow an answer that ends here for its length.

    Waits until that is known. No token is chosen with this mask, so one that fails fails nobody.
    """
    try:
        return sequence.constraint is not None and sequence.constraint.mask is None
    except BaseException as error:  # noqa: BLE001  (also a Rust panic)
        log.warning("mask failed behind the last token", request=sequence.request.id, error=error)
        return False
