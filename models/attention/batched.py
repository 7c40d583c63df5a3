"""The layers of a batch: what the model is called with when several sequences decode at once.

A layer answers what mlx-lm's models ask of a cache. Its rows' own state is dense (see
`ring_buffer`); spans that several rows lease are one product with the queries of all of
them, and all parts are merged (see `cascade`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..kv.ring_buffer import RingBuffer
from ..kv.span_stack import SpanStack
from ..kv.storage import SpanRun
from ..load.device import DevicePolicy
from .blocks import attend
from .cascade import Part, merge, part_of, scores_of, spread, together
from .fetched import Keys, Rotated, RotatedQueries
from .products import LATENT, PLAIN, Products, Segment
from .softmax import softmaxes


class NotBatchableError(Exception):
    """These layer states, or what the model does with them, cannot run as rows of a batch."""


@dataclass
class Step:
    """What all layers must know of the step that runs.

    Attributes:
        device: how attention is computed.
        positions: `[rows]`, of the tokens that the model is called with.
        shared: runs of spans that several rows lease, each with the numbers of these rows.
        private: for rows that lease spans nobody else here does, these spans.
        stacks: spans of the same kind that are read side by side, each with the numbers of the
            rows that read it, if not all do in their order.
        of_stacks: where in what comes of `stacks` each row finds its own; one after the last for
            who has none. None where that is the order of the rows.
        of_private: the same for `private`.
        plan: counts how often these changed.
    """

    device: DevicePolicy
    positions: mx.array = field(default_factory=lambda: mx.array([0]))
    shared: list[tuple[list[SpanRun], mx.array | None]] = field(default_factory=list)
    private: dict[int, list[SpanRun]] = field(default_factory=dict)
    stacks: list[tuple[SpanStack, mx.array | None]] = field(default_factory=list)
    of_stacks: mx.array | None = None
    of_private: mx.array | None = None
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


class BufferedLayer:
    """What a layer has to do with the buffer of its rows' own keys and values.

    Args:
        step: shared by all layers.
        buffer: the rows' own keys and values.
        first: the number of this layer's keys there; its values are next.
    """

    def __init__(self, step: Step, buffer: RingBuffer, first: int) -> None:
        self._step = step
        self._buffer = buffer
        self._first = first
        self._held: Segment = ()  # all that is the rows' own, in a step

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return self._step.positions + 1 if self._held else self._step.positions

    def end_step(self) -> None:
        """Let go of what the step read, so that the next write is in place."""
        self._held = ()

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._held = (
            self._buffer.append(self._first, keys),
            self._buffer.append(self._first + 1, values),
        )


class AttendingLayer(BufferedLayer, BatchedLayer):
    """A layer whose rows' own keys and values lie in a buffer, and that attends to them."""

    def end_step(self) -> None:
        """Let go of what the step read, and of what stood for it."""
        super().end_step()
        self._fetched = None


class BatchedWindowLayer(AttendingLayer):
    """Sliding-window rows: MLX's own attention over a ring buffer."""

    def __init__(self, step: Step, buffer: RingBuffer, first: int, window: int) -> None:
        super().__init__(step, buffer, first)
        self._window = window

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
        return attend(queries, keys, values, scale, self._buffer.mask, sinks, self._step.device)


class BatchedTokenLayer(AttendingLayer):
    """Full-attention rows: what they share is read once, and merged with what is their own.

    Args:
        index: the layer's number among those that spans hold.
        first: see `BufferedLayer`.
    """

    def __init__(self, step: Step, buffer: RingBuffer, index: int, *, first: int) -> None:
        super().__init__(step, buffer, first)
        self._index = index
        self._nothing: Part | None = None

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None

    def _attend(
        self,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None,
    ) -> mx.array:
        held, scaled, products = self._held, queries * scale, self._products(rotated)
        if rotated is not None:
            scaled = mx.concatenate([scaled, rotated.queries], axis=-1)
        rows, heads, _, size = scaled.shape
        kv_heads = held[0].shape[1]
        grouped = scaled.reshape(rows, kv_heads, heads // kv_heads, size)
        shared = [self._segments(spans) for spans, _ in self._step.shared]
        stacks = [[stack.layer(self._index)] for stack, _ in self._step.stacks]
        private = [self._segments(spans) for spans in self._step.private.values()]
        scores = [
            *self._shared_scores(grouped, shared, products),
            *self._stack_scores(grouped, stacks, products),
            *[
                scores_of(grouped[row : row + 1], segments, products)
                for row, segments in zip(self._step.private, private, strict=True)
            ],
            self._own_scores(products.scores(grouped, held)),
        ]
        read: list[list[Segment]] = [*shared, *stacks, *private, [held]]
        softmaxed = softmaxes(scores, self._step.device)
        parts = [part_of(*pair, products) for pair in zip(softmaxed, read, strict=True)]
        own = parts.pop()
        whole = [
            spread(part, members, grouped.shape)
            for part, (_, members) in zip(parts, self._step.shared, strict=False)
        ]
        alone = parts[len(shared) :]
        if stacks:
            whole.append(self._in_order(alone[: len(stacks)], self._step.of_stacks))
        if private:
            whole.append(self._in_order(alone[len(stacks) :], self._step.of_private))
        output = merge([*whole, own], sinks, self._step.device)
        return output.astype(queries.dtype).reshape(rows, heads, 1, -1)

    def _segments(self, spans: Sequence[SpanRun]) -> list[Segment]:
        return [span.layer(self._index) for span in spans]

    def _products(self, rotated: RotatedQueries | None) -> Products:
        if rotated is None:
            return PLAIN
        self._buffer.keys_weigh()
        return LATENT

    def _shared_scores(
        self, grouped: mx.array, shared: Sequence[Sequence[Segment]], products: Products
    ) -> Iterator[mx.array]:
        """Multiply queries of some rows with what they share, as if they were one sequence."""
        for (_, members), segments in zip(self._step.shared, shared, strict=True):
            yield scores_of(together(grouped, members), segments, products)

    def _stack_scores(
        self, grouped: mx.array, stacks: Sequence[Sequence[Segment]], products: Products
    ) -> Iterator[mx.array]:
        """Multiply queries of some rows with what each has in a stack."""
        for (stack, members), segments in zip(self._step.stacks, stacks, strict=True):
            chosen = grouped if members is None else grouped[members]
            scores = scores_of(chosen, segments, products)
            yield scores if stack.mask is None else mx.where(stack.mask, scores, -mx.inf)

    def _own_scores(self, scores: mx.array) -> mx.array:
        """Leave out what is not a row's own."""
        mask = self._buffer.mask
        return scores if mask is None else mx.where(mask, scores, -mx.inf)

    def _in_order(self, parts: Sequence[Part], order: mx.array | None) -> Part:
        """Make one part of what was computed for rows that read alone."""
        if order is not None:
            parts = [*parts, self._nothing_like(parts[0])]
        if len(parts) == 1:
            return parts[0]
        joined = Part(*[mx.concatenate(list(x), axis=0) for x in zip(*parts, strict=True)])
        return joined if order is None else Part(*[x[order] for x in joined])

    def _nothing_like(self, part: Part) -> Part:
        """What comes of looking at nothing, for one row; made once, not in each step."""
        if self._nothing is None:
            shape = part.output.shape[1:]
            self._nothing = Part(
                mx.zeros((1, *shape), part.output.dtype),
                mx.full((1, *shape[:-1], 1), -mx.inf, part.lse.dtype),
            )
        return self._nothing
