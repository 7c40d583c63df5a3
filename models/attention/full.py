"""Full attention of a batch's rows: what they share is read once.

Spans that several rows read are one product with the queries of all of them. Rows' own tokens are
one product for each length class. All parts are merged (see `cascade`).
"""

from collections.abc import Sequence

import mlx.core as mx

from ..kv.length_classes import LengthClasses
from ..kv.spans import SpanRun
from .batched import BatchedLayer, RowsLayer, Step
from .cascade import Part, merge, of_rows, part_of, scores_of, spread, together
from .fetched import RotatedQueries
from .products import PLAIN, Latent, Products, Queries, Segment


class BatchedTokenLayer(RowsLayer, BatchedLayer):
    """Full-attention rows.

    Args:
        step: shared by all layers.
        own: the rows' own tokens.
        index: the layer's number among those that spans hold.
        first: the number of its first tensor in `own`.
    """

    def __init__(self, step: Step, own: LengthClasses, index: int, *, first: int) -> None:
        super().__init__(step, first)
        self._own = own
        self._index = index
        self._held: list[Segment] = []  # of each length class, in a step

    def arrays(self) -> Sequence[mx.array]:
        """See `RowsLayer`."""
        return self._own.arrays_of(self._first, self._count)

    def end_step(self) -> None:
        """See `RowsLayer`."""
        super().end_step()
        self._held, self._fetched = [], None

    def _append(self, keys: mx.array, values: mx.array) -> None:
        self._write(keys, values)

    def _write(self, *tensors: mx.array) -> None:
        self._written = True
        held = [self._own.append(self._first + n, tensor) for n, tensor in enumerate(tensors)]
        self._held = list(zip(*held, strict=True))

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None

    def _attend(
        self,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None,
    ) -> mx.array:
        products = self._products(rotated, scale)
        if products is PLAIN and not self._step.shared:
            return self._attend_to_own(queries, scale, sinks)
        grouped = self._grouped(queries)
        asked = (grouped * scale,) if rotated is None else (grouped, self._grouped(rotated.queries))
        output = merge(self._parts(asked, products), sinks, self._step.device)
        return output.astype(queries.dtype).reshape(*queries.shape[:3], -1)

    def _grouped(self, queries: mx.array) -> mx.array:
        """Put heads side by side that read the same keys: `[rows, kv_heads, group, size]`."""
        return queries.reshape(len(queries), self._held[0][0].shape[1], -1, queries.shape[3])

    def _parts(self, queries: Queries, products: Products) -> list[Part]:
        """Compute the parts that are merged: of shared spans, and of the rows' own tokens."""
        shared, members = self._step.shared, self._own.members
        leased = [self._segments(runs) for runs, _ in shared]
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
        return [*whole, Part(*[self._own.in_order(list(each)) for each in own_parts])]

    def _attend_to_own(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Compute attention where nothing is shared: one call for each class."""
        outputs = [
            self._step.device.attend(
                each.of(queries), held[0], held[1], scale, each.buffer.mask, sinks
            )
            for each, held in zip(self._own.members, self._held, strict=True)
        ]
        return self._own.in_order(outputs)

    def _segments(self, spans: Sequence[SpanRun]) -> list[Segment]:
        return [span.layer(self._index) for span in spans]

    def _products(self, rotated: RotatedQueries | None, scale: float) -> Products:
        if rotated is None:
            return PLAIN
        self._own.keys_weigh()
        return Latent(scale)
