"""A decode step of a batch as one compiled function: Python builds its graph once, not each time.

Where launches are what a step takes, a third of that is Python, which builds the same graph of a
thousand operations for every token. Steps of one form differ in arrays only: the tokens, their
positions, where rows write and look, what they lease, and what the step before has written.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import structlog

from ..attention.batched import BufferedLayer, Step
from ..attention.leased import Leased
from .recurrent import BatchedRecurrentLayer
from .ring_buffer import RingBuffer

_MOST = 16
"""Forms whose functions are kept: those that were used last."""

log = structlog.get_logger()


class RowState:
    """All arrays that differ from one step to the next.

    Args:
        step: what all layers know of it.
        attending: layers that read buffers.
        buffers: of the rows' own keys and values.
        recurrent: layers with states of rows.
    """

    def __init__(
        self,
        step: Step,
        attending: Sequence[BufferedLayer],
        buffers: Sequence[RingBuffer],
        recurrent: Sequence[BatchedRecurrentLayer],
    ) -> None:
        self._step = step
        self._attending = attending
        self._buffers = buffers
        self._recurrent = recurrent

    @property
    def plan(self) -> int:
        """Counts how often what rows lease changed."""
        return self._step.plan

    @property
    def form(self) -> Hashable:
        """All that a step's operations depend on, besides arrays."""
        return tuple((buffer.rows, buffer.positions) for buffer in self._buffers)

    @property
    def asked(self) -> list[list[str]]:
        """What readers asked each buffer for in this step, or else in the last one."""
        return [buffer.asked_now() for buffer in self._buffers]

    def ask(self, asked: Sequence[list[str]]) -> None:
        """Have readers ask for this."""
        for buffer, names in zip(self._buffers, asked, strict=True):
            buffer.asked = names

    def arrays(self) -> list[mx.array]:
        """Every array that a step writes."""
        held = [t for buffer in self._buffers for t in buffer.tensors if t is not None]
        return held + [array for layer in self._recurrent for array in layer.arrays()]

    def replace(self, arrays: Sequence[mx.array]) -> None:
        """Take others in the place of those."""
        left = iter(arrays)
        for buffer in self._buffers:
            buffer.replace(left)
        for layer in self._recurrent:
            layer.replace(left)

    def varying(self) -> list[list[mx.array]]:
        """What else a step reads that the next one reads differently."""
        return [[self._step.positions], *[buffer.varying() for buffer in self._buffers]]

    @contextmanager
    def tracing(
        self, varying: Sequence[Sequence[mx.array]], arrays: Sequence[mx.array]
    ) -> Iterator[None]:
        """Compute with arrays that stand for these; afterwards all is as it was."""
        held, positions = self.arrays(), self._step.positions
        (self._step.positions,) = varying[0]
        self.replace(arrays)
        try:
            with ExitStack() as stack:
                for buffer, each in zip(self._buffers, varying[1:], strict=True):
                    stack.enter_context(buffer.tracing(each))
                yield
        finally:
            for layer in self._attending:
                layer.end_step()
            self._step.positions = positions
            self.replace(held)


@dataclass
class _Way:
    """How steps of one form are run.

    Attributes:
        after: steps that run before one is compiled.
        steps: that were.
        asked: what readers asked each buffer for.
        arrays: how many the rows had afterwards.
        compiled: the function; None where it is not made yet.
    """

    after: int
    steps: int = 0
    asked: list[list[str]] = field(default_factory=list)
    arrays: int = 0
    compiled: Callable[..., list[mx.array]] | None = None


class CompiledStep:
    """Runs the steps of a batch: the first of a new form as they are, and then a compiled one.

    Neither it nor the functions hold anything that rows lease.

    Attributes:
        after: steps of a form that run before one is compiled; 0 for never, and once one could
            not be. None does where it is a form that is compiled, with other positions: rows mostly
            get these by growing, and then stay as they are for long.

    Args:
        state: of the rows.
        leased: what they read besides.
        after: as above.
        gathers: layers keep what they made for a plan: another plan is another form.
    """

    def __init__(self, state: RowState, leased: Leased, after: int, *, gathers: bool) -> None:
        self.after = after
        self._state = state
        self._leased = leased
        self._gathers = gathers
        self._ways: dict[tuple[Hashable, ...], _Way] = {}  # those used last at the end

    def run(self, model: Any, layers: list[Any], tokens: mx.array) -> mx.array:
        """Compute a step's logits, `[rows, V]`, and write the rows' state.

        Args:
            model: mlx-lm's.
            layers: what it is called with.
            tokens: `[rows]`.
        """
        if not self.after:
            return _logits(model, layers, tokens)
        way = self._way(tokens.size)
        way.steps += 1
        # Before a batch's first step rows have no arrays.
        if way.steps <= way.after or way.arrays != len(self._state.arrays()):
            logits = _logits(model, layers, tokens)
            way.asked, way.arrays = self._state.asked, len(self._state.arrays())
            return logits
        if way.compiled is None:
            way.compiled = mx.compile(partial(_traced, model, layers, self._state, self._leased))
        self._state.ask(way.asked)
        state = self._state
        try:
            logits, *arrays = way.compiled(
                tokens, state.varying(), self._leased.arrays(), state.arrays()
            )
        except Exception as error:  # noqa: BLE001  (a model's code, which may well compute it)
            log.warning("steps are not compiled", reason=f"{type(error).__name__}: {error}")
            self.after, self._ways = 0, {}
            return _logits(model, layers, tokens)
        state.replace(arrays)
        return logits

    def _way(self, rows: int) -> _Way:
        """How steps of the present form are run."""
        plan = self._state.plan if self._gathers else 0
        form = rows, plan, self._leased.form, self._state.form
        way = self._ways.pop(form) if form in self._ways else self._new(form)
        self._ways[form] = way
        if len(self._ways) > _MOST:
            del self._ways[next(iter(self._ways))]
        return way

    def _new(self, form: tuple[Hashable, ...]) -> _Way:
        """How steps are run of a form that is not known: as those of one with other positions."""
        *alike, _ = form
        for known, way in self._ways.items():
            if way.compiled and [*known[:-1]] == alike:
                return _Way(0, asked=way.asked, arrays=way.arrays)
        return _Way(self.after)


def _logits(model: Any, layers: list[Any], tokens: mx.array) -> mx.array:
    logits: mx.array = model(tokens[:, None], cache=layers)[:, -1, :]
    return logits


def _traced(
    model: Any,
    layers: list[Any],
    state: RowState,
    leased: Leased,
    tokens: mx.array,
    varying: Sequence[Sequence[mx.array]],
    read: Sequence[mx.array],
    arrays: Sequence[mx.array],
) -> list[mx.array]:
    with leased.tracing(read), state.tracing(varying, arrays):
        logits = _logits(model, layers, tokens)
        return [logits, *state.arrays()]
