"""The layers of a batch: what the model is called with when several sequences decode at once.

A layer answers what mlx-lm's models ask of a cache. Its rows' own state is dense (see
`dense`); trunk segments that several rows lease are one product with the queries of all of
them, and all parts are merged (see `cascade`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from .blocks import attend
from .cascade import Part, Segment, merge, part_of, scores_of
from .dense import DenseRows
from .device import DevicePolicy
from .softmax import softmaxes
from .spans import PackedSpan


class NotBatchableError(Exception):
    """These layer states, or what the model does with them, cannot run as rows of a batch."""


@dataclass
class Step:
    """What all layers must know of the step that runs.

    Attributes:
        device: how attention is computed.
        positions: `[rows]`, of the tokens that are fed.
        shared: runs of spans that several rows lease, each with the numbers of these rows.
        private: for rows that lease spans nobody else here does, these spans.
    """

    device: DevicePolicy
    positions: mx.array = field(default_factory=lambda: mx.array([0]))
    shared: list[tuple[list[PackedSpan], mx.array | None]] = field(default_factory=list)
    private: dict[int, list[PackedSpan]] = field(default_factory=dict)


class BatchedLayer(ABC):
    """One layer of several sequences, for attention."""

    _token: mx.array | None = None

    @property
    @abstractmethod
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """A token may see all that its row holds, so there is no mask."""
        if tokens != 1 or return_array or not self._sees_all(window_size):
            raise NotBatchableError(
                "the model asks for a mask, and rows of a batch are attended to without one"
            )

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[rows, kv_heads, 1, size]`, a token a row; `attend` reads them back."""

    @abstractmethod
    def attend(
        self, queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Compute every row's attention over all that it holds.

        Args:
            queries: `[rows, heads, 1, size]`.
            keys: what `update_and_fetch` returned; anything else means that the model does
                with keys what a batch cannot.
            scale: of the scores.
            sinks: `[heads]`, or None.

        Raises:
            NotBatchableError: `keys` is something else.
        """

    @abstractmethod
    def _sees_all(self, window_size: int | None) -> bool:
        """Whether a token may see all that its row holds, if the model says this window."""

    def _check(self, keys: mx.array) -> None:
        if keys is not self._token:
            raise NotBatchableError(
                "the model changes its keys between its cache and its attention"
            )


class DenseLayer(BatchedLayer):
    """A layer whose rows' own keys and values are dense.

    Args:
        step: shared by all layers.
        dense: the rows' own keys and values.
        first: the number of this layer's keys there; its values are next.
    """

    def __init__(self, step: Step, dense: DenseRows, first: int) -> None:
        self._step = step
        self._dense = dense
        self._first = first
        self._held: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return self._step.positions if self._held is None else self._step.positions + 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's column."""
        self._token = keys
        self._held = (
            self._dense.append(self._first, keys),
            self._dense.append(self._first + 1, values),
        )
        return keys, values

    def end_step(self) -> None:
        """Let go of what the step read, so that the next write is in place."""
        self._token = self._held = None

    def _read(self, keys: mx.array) -> tuple[mx.array, mx.array]:
        """All keys and values of the rows, if `keys` is what was fetched last."""
        self._check(keys)
        return cast("tuple[mx.array, mx.array]", self._held)


class BatchedRings(DenseLayer):
    """Sliding-window rows: MLX's own attention over dense rings."""

    def __init__(self, step: Step, dense: DenseRows, first: int, window: int) -> None:
        super().__init__(step, dense, first)
        self._window = window

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None or window_size >= self._window

    def attend(
        self, queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Compute every row's attention; see `BatchedLayer.attend`."""
        return attend(queries, *self._read(keys), scale, self._dense.mask, sinks, self._step.device)


class BatchedTrunks(DenseLayer):
    """Full-attention rows: what they share is read once, and merged with what is their own.

    Args:
        index: the layer's number among those that spans hold.
    """

    def __init__(self, step: Step, dense: DenseRows, index: int) -> None:
        super().__init__(step, dense, 2 * index)
        self._index = index

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None

    def attend(
        self, queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Compute every row's attention; see `BatchedLayer.attend`."""
        held = self._read(keys)
        rows, heads, _, size = queries.shape
        kv_heads = held[0].shape[1]
        grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, size)
        shared = [self._segments(spans) for spans, _ in self._step.shared]
        private = [self._segments(spans) for spans in self._step.private.values()]
        scores = [
            *self._shared_scores(grouped, shared),
            *[
                scores_of(grouped[row : row + 1], segments)
                for row, segments in zip(self._step.private, private, strict=True)
            ],
            self._own_scores(grouped, held[0]),
        ]
        read: list[list[Segment]] = [*shared, *private, [held]]
        softmaxed = softmaxes(scores, self._step.device)
        parts = [part_of(*pair) for pair in zip(softmaxed, read, strict=True)]
        own = parts.pop()
        together = [
            self._spread(part, members, grouped.shape)
            for part, (_, members) in zip(parts, self._step.shared, strict=False)
        ]
        if private:
            together.append(self._joined(parts[len(shared) :], rows))
        output = merge([*together, own], sinks, self._step.device)
        return output.astype(queries.dtype).reshape(rows, heads, 1, -1)

    def _segments(self, spans: Sequence[PackedSpan]) -> list[Segment]:
        return [span.layer(self._index) for span in spans]

    def _shared_scores(
        self, grouped: mx.array, shared: Sequence[Sequence[Segment]]
    ) -> Iterator[mx.array]:
        """Multiply queries of some rows with what they share, as if they were one sequence."""
        _, kv_heads, _, size = grouped.shape
        for (_, members), segments in zip(self._step.shared, shared, strict=True):
            chosen = grouped if members is None else grouped[members]
            stacked = chosen.transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, size)
            yield scores_of(stacked, segments)

    def _own_scores(self, grouped: mx.array, keys: mx.array) -> mx.array:
        """Multiply each row's queries with its own keys."""
        scores = grouped @ keys.swapaxes(-1, -2)
        mask = self._dense.mask
        return scores if mask is None else mx.where(mask, scores, -mx.inf)

    @staticmethod
    def _spread(part: Part, members: mx.array | None, shape: tuple[int, ...]) -> Part:
        """Give rows back what was computed for them as for one sequence."""
        rows, kv_heads, group, _ = shape
        back = Part(*[x.reshape(kv_heads, -1, group, x.shape[-1]).swapaxes(0, 1) for x in part])
        return back if members is None else _scattered(back, members, rows)

    def _joined(self, parts: Sequence[Part], rows: int) -> Part:
        """Make one part of what single rows were computed for."""
        numbers = list(self._step.private)
        joined = Part(*[mx.concatenate(list(x), axis=0) for x in zip(*parts, strict=True)])
        if numbers == list(range(rows)):
            return joined
        return _scattered(joined, mx.array(numbers), rows)


def _scattered(part: Part, members: mx.array, rows: int) -> Part:
    """Spread a part of some rows over all; the others have looked at nothing."""
    spread = []
    for x, fill in zip(part, (0.0, -mx.inf), strict=True):
        empty = mx.full((rows, *x.shape[1:]), fill, x.dtype)
        empty[members] = x
        spread.append(empty)
    return Part(*spread)
