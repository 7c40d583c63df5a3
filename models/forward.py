"""The only calls of the model: prefill, feeding a step, and the choice of tokens.

A decode step has three parts, so that the device never waits for the host: `feed` launches the
model on tokens that may themselves still be computed; `choose` launches sampling; the choice's
`read` waits for the tokens. Between the second and the third comes the next step's `feed`.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import structlog

from .attention import bind
from .footprint import GROWTH, measure
from .layer_states import Held, LiveStates
from .loader import LoadedModel
from .params import Row
from .probe import Batching, batching, reads_parts
from .rows import LIMIT, Growth, Rows
from .runtime import launch, peak_of, resident_bytes
from .sampling import Choice, choose
from .separate import can_separate, separate
from .spans import PackedSpan, WholeCheckpoint

EXACT_ROWS = 8
"""Rows of every step of an exact forward: products of other shapes round differently."""

_LONE_STEPS = 8
"""Steps after which a sequence that decodes alone is worth a copy of what it leases."""

_NOT_APART = "exact rows attend each by itself, and this model's attention takes them together"

_LEAST_PIECE = 64
_LEAST_ROW = 64  # tokens; below these, overhead is all there is
_ROWS_SHARE = 4  # the rows' own tokens take at most one part in this many

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
        measured: the folder in which what is measured is kept for later starts, if it is.

    Attributes:
        batches: whether sequences decode as rows of one batch. A model for which that would
            change answers decodes them one by one.
        one_by_one: why they do not, in words; None if they do.
        shapes: shapes of batches that have been computed with.
        footprint: what sequences and steps take.
        resident: bytes that were active when it was made: the weights.
        overlaps: whether the device computes while the host goes on; see `DevicePolicy`.
    """

    def __init__(
        self, loaded: LoadedModel, *, exact: bool = False, measured: Path | None = None
    ) -> None:
        self._exact = exact
        self._model = loaded.model
        self._stack = loaded.stack
        self._vocab_size = loaded.text.vocab_size
        self._rows: Rows | None = None
        self.shapes: set[tuple[int, ...]] = set()
        self._device = loaded.device
        self.overlaps = loaded.device.overlaps
        self._row_limit = LIMIT
        self._may_join: Callable[[int], bool] = lambda _: True
        gc.collect()  # what loading left behind would be taken for weights
        self.resident = resident_bytes()
        bind(loaded.model, loaded.device)
        way = batching(loaded.model, loaded.stack, loaded.device)
        if exact and (way.mask_axes or not can_separate(loaded.stack.open().caches)):
            way = Batching(_NOT_APART)
        self.one_by_one, self._mask_axes = way
        self.batches = self.one_by_one is None
        # Who decodes one by one always does so: with keys in one piece, however they are cut.
        self._reads_parts = self.batches and reads_parts(loaded.model, loaded.stack)
        # Rows and the states in them refer to each other. What is freed while something is
        # measured would make that look small.
        gc.collect()
        self.footprint = measure(
            loaded.stack,
            self._prefill,
            loaded.device,
            loaded.text.vocab_size,
            joins=exact,
            multiple=EXACT_ROWS if exact and self.batches else 1,
            folder=measured,
            of=() if measured is None else (loaded.fingerprint,),
        )

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
        offset = states.offset
        _, peak = peak_of(lambda: self._prefill(tokens, states))
        self.footprint.observe(len(tokens), offset, peak)

    def _prefill(self, tokens: Sequence[int], states: LiveStates) -> None:
        self._model(mx.array([tokens]), cache=states.caches)
        states.advanced(len(tokens))
        states.detach()
        mx.eval(states.arrays())

    # -- memory ------------------------------------------------------------------------

    def live_within(self, budget: int, *, piece: int, max_batch: int) -> None:
        """Have running sequences keep to a budget.

        Args:
            budget: bytes of all state.
            piece: bytes that a copy of state may have.
            max_batch: sequences that run at once.
        """
        token = max(1, self.footprint.sizes.token)
        self._stack.longest = max(_LEAST_PIECE, piece // token)
        while self._row_limit > _LEAST_ROW and (
            self._row_limit * token * max_batch * _ROWS_SHARE > budget
        ):
            self._row_limit //= 2

    def ask_before_joining(self, may_join: Callable[[int], bool]) -> None:
        """Have single sequences ask before their keys are copied into one piece.

        Args:
            may_join: whether so many bytes may be taken for it.
        """
        self._may_join = may_join

    @property
    def longest_segment(self) -> int:
        """Tokens that are packed or copied at a time."""
        return self._stack.longest

    def held_by(self, states: Iterable[LiveStates]) -> Held:
        """What running sequences have of their own."""
        parts = [state.held() for state in states]
        if self._rows is not None:
            parts.append(self._rows.held())
        return Held(sum(part.nbytes for part in parts), sum(part.buffers for part in parts))

    def kept_bytes(self, tokens: int) -> int:
        """What tokens that were computed take once they are stored, in bytes."""
        return self.footprint.sizes.token * tokens

    def captured(self, tokens: int) -> Held:
        """What a checkpoint after so many tokens takes."""
        return self.footprint.captured(tokens)

    def start_need(self, tokens: int, context: int) -> Held:
        """What a sequence takes that has `tokens` of its `context` left to compute."""
        return self.footprint.start(tokens, context)

    def promise(self, context: int) -> Held:
        """What a sequence of this length may take, alone; see `Footprint.promise`."""
        return self.footprint.promise(context)

    def chunk_need(self, tokens: int, states: LiveStates) -> Held:
        """What prefilling so many more tokens takes at its peak."""
        return self.footprint.chunk(tokens, states)

    def step_need(self, states: Sequence[LiveStates]) -> Held:
        """What a decode step of these sequences takes at its peak."""
        sizes = self.footprint.sizes
        offset = max(state.offset for state in states)
        rows = len(states)
        if self.batches and rows > 1 and not self._exact:
            growth = self._open_rows().growth(states)
            rows, offset = growth.rows, max(offset, growth.gathered)
            grown = growth.sealed * sizes.token * self._row_limit
            if growth.resized:
                rings = sum(ring.token * growth.rings[ring.window] for ring in sizes.rings)
                grown += rows * (sizes.token * growth.columns + rings + sizes.fixed)
            grown += self._gathered_need(growth)
        else:
            grown = sum(map(self._alone_need, states))
            # Exact rows are gathered in each layer, and given back to each sequence.
            grown += self.footprint.gathered(rows) + rows * sizes.fixed if self._exact else 0
        grown += self.footprint.gathered(rows)
        # Where the device computes on while the host goes on, two steps are under way.
        compute = self.footprint.compute(rows, offset) * (2 if self.overlaps else 1)
        return Held(grown + compute, 2 * sizes.arrays)

    def _gathered_need(self, growth: Growth) -> int:
        """Bytes of one layer's keys and values put together for all rows, and of the next one's.

        A row's own trunk is padded, and joined with the other rows', before all is put together.
        """
        layers = max(1, self._open_rows().trunks)
        copied = growth.rows * (growth.gathered + 2 * growth.padded)
        return 2 * copied * self.footprint.sizes.token // layers

    def _alone_need(self, state: LiveStates) -> int:
        """Bytes by which a sequence's own caches may grow with a token, or come to be."""
        sizes = self.footprint.sizes
        if state.seat is not None:  # it stands up: its row is copied, and grows then
            copied = sizes.token * state.tail_length + self.captured(state.offset).nbytes
            return copied + sizes.token * GROWTH + sizes.whole(state.offset + 1)
        # Where a layer grows, what it grows by is made beside it, and then copied.
        layers = max(1, sizes.arrays // 2)
        grown = sizes.token * GROWTH * (layers + 1) // layers if state.full else 0
        return grown + (sizes.whole(state.offset + 1) if state.rings_change else 0)

    # -- decoding ----------------------------------------------------------------------

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
        states.keep_tail_short()
        if self._device.contiguous_keys or not self._reads_parts:
            self._join_later(states)
        logits: mx.array = self._model(tokens[None], cache=states.caches)[:, -1, :]
        # State that the logits do not depend on (an indexer's, while nothing is chosen by it)
        # would be computed at some later time, and keep all that it is computed from until then.
        aside = self._stack.has_checkpoints or not self._reads_parts
        launch(logits, states.arrays() if aside else [])
        return logits

    def _join_later(self, states: LiveStates) -> None:
        """Put a lone sequence's keys in one piece once it is likely to stay alone.

        One fused kernel then reads them, which the CPU does not have; layers whose attention
        asks for all keys in one piece are spared a copy each step.
        """
        states.steps_alone += 1
        due = states.steps_alone % _LONE_STEPS == 0 or not self._reads_parts
        if due and not states.joined and self._may_join(self.footprint.sizes.tail(states.offset)):
            states.join()

    def _together(self, tokens: mx.array, states: Sequence[LiveStates]) -> mx.array:
        rows = self._open_rows()
        try:
            for other in rows.others(states):
                other.stand_up()
            rows.join([state for state in states if state.seat is None])
            logits = rows.feed(self._model, states, tokens)
            # As for a lone sequence: an indexer's keys may be of no use to these logits.
            aside = self._stack.has_checkpoints or not self._reads_parts
            launch(logits, rows.arrays() if aside else [])
        except BaseException:
            rows.clear()  # its layers may be at different tokens
            raise
        self._note(rows.shape)
        return logits

    def _open_rows(self) -> Rows:
        if self._rows is None:
            self._rows = Rows(
                self._stack.open(),
                self._device,
                limit=self._row_limit,
                mask_axes=self._mask_axes,
            )
        return self._rows

    def _exactly(self, tokens: mx.array, states: Sequence[LiveStates]) -> mx.array:
        parts = []
        for start in range(0, len(states), EXACT_ROWS):
            some = states[start : start + EXACT_ROWS]
            for state in some:
                state.join()
            unused = EXACT_ROWS - len(some)
            fed = mx.pad(tokens[start : start + EXACT_ROWS], (0, unused))
            caches = separate([*[state.caches for state in some], *[None] * unused], self._device)
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
        return mx.array([token for _, token in entries], mx.uint32)  # as choices are
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
