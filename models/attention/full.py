"""Full attention of a batch's rows: what they share is read once.

Spans that several rows lease are one product with the queries of all of them, and all parts are
merged (see `cascade`).
"""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import NotBatchableError
from ..kv.ring_buffer import RingBuffer
from ..kv.spans import SpanRun
from . import decode_kernel, kernel_arguments, latent_kernel, split_kernel, splits
from .batched import AttendingLayer, Shared, Step
from .cascade import Part, merge, of_rows, part_of, scores_of, spread, together
from .fetched import RotatedQueries
from .products import PLAIN, Latent, Products, Queries, Segment


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
        products, step = self._products(rotated, scale), self._step
        if step.splits and products is not PLAIN:
            raise NotBatchableError("the model's latents look like keys and values")
        grouped = self._grouped(queries)
        whole: Queries = (grouped * scale,)
        if rotated is not None:
            asked = queries, rotated.queries
            if sinks is None and self._in_kernel and latent_kernel.reads(asked, *self._held):
                return self._attend_to_latents(asked, scale, products)
            whole = grouped, self._grouped(rotated.queries)
        elif products is PLAIN and self._in_kernel and decode_kernel.reads(grouped, *self._held):
            return self._attend_in_kernel(grouped, scale, sinks)
        parts = self._parts(whole, step.shared, products, own=self._held)
        private = splits.attend(step.splits, self._index, grouped, scale)
        if private is not None:
            parts.append(split_kernel.merged(private, grouped.shape[1], queries.dtype))
        output = merge(parts, sinks, step.device)
        return output.astype(queries.dtype).reshape(*queries.shape[:3], -1)

    def _grouped(self, queries: mx.array) -> mx.array:
        """Put heads side by side that read the same keys: `[rows, kv_heads, group, size]`."""
        return queries.reshape(len(queries), self._held[0].shape[1], -1, queries.shape[3])

    def _attend_in_kernel(self, asked: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Have one kernel read what is the rows' own, and merge it with what they share."""
        private = splits.attend(self._step.splits, self._index, asked, scale)
        # Who computes the softmax there scales, too: that is an operation less.
        shared = self._parts((asked,), self._step.shared, PLAIN, scale=scale)
        return decode_kernel.attend(
            asked, self._ring(), scale, sinks, others=shared, splits=private
        )

    def _attend_to_latents(self, queries: Queries, scale: float, products: Products) -> mx.array:
        """Do the same where what rows have are latents."""
        grouped = tuple(self._grouped(each) for each in queries)
        shared = self._parts(grouped, self._step.shared, products)
        return latent_kernel.attend(queries, self._ring(), scale, others=shared)

    def _ring(self) -> decode_kernel.Ring:
        return decode_kernel.Ring(self._held[0], self._held[1], self._buffer.spans)

    @property
    def _in_kernel(self) -> bool:
        """Whether one kernel may read the rows' own keys and merge all parts, if it knows them."""
        step = self._step
        parts = len(step.shared) + bool(step.private)
        return step.device.attention_kernels and parts <= kernel_arguments.MAX_PARTS

    def _parts(
        self,
        grouped: Queries,
        shared: Sequence[Shared],
        products: Products,
        *,
        own: Segment | None = None,
        scale: float = 1.0,
    ) -> list[Part]:
        """Compute the parts that are merged.

        Args:
            grouped: `[rows, kv_heads, group, size]`, queries.
            shared: of the step.
            products: of queries and keys, shares and values.
            own: the rows' own keys and values; None where only what they lease is asked for. What
                all rows share then stays in the order of the heads.
            scale: of the scores, where neither queries nor products are scaled.
        """
        leased = [self._segments(runs) for runs, _ in shared]
        private = [self._segments(spans) for spans in self._step.private.values()]
        scores = [
            *[
                scores_of(together(grouped, members), segments, products)
                for (_, members), segments in zip(shared, leased, strict=True)
            ],
            *[
                scores_of(of_rows(grouped, slice(row, row + 1)), segments, products)
                for row, segments in zip(self._step.private, private, strict=True)
            ],
            *([] if own is None else [self._own_scores(products.scores(grouped, own))]),
        ]
        read: list[list[Segment]] = [*leased, *private, *([] if own is None else [[own]])]
        softmaxed = self._step.device.softmaxes(scores, scale=scale)
        parts = [part_of(*pair, products) for pair in zip(softmaxed, read, strict=True)]
        last = [] if own is None else [parts.pop()]
        whole = [
            part if own is None and members is None else spread(part, members, grouped[0].shape)
            for part, (_, members) in zip(parts, shared, strict=False)
        ]
        if private:
            whole.append(self._in_order(parts[len(shared) :], self._step.of_private))
        return whole + last

    def _segments(self, spans: Sequence[SpanRun]) -> list[Segment]:
        return [span.layer(self._index) for span in spans]

    def _products(self, rotated: RotatedQueries | None, scale: float) -> Products:
        if rotated is None:
            return PLAIN
        self._buffer.keys_weigh()
        return Latent(scale)

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
