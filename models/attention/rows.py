"""Attention of a batch's rows: what they share is read once.

Spans that several rows read are one product with the queries of all of them. Rows' own tokens are
one product for each length class, or one ring buffer where the layer has a window. All parts are
merged (see `parts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import mlx.core as mx

from ..backends.base import Backend
from ..errors import NotBatchableError
from ..kv.length_classes import LengthClasses
from ..kv.ring_buffer import RingBuffer
from ..kv.spans import SpanRun
from ..params import KVQuantization
from .layers import BatchedLayer, Query
from .parts import (
    PLAIN,
    Latent,
    Part,
    Products,
    Quantized,
    Queries,
    Segment,
    merge,
    of_rows,
    part_of,
    scores_of,
    spread,
    together,
)

Shared = tuple[list[SpanRun], mx.array | None]
"""Runs of spans that several rows lease, and the numbers of these rows; None for all."""

Own = TypeVar("Own", RingBuffer, LengthClasses)


@dataclass
class Step:
    """The step that runs, for all layers.

    Attributes:
        device: how attention is computed.
        positions: `[rows]`, of the tokens that the model is called with.
        shared: spans that several rows lease.
        plan: number of changes of `shared`.
    """

    device: Backend
    positions: mx.array = field(default_factory=lambda: mx.array([0]))
    shared: list[Shared] = field(default_factory=list)
    plan: int = 0


class RowsLayer(Generic[Own]):
    """A layer of rows.

    Attributes:
        own: the rows' own tokens.
        first: the number of this layer's first tensor there.

    Args:
        step: shared by all layers.
        own: see above.
    """

    tensors = 2
    """Number of this layer's tensors."""

    def __init__(self, step: Step, own: Own) -> None:
        self.own: Own = own
        self.first = own.reserve(self.tensors)
        self._step = step
        self._written = False  # in this step

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return self._step.positions + 1 if self._written else self._step.positions

    def arrays(self) -> Sequence[mx.array]:
        """The rows' own arrays, to evaluate."""
        return self.own.arrays_of(self.first, self.tensors)

    def end_step(self) -> None:
        """Drop what the step read, so that the next write is in place."""
        self._written = False


class BatchedTokenLayer(RowsLayer[LengthClasses], BatchedLayer):
    """Full-attention rows.

    Args:
        step: see `RowsLayer`.
        own: see `RowsLayer`.
        index: the layer's number among those that spans hold.
    """

    def __init__(self, step: Step, own: LengthClasses, index: int) -> None:
        super().__init__(step, own)
        self._index = index
        self._held: list[Segment] = []  # of each length class, in a step

    def end_step(self) -> None:
        """See `RowsLayer`."""
        super().end_step()
        self._held, self._fetched = [], None

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._write(keys, values)

    def _write(self, *tensors: mx.array) -> None:
        self._written = True
        held = [self.own.append(self.first + n, tensor) for n, tensor in enumerate(tensors)]
        self._held = list(zip(*held, strict=True))

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None

    def _attend(self, query: Query) -> mx.array:
        products = self._products(query)
        if products is PLAIN and not self._step.shared:
            return self._attend_to_own(query)
        queries, scale, sinks, rotated = query
        grouped = self._grouped(queries)
        pair = (grouped * scale,) if rotated is None else (grouped, self._grouped(rotated))
        output = merge(self._parts(pair, products), sinks, self._step.device)
        return output.astype(queries.dtype).reshape(*queries.shape[:3], -1)

    def _products(self, query: Query) -> Products:
        if query.rotated is None:
            return PLAIN
        self.own.keys_weigh()
        return Latent(query.scale)

    def _grouped(self, queries: mx.array) -> mx.array:
        """Put heads side by side that read the same keys: `[rows, kv_heads, group, size]`."""
        return queries.reshape(len(queries), self._held[0][0].shape[1], -1, queries.shape[3])

    def _parts(self, queries: Queries, products: Products) -> list[Part]:
        """Compute the parts that are merged: of shared spans, and of the rows' own tokens."""
        shared, members = self._step.shared, self.own.members
        leased = [[run.layer(self._index) for run in runs] for runs, _ in shared]
        scores = [
            scores_of(together(queries, slots), segments, products)
            for (_, slots), segments in zip(shared, leased, strict=True)
        ]
        for each, held in zip(members, self._held, strict=True):
            own = products.scores(of_rows(queries, each.slots), held)
            mask = each.buffer.mask
            scores.append(own if mask is None else mx.where(mask, own, -mx.inf))
        read = [*leased, *[[held] for held in self._held]]
        softmaxed = self._step.device.softmaxes(scores)
        parts = [part_of(*pair, products) for pair in zip(softmaxed, read, strict=True)]
        whole = [
            spread(part, slots, queries[0].shape)
            for part, (_, slots) in zip(parts, shared, strict=False)
        ]
        own_parts = zip(*parts[len(shared) :], strict=True)
        return [*whole, Part(*[self.own.in_order(list(each)) for each in own_parts])]

    def _attend_to_own(self, query: Query) -> mx.array:
        """Compute attention where no span is shared: one call for each class."""
        queries, scale, sinks, _ = query
        outputs = [
            self._step.device.attend(
                each.of(queries), held[0], held[1], scale, each.buffer.mask, sinks
            )
            for each, held in zip(self.own.members, self._held, strict=True)
        ]
        return self.own.in_order(outputs)


