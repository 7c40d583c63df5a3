"""The only calls of the model: prefill, feeding a step, and the choice of tokens.

A decode step has three parts, so that the device never waits for the host: `feed` launches the
model on tokens that may themselves still be computed; `choose` launches sampling; the choice's
`read` waits for the tokens. Between the second and the third comes the next step's `feed`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import structlog

from .attention import bind
from .layer_states import LiveStates
from .loader import LoadedModel
from .params import Row
from .probe import batches_exactly
from .rows import Rows
from .runtime import launch
from .sampling import Choice, choose
from .separate import separate
from .softmax import ON_CPU
from .spans import PackedSpan, WholeCheckpoint

EXACT_ROWS = 8
"""Rows of every step of an exact forward: products of other shapes round differently."""

_LONE_STEPS = 8
"""Steps after which a sequence that decodes alone is worth a copy of what it leases."""

log = structlog.get_logger()


class Drawn(NamedTuple):
    """A token that was chosen and may still be computed.

    Attributes:
        choice: what it is part of.
        place: its number there.
    """

    choice: Choice
    place: int


Entry = tuple[LiveStates, int | Drawn]
"""What one sequence brings to a decode step: its state, and its next token."""


class Fed:
    """What came of feeding a token to each of some sequences.

    Attributes:
        logits: `[entries, V]`, not yet evaluated; None where all failed.
        errors: what the model raised for single entries, by their number. Their rows of
            `logits` mean nothing.
    """

    def __init__(self, logits: mx.array | None, errors: dict[int, BaseException]) -> None:
        self.logits = logits
        self.errors = errors


class Forward:
    """Runs one loaded model. All methods belong to the MLX thread.

    Args:
        loaded: the model.
        exact: the same request gives the same tokens, whatever else runs and whatever is
            cached: every step computes with `EXACT_ROWS` rows, and each attends by itself.

    Attributes:
        batches: whether sequences decode as rows of one batch. A model for which that would
            change answers decodes them one by one.
        shapes: shapes of batches that have been computed with.
        overlaps: whether the device computes while the host goes on. On the CPU attention
            waits for its scores, so that a step is complete when it has been launched.
    """

    def __init__(self, loaded: LoadedModel, *, exact: bool = False) -> None:
        self._exact = exact
        self._model = loaded.model
        self._stack = loaded.stack
        self._vocab_size = loaded.text.vocab_size
        self._rows: Rows | None = None
        self.shapes: set[tuple[int, ...]] = set()
        self.overlaps = not ON_CPU
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

    def feed(self, entries: Sequence[Entry]) -> Fed:
        """Launch the model on a token of each sequence, and advance their states.

        Raises:
            Exception: the model failed for a batch as a whole; all of its states are lost.
        """
        if self.batches or len(entries) == 1:
            return Fed(self.logits(_tokens(entries), [states for states, _ in entries]), {})
        rows: list[mx.array | None] = []
        errors: dict[int, BaseException] = {}
        for number, (states, token) in enumerate(entries):
            try:
                rows.append(self.logits(_tokens([(states, token)]), [states]))
            except BaseException as error:  # noqa: BLE001  (one sequence's own)
                errors[number] = error
                rows.append(None)
        done = next((row for row in rows if row is not None), None)
        if done is None:
            return Fed(None, errors)
        return Fed(mx.concatenate([done if row is None else row for row in rows]), errors)

    def choose(self, fed: Fed, rows: Mapping[int, Row]) -> Choice:
        """Launch the choice of tokens for some of the entries that were fed.

        Args:
            fed: what `feed` returned.
            rows: for each entry that goes on, by its number, how it samples.

        Returns:
            A choice with one place for each of `rows`, in their order.
        """
        if fed.logits is None or not rows:
            return Choice.empty()
        logits = fed.logits
        if list(rows) != list(range(logits.shape[0])):
            logits = logits[mx.array(list(rows))]
        return choose(logits, list(rows.values()), self._vocab_size, each=self._exact)

    def drawn(self, choice: Choice, index: int) -> Drawn:
        """Name a token that was chosen and may still be computed."""
        return Drawn(choice, index)

    def logits(self, tokens: mx.array, states: Sequence[LiveStates]) -> mx.array:
        """Launch the model on `[B]` tokens, one of each sequence.

        Returns:
            `[B, V]` logits of the next tokens. A lone sequence takes no batch's detour.
        """
        if self._exact and self.batches:
            logits = self._exactly(tokens, states)
        elif len(states) == 1:
            logits = self._alone(tokens, states[0])
        else:
            logits = self._together(tokens, states)
        for state in states:
            state.advanced(1)
        return logits

    def _alone(self, tokens: mx.array, states: LiveStates) -> mx.array:
        states.stand_up()
        if not ON_CPU or not self.batches:
            self._join_later(states)
        logits: mx.array = self._model(tokens[None], cache=states.caches)[:, -1, :]
        launch(logits, states.arrays() if self._stack.has_checkpoints else [])
        return logits

    def _join_later(self, states: LiveStates) -> None:
        """Put a lone sequence's keys in one piece once it is likely to stay alone.

        One fused kernel then reads them, which the CPU does not have; layers whose attention
        asks for all keys in one piece are spared a copy each step.
        """
        states.steps_alone += 1
        if states.steps_alone == _LONE_STEPS or not self.batches:
            states.join()

    def _together(self, tokens: mx.array, states: Sequence[LiveStates]) -> mx.array:
        if self._rows is None:
            self._rows = Rows(self._stack.open())
        rows = self._rows
        try:
            for other in rows.others(states):
                other.stand_up()
            rows.join([state for state in states if state.seat is None])
            logits = rows.feed(self._model, states, tokens)
            launch(logits, rows.arrays() if self._stack.has_checkpoints else [])
        except BaseException:
            rows.clear()  # its layers may be at different tokens
            raise
        self._note(rows.shape)
        return logits

    def _exactly(self, tokens: mx.array, states: Sequence[LiveStates]) -> mx.array:
        parts = []
        for start in range(0, len(states), EXACT_ROWS):
            some = states[start : start + EXACT_ROWS]
            for state in some:
                state.join()
            unused = EXACT_ROWS - len(some)
            fed = mx.pad(tokens[start : start + EXACT_ROWS], (0, unused))
            caches = separate([*[state.caches for state in some], *[None] * unused])
            logits = self._model(fed[:, None], cache=caches)[: len(some), -1, :]
            launch(logits, [state.arrays() for state in some])
            parts.append(logits)
        self._note((EXACT_ROWS,))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def _note(self, shape: tuple[int, ...]) -> None:
        if shape not in self.shapes:
            self.shapes.add(shape)
            log.info("new shape", rows=shape[0], columns=list(shape[1:]))


def _tokens(entries: Sequence[Entry]) -> mx.array:
    """Gather the entries' tokens, `[B]`, without waiting for those that are computed."""
    drawn = [token for _, token in entries if isinstance(token, Drawn)]
    if not drawn:
        return mx.array([token for _, token in entries])
    choice = drawn[0].choice
    if any(token.choice is not choice for token in drawn):
        raise ValueError("a step's tokens come from one choice")
    known = [token for _, token in entries if not isinstance(token, Drawn)]
    size, found = len(choice.tokens), 0
    source = []
    for _, token in entries:
        if isinstance(token, Drawn):
            source.append(token.place)
        else:
            source.append(size + found)
            found += 1
    tokens = choice.tokens
    if known:
        tokens = mx.concatenate([tokens, mx.array(known, tokens.dtype)])
    return tokens if source == list(range(len(tokens))) else tokens[mx.array(source)]
