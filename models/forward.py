"""The only calls of the model: prefill, decode, and the choice of tokens."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import structlog

from .attention import bind
from .batch import NotBatchableError, batched
from .layer_states import LayerStack, LiveStates, PackedSpan, WholeCheckpoint
from .loader import LoadedModel
from .params import Row
from .sampling import sample

Entry = tuple[int, LiveStates, Row]
"""What one sequence brings to a decode step: its next token, its state, its sampling."""

log = structlog.get_logger()


class Forward:
    """Runs one loaded model. All methods belong to the MLX thread.

    Attributes:
        batches: whether sequences decode as rows of one batch. A model for which that would
            change answers decodes them one by one.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._stack = loaded.stack
        self._vocab_size = loaded.text.vocab_size
        bind(loaded.model)
        self.batches = batches_exactly(loaded.model, loaded.stack)

    def open(
        self,
        offset: int = 0,
        spans: Sequence[PackedSpan] = (),
        checkpoint: WholeCheckpoint | None = None,
    ) -> LiveStates:
        """Make the live state of a sequence that resumes at `offset`; see `LayerStack.open`."""
        return self._stack.open(offset, spans, checkpoint)

    def prefill(self, tokens: Sequence[int], states: LiveStates) -> None:
        """Advance `states` over `tokens` and wait until that is computed.

        The logits are never asked for, so the output layer does not run.
        """
        self._model(mx.array([tokens]), cache=states.caches)
        states.advanced(len(tokens))
        mx.eval(states.arrays())

    def decode(self, entries: Sequence[Entry]) -> list[int | BaseException]:
        """Feed each sequence one token, and choose its next one.

        Returns:
            For each entry its token, or what its sampling raised. Its neighbours' tokens do
            not depend on it.
        """
        if self.batches:
            return self._decode_batch(entries)
        return [self._decode_alone(entry) for entry in entries]

    def logits(self, tokens: Sequence[int], states: Sequence[LiveStates]) -> mx.array:
        """Feed one token to each sequence and advance its state over it, lazily.

        Returns:
            `[B, V]` logits of the next tokens.
        """
        logits = decode_logits(self._model, tokens, states)
        for state in states:
            state.advanced(1)
        return logits

    def _decode_batch(self, entries: Sequence[Entry]) -> list[int | BaseException]:
        states = [state for _, state, _ in entries]
        rows = [row for _, _, row in entries]
        logits = self.logits([token for token, _, _ in entries], states)
        mx.eval(logits, [state.arrays() for state in states])
        try:
            return cast(
                "list[int | BaseException]", sample(logits, rows, self._vocab_size).tolist()
            )
        except BaseException:  # noqa: BLE001  (sampling row by row finds out whose it is)
            return [self._sample_alone(logits[i : i + 1], row) for i, row in enumerate(rows)]

    def _decode_alone(self, entry: Entry) -> int | BaseException:
        """Decode one sequence; also the model's failure is then its own."""
        try:
            return self._decode_batch([entry])[0]
        except BaseException as error:  # noqa: BLE001  (as said)
            return error

    def _sample_alone(self, logits: mx.array, row: Row) -> int | BaseException:
        try:
            return int(cast("int", sample(logits, [row], self._vocab_size).item()))
        except BaseException as error:  # noqa: BLE001  (this row's own)
            return error


def decode_logits(model: Any, tokens: Sequence[int], states: Sequence[LiveStates]) -> mx.array:
    """Call the model with one token for each sequence.

    Returns:
        `[B, V]` logits, not yet evaluated. A lone sequence takes no batch's detour.
    """
    alone = len(states) == 1
    caches = states[0].caches if alone else batched([state.caches for state in states])
    logits: mx.array = model(mx.array(list(tokens))[:, None], cache=caches)[:, -1, :]
    return logits


def batches_exactly(model: Any, stack: LayerStack) -> bool:
    """Try out whether the model gives rows of a batch what it gives lone sequences.

    Models use what their caches return in many ways (MLA computes with the keys itself, some
    layers read another layer's keys), so this is measured on the loaded model, with two short
    sequences of different lengths over a shared trunk, and not looked up.
    """
    shared = stack.open()
    _feed(model, shared, [1, 2, 3, 4, 5])
    span = shared.seal()
    spans = [] if span is None else [span]
    checkpoint = shared.capture() if stack.has_checkpoints else None
    pairs = [[stack.open(5, spans, checkpoint) for _ in range(2)] for _ in range(2)]
    for states in pairs:
        _feed(model, states[0], [6, 7, 8])
        _feed(model, states[1], [9])
    try:
        together = decode_logits(model, [3, 4], pairs[0])
    except (NotBatchableError, AttributeError, TypeError, ValueError) as error:
        log.info("decoding one by one", reason=str(error))
        return False
    alone = [decode_logits(model, [t], [s]) for t, s in zip((3, 4), pairs[1], strict=True)]
    expected = mx.concatenate(alone, axis=0).astype(mx.float32)
    # Rounding is far below this, and another row's keys far above it, in any number type.
    bound = 0.05 * mx.sqrt(mx.var(expected, axis=-1)).max()
    if bool(mx.abs(together.astype(mx.float32) - expected).mean() < bound):
        return True
    log.info("decoding one by one", reason="rows of a batch would change each other's answers")
    return False


def _feed(model: Any, states: LiveStates, tokens: list[int]) -> None:
    model(mx.array([tokens]), cache=states.caches)
    states.advanced(len(tokens))
    mx.eval(states.arrays())
