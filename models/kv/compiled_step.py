"""A decode step of a batch as one compiled function: Python builds its graph once, not each time.

Where launches are what a step takes, a third of that is Python, which builds the same graph of a
thousand operations for every token. Between two plans it differs in a few arrays only: the tokens,
their positions, where rows write and look, and what the step before has written.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import structlog

from ..attention.batched import BufferedLayer, Step
from .recurrent import BatchedRecurrentLayer
from .ring_buffer import RingBuffer

if TYPE_CHECKING:
    from .token_layer import Tensors

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


class CompiledStep:
    """Runs the steps of a batch: the first of a plan as they are, and then a compiled one.

    What a plan's steps read besides the rows' state are constants of what is compiled. It holds
    them, so it is forgotten as soon as they lie elsewhere.

    Attributes:
        after: steps of a plan that run before one is compiled; 0 for never, and once one could
            not be.

    Args:
        step: what all layers know of it.
        state: of the rows.
        after: as above.
    """

    def __init__(self, step: Step, state: RowState, after: int) -> None:
        self.after = after
        self._step = step
        self._state = state
        self._compiled: Callable[..., list[mx.array]] | None = None
        self._constants: list[Tensors] = []
        self._steps = 0  # of this plan

    def forget(self) -> None:
        """Hold nothing: the next step has another plan."""
        self._compiled, self._constants, self._steps = None, [], 0

    def run(self, model: Any, layers: list[Any], tokens: mx.array) -> mx.array:
        """Compute a step's logits, `[rows, V]`, and write the rows' state.

        Args:
            model: mlx-lm's.
            layers: what it is called with.
            tokens: `[rows]`.
        """
        if not self.after:
            return _logits(model, layers, tokens)
        read = self._step.read()
        if any(now is not then for now, then in zip(read, self._constants, strict=False)):
            self.forget()
        self._steps += 1
        if self._steps <= self.after:
            return _logits(model, layers, tokens)
        if self._compiled is None:
            self._compiled = mx.compile(partial(_traced, model, layers, self._state))
            self._constants = read
        try:
            logits, *arrays = self._compiled(tokens, self._state.varying(), self._state.arrays())
        except Exception as error:  # noqa: BLE001  (a model's code, which may well compute it)
            log.warning("steps are not compiled", reason=f"{type(error).__name__}: {error}")
            self.after = 0
            self.forget()
            return _logits(model, layers, tokens)
        self._state.replace(arrays)
        return logits


def _logits(model: Any, layers: list[Any], tokens: mx.array) -> mx.array:
    logits: mx.array = model(tokens[:, None], cache=layers)[:, -1, :]
    return logits


def _traced(
    model: Any,
    layers: list[Any],
    state: RowState,
    tokens: mx.array,
    varying: Sequence[Sequence[mx.array]],
    arrays: Sequence[mx.array],
) -> list[mx.array]:
    with state.tracing(varying, arrays):
        logits = _logits(model, layers, tokens)
        return [logits, *state.arrays()]