class BatchedQuantizedLayer(BatchedTokenLayer):
    """Full-attention rows whose keys and values are quantised as they are written.

    Args:
        step: see `RowsLayer`.
        own: see `RowsLayer`.
        index: the layer's number among those that spans hold.
        quantization: of keys and values.
    """

    tensors = 6

    def __init__(
        self, step: Step, own: LengthClasses, index: int, quantization: KVQuantization
    ) -> None:
        super().__init__(step, own, index)
        own.keys_weigh()  # half of the tensors are values', and not every other one
        self._quantized = Quantized(quantization)

    def _append(self, keys: mx.array, values: mx.array) -> None:
        bits, group_size = self._quantized.quantization
        parts = [mx.quantize(x, group_size=group_size, bits=bits) for x in (keys, values)]
        self._write(*parts[0], *parts[1])

    def _products(self, query: Query) -> Products:
        if query.rotated is not None:
            raise NotBatchableError("latents are not quantised")
        return self._quantized


class BatchedWindowLayer(RowsLayer[RingBuffer], BatchedLayer):
    """Sliding-window rows: MLX's own attention over a ring buffer."""

    def __init__(self, step: Step, own: RingBuffer) -> None:
        super().__init__(step, own)
        self._held: tuple[mx.array, ...] = ()  # keys and values of all rows, in a step

    def end_step(self) -> None:
        """See `RowsLayer`."""
        super().end_step()
        self._held, self._fetched = (), None

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._written = True
        self._held = (
            self.own.append(self.first, keys),
            self.own.append(self.first + 1, values),
        )

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None or window_size >= self.own.limit

    def _attend(self, query: Query) -> mx.array:
        queries, scale, sinks, rotated = query
        if rotated is not None:
            raise NotBatchableError("the model keeps latents for a window only")
        keys, values = self._held
        return self._step.device.attend(queries, keys, values, scale, self.own.mask, sinks)


class BatchedChunkLayer(BatchedWindowLayer):
    """Rows that forget all when a chunk of positions begins (llama4).

    The model computes one mask for all rows from one position, and scales queries by another. Rows
    have a position each, so the layer answers the first with a number that means nothing, and makes
    its own mask; `CountsByRow` counts the second by row.
    """

    masks_itself = True
    _masking = False  # the model is making its mask

    @property
    def start_position(self) -> int:
        """Where the model's mask begins; it asks for the end of it next."""
        self._masking = True
        return 0

    @property
    def offset(self) -> Any:
        """`[rows]` positions of the rows' next tokens; a number for the model's mask."""
        masking, self._masking = self._masking, False
        return 0 if masking else super().offset

    def maybe_trim_front(self) -> None:
        """Do nothing: tokens before the chunk are masked, and written over later."""

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None


class CountsByRow:
    """Stands for `mlx.core` in a module of mlx-lm's that counts a sequence's positions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def arange(self, start: Any, *rest: Any, **options: Any) -> mx.array:
        """Count from a position; from one position a row, it is that of the row's one token.

        Returns:
            `[tokens]`, or `[rows, 1, 1]`, which broadcasts over heads and tokens as the other does.
        """
        if isinstance(start, mx.array):
            return start.reshape(-1, 1, 1)
        counted: mx.array = mx.arange(start, *rest, **options)
        return counted
