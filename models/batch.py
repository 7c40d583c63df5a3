"""The layers of a batch: what the model is called with when several sequences decode at once.

A layer answers what mlx-lm's models ask of a cache. Its rows' own state is dense (see
`dense`); trunk segments that several rows lease are one product with the queries of all of
them, and all parts are merged (see `cascade`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from . import cascade
from .cascade import Part
from .dense import DenseRows
from .spans import PackedSpan


class NotBatchableError(Exception):
    """These layer states, or what the model does with them, cannot run as rows of a batch."""


@dataclass
class Step:
    """What all layers must know of the step that runs.

    Attributes:
        positions: `[rows]`, of the tokens that are fed.
        shared: runs of spans that several rows lease, each with the numbers of these rows.
        private: for rows that lease spans nobody else here does, these spans.
    """

    positions: mx.array = field(default_factory=lambda: mx.array([0]))
    shared: list[tuple[list[PackedSpan], mx.array | None]] = field(default_factory=list)
    private: dict[int, list[PackedSpan]] = field(default_factory=dict)


class BatchedLayer(ABC):
    """One layer of several sequences.

    Args:
        step: shared by all layers.
        dense: the rows' own keys and values.
        first: the number of this layer's keys there; its values are next.
    """

    def __init__(self, step: Step, dense: DenseRows, first: int) -> None:
        self._step = step
        self._dense = dense
        self._first = first
        self._token: mx.array | None = None
        self._held: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""
        return self._step.positions if self._held is None else self._step.positions + 1

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """A token may see all that its row holds, so there is no mask."""
        if tokens != 1 or return_array or not self._sees_all(window_size):
            raise NotBatchableError("rows of a batch decode one token, without a mask")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[rows, kv_heads, 1, size]`, a token a row; `attend` reads them back."""
        self._token = keys
        self._held = (
            self._dense.append(self._first, keys),
            self._dense.append(self._first + 1, values),
        )
        return keys, values

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
        if keys is not self._token or self._held is None:
            raise NotBatchableError("the model changes its keys before attention")
        return self._attend(queries, self._held, scale, sinks)

    def end_step(self) -> None:
        """Let go of what the step read, so that the next write is in place."""
        self._token = self._held = None

    @abstractmethod
    def _sees_all(self, window_size: int | None) -> bool:
        """Whether a token may see all that its row holds, if the model says this window."""

    @abstractmethod
    def _attend(
        self,
        queries: mx.array,
        held: tuple[mx.array, mx.array],
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend from `[rows, heads, 1, size]` to all that the rows hold."""


class BatchedRings(BatchedLayer):
    """Sliding-window rows: MLX's own attention over dense rings."""

    def __init__(self, step: Step, dense: DenseRows, first: int, window: int) -> None:
        super().__init__(step, dense, first)
        self._window = window

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None or window_size >= self._window

    def _attend(
        self,
        queries: mx.array,
        held: tuple[mx.array, mx.array],
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        keys, values = held
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=self._dense.mask, sinks=sinks
        )


class BatchedTrunks(BatchedLayer):
    """Full-attention rows: what they share is read once, and merged with what is their own.

    Args:
        index: the layer's number among those that spans hold.
    """

    def __init__(self, step: Step, dense: DenseRows, index: int) -> None:
        super().__init__(step, dense, 2 * index)
        self._index = index

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None

    def _attend(
        self,
        queries: mx.array,
        held: tuple[mx.array, mx.array],
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        rows, heads, _, size = queries.shape
        keys, values = held
        kv_heads = keys.shape[1]
        grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, size)
        parts = [self._over_shared(grouped, *group) for group in self._step.shared]
        if self._step.private:
            parts.append(self._over_private(grouped))
        if self._dense.mask is None:
            parts.append(cascade.over_rows(grouped, keys, values))
        else:
            parts.append(cascade.over_masked_rows(grouped, keys, values, self._dense.mask))
        if sinks is None:
            output = cascade.merged(parts)
        else:
            logits = sinks.reshape(1, kv_heads, -1, 1).astype(mx.float32)
            output = cascade.merged_with_sinks(parts, logits)
        return output.astype(queries.dtype).reshape(rows, heads, 1, -1)

    def _over_shared(
        self, grouped: mx.array, spans: Sequence[PackedSpan], members: mx.array | None
    ) -> Part:
        """Attend from some rows to what they share, as if they were one sequence."""
        rows, kv_heads, group, size = grouped.shape
        chosen = grouped if members is None else grouped[members]
        count = chosen.shape[0]
        stacked = chosen.transpose(1, 0, 2, 3).reshape(1, kv_heads, count * group, size)
        part = cascade.over_run(stacked, [span.layer(self._index) for span in spans])
        back = [x.reshape(kv_heads, count, group, -1).transpose(1, 0, 2, 3) for x in part]
        return Part(*back) if members is None else _scattered(Part(*back), members, rows)

    def _over_private(self, grouped: mx.array) -> Part:
        """Attend from each row to what it alone leases."""
        private = self._step.private
        parts = [
            cascade.over_run(grouped[row : row + 1], [span.layer(self._index) for span in spans])
            for row, spans in private.items()
        ]
        joined = Part(*[mx.concatenate(list(x), axis=0) for x in zip(*parts, strict=True)])
        if list(private) == list(range(grouped.shape[0])):
            return joined
        return _scattered(joined, mx.array(list(private)), grouped.shape[0])


class BatchedArrays:
    """Recurrent rows: their states are the rows of one array, which the model replaces."""

    def __init__(self, slots: int) -> None:
        self._slots: list[mx.array | None] = [None] * slots
        self.lengths = None
        self.left_padding = None

    def __getitem__(self, slot: int) -> mx.array | None:
        return self._slots[slot]

    def __setitem__(self, slot: int, value: mx.array) -> None:
        self._slots[slot] = value

    def make_mask(self, tokens: int) -> None:
        """Rows are whole, so none is masked."""
        del tokens

    def advance(self, tokens: int) -> None:
        """Recurrent state does not count tokens."""

    def empty(self) -> bool:
        """Whether the rows have seen no token."""
        return self._slots[0] is None

    def arrays(self) -> list[mx.array]:
        """The states, to evaluate."""
        return [array for array in self._slots if array is not None]

    def clear(self) -> None:
        """Forget all rows."""
        self._slots = [None] * len(self._slots)

    def resize(self, rows: int) -> None:
        """Have this many rows; those beyond are dropped."""
        for slot, array in enumerate(self._slots):
            if array is not None:
                more = rows - array.shape[0]
                widths = [(0, more)] + [(0, 0)] * (array.ndim - 1)
                self._slots[slot] = mx.pad(array, widths) if more > 0 else array[:rows]

    def put(self, row: int, rows: int, state: ArraysCache) -> None:
        """Write a row. One that has seen no token starts, as in mlx-lm, from zeros."""
        for slot, value in enumerate(state.cache):
            held = self._slots[slot]
            if held is None and value is None:
                continue
            if held is None:
                held = mx.zeros((rows, *value.shape[1:]), value.dtype)
            held[row : row + 1] = 0 if value is None else value
            self._slots[slot] = held

    def take(self, row: int) -> ArraysCache:
        """Copy a row."""
        state = ArraysCache(len(self._slots))
        state.cache = [
            None if array is None else mx.contiguous(array[row : row + 1]) for array in self._slots
        ]
        return state


def _scattered(part: Part, members: mx.array, rows: int) -> Part:
    """Spread a part of some rows over all; the others have looked at nothing."""
    spread = []
    for x, fill in zip(part, (0.0, -mx.inf, 0.0), strict=True):
        empty = mx.full((rows, *x.shape[1:]), fill, x.dtype)
        empty[members] = x
        spread.append(empty)
    return Part(*spread)
