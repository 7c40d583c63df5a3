"""The layers of a batch: what the model is called with when several sequences decode at once.

A layer answers what mlx-lm's models ask of a cache. Its rows' own state is dense (see
`ring_buffer` and `length_classes`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..backends import Backend
from ..errors import NotBatchableError
from ..kv.ring_buffer import RingBuffer
from ..kv.spans import SpanRun
from .fetched import Keys, Rotated, RotatedQueries

Shared = tuple[list[SpanRun], mx.array | None]
"""Runs of spans that several rows lease, and the numbers of these rows; None for all."""


@dataclass
class Step:
    """What all layers must know of the step that runs.

    Attributes:
        device: how attention is computed.
        positions: `[rows]`, of the tokens that the model is called with.
        shared: runs of spans that several rows lease, each with the numbers of these rows.
        plan: counts how often that changed.
    """

    device: Backend
    positions: mx.array = field(default_factory=lambda: mx.array([0]))
    shared: list[Shared] = field(default_factory=list)
    plan: int = 0


class BatchedLayer(ABC):
    """One layer of several sequences, for attention."""

    masks_itself = False
    """Whether a mask that the model brings is not looked at."""

    _fetched: tuple[mx.array, mx.array] | None = None

    @property
    @abstractmethod
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """A token may see all that its row holds, so there is no mask."""
        del return_array
        if tokens != 1 or not self._sees_all(window_size):
            raise NotBatchableError(
                "the model asks for a mask, and rows of a batch are attended to without one"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[rows, kv_heads, 1, size]`, a token a row; `attend` reads them back."""
        self._append(keys, values)
        self._fetched = Keys(keys, self), Rotated(values)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What stands for all keys and values in this step, for layers that have none."""
        if self._fetched is None:
            raise NotBatchableError("the model reads keys before it has written the step's own")
        return self._fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None = None,
    ) -> mx.array:
        """Compute every row's attention over all that it holds.

        Args:
            queries: `[rows, heads, 1, size]`.
            keys: what `update_and_fetch` returned; anything else means that the model does
                with keys what a batch cannot.
            scale: of the scores.
            sinks: `[heads]`, or None.
            rotated: what MLA multiplies with the keys' rotated part.

        Raises:
            NotBatchableError: `keys` is something else.
        """
        if self._fetched is None or keys is not self._fetched[0]:
            raise NotBatchableError(
                "the model changes its keys between its cache and its attention"
            )
        return self._attend(queries, scale, sinks, rotated)

    @abstractmethod
    def _append(self, keys: mx.array, values: mx.array) -> None:
        """Write a token of each row."""

    @abstractmethod
    def _attend(
        self,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None,
    ) -> mx.array:
        """Compute every row's attention."""

    @abstractmethod
    def _sees_all(self, window_size: int | None) -> bool:
        """Whether a token may see all that its row holds, if the model says this window."""


class RowsLayer:
    """A layer of rows: their own keys and values, wherever they lie.

    Args:
        step: shared by all layers.
        first: the number of this layer's keys there; its values are next.
    """

    _count = 2  # of its tensors there

    def __init__(self, step: Step, first: int) -> None:
        self._step = step
        self._first = first
        self._written = False  # in this step

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return self._step.positions + 1 if self._written else self._step.positions

    @abstractmethod
    def arrays(self) -> Sequence[mx.array]:
        """All that is the rows' own, to evaluate: none before the first of a batch."""

    def end_step(self) -> None:
        """Let go of what the step read, so that the next write is in place."""
        self._written = False


class BatchedWindowLayer(RowsLayer, BatchedLayer):
    """Sliding-window rows: MLX's own attention over a ring buffer."""

    def __init__(self, step: Step, buffer: RingBuffer, first: int, window: int) -> None:
        super().__init__(step, first)
        self._buffer = buffer
        self._window = window
        self._held: tuple[mx.array, ...] = ()  # all that is the rows' own, in a step

    def arrays(self) -> Sequence[mx.array]:
        """See `RowsLayer`."""
        tensors = self._buffer.tensors[self._first : self._first + self._count]
        return [tensor for tensor in tensors if tensor is not None]

    def end_step(self) -> None:
        """See `RowsLayer`."""
        super().end_step()
        self._held, self._fetched = (), None

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._written = True
        self._held = (
            self._buffer.append(self._first, keys),
            self._buffer.append(self._first + 1, values),
        )

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None or window_size >= self._window

    def _attend(
        self,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None,
    ) -> mx.array:
        if rotated is not None:
            raise NotBatchableError("the model keeps latents for a window only")
        keys, values = self._held
        mask, device = self._buffer.mask, self._step.device
        return device.attend(queries, keys, values, scale, mask, sinks)
