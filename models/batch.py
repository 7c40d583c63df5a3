"""Several sequences' layer states, seen by the model as one batch of rows.

Nothing is joined: each sequence keeps its own state, and a batch is a view of them for one
step. So sequences come and go between steps without a copy. What the rows have in common is
read once: a trunk segment that several rows lease is one product with the queries of all of
them (cascade inference; Hydragen, arXiv:2402.05099), and the parts are merged by their running
maxima and sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache

from .trunk import Tensors, TrunkState


class NotBatchableError(Exception):
    """These layer states, or what the model does with them, cannot run as rows of a batch."""


class Part:
    """One segment's share of attention, for all rows, to be merged with others.

    Attributes:
        output: `[B, kv_heads, group, size]`, weighted by `exp(score - top)`.
        top: `[B, kv_heads, group, 1]`, the largest score; -inf where a row does not attend.
        total: likewise, the sum of `exp(score - top)`.
    """

    def __init__(self, output: mx.array, top: mx.array, total: mx.array) -> None:
        self.output = output
        self.top = top
        self.total = total


class BatchedLayer(ABC):
    """One layer of several sequences. Lives for one step.

    Args:
        rows: the sequences' states of this layer.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = list(rows)
        self._token: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """`[B]` positions of the rows' next tokens."""
        return mx.array([int(row.offset) for row in self._rows])

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """A token may see all that its row holds, so there is no mask."""
        if tokens != 1 or return_array:
            raise NotBatchableError("rows of a batch decode one token, without a mask")
        for row in self._rows:
            if row.make_mask(1, return_array=False, window_size=window_size) is not None:
                raise NotBatchableError("a row needs a mask")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[B, kv_heads, 1, size]`, a token a row; `attend` reads them back."""
        self._token = keys
        for number, row in enumerate(self._rows):
            self._append(row, keys[number : number + 1], values[number : number + 1])
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Compute every row's attention over all that it holds.

        Args:
            queries: `[B, heads, 1, size]`.
            keys: what `update_and_fetch` returned; anything else means that the model does
                with keys what a batch cannot.
            scale: of the scores.
            sinks: `[heads]`, or None.

        Raises:
            NotBatchableError: `keys` is something else.
        """
        if keys is not self._token:
            raise NotBatchableError("the model changes its keys before attention")
        self._token = None
        return self._attend(queries, scale, sinks)

    @abstractmethod
    def _append(self, row: Any, keys: mx.array, values: mx.array) -> None:
        """Append one token, `[1, kv_heads, 1, size]`, to a row."""

    @abstractmethod
    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend from `[B, heads, 1, size]` to all that the rows hold."""


class BatchedRings(BatchedLayer):
    """Sliding-window rows: each attends to its own ring by mlx's fused attention."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__(rows)
        self._held: list[tuple[mx.array, mx.array]] = []

    def _append(self, row: Any, keys: mx.array, values: mx.array) -> None:
        self._held.append(row.update_and_fetch(keys, values))

    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        held, self._held = self._held, []
        outputs = [
            mx.fast.scaled_dot_product_attention(
                queries[i : i + 1], keys, values, scale=scale, sinks=sinks
            )
            for i, (keys, values) in enumerate(held)
        ]
        return mx.concatenate(outputs, axis=0)


class BatchedTrunks(BatchedLayer):
    """Full-attention rows: what they share is read once, what is theirs row by row."""

    def _append(self, row: Any, keys: mx.array, values: mx.array) -> None:
        row.tail.update_and_fetch(keys, values)

    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        batch, heads, _, size = queries.shape
        groups = self._groups()
        own = [_own_segments(row, groups) for row in self._rows]
        kv_heads = own[0][-1][0].shape[1]
        grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads, size)
        parts = [self._shared(grouped, segment, rows) for segment, rows in groups]
        parts.append(_stacked([_private(grouped[i : i + 1], s) for i, s in enumerate(own)]))
        return _merged(parts, sinks).reshape(batch, heads, 1, -1)

    def _groups(self) -> list[tuple[Tensors, list[int]]]:
        """The segments that several rows lease, each with the numbers of these rows."""
        groups: dict[int, tuple[Tensors, list[int]]] = {}
        for number, row in enumerate(self._rows):
            for segment in row.trunk:
                groups.setdefault(id(segment), (segment, []))[1].append(number)
        return [(segment, rows) for segment, rows in groups.values() if len(rows) > 1]

    def _shared(self, grouped: mx.array, segment: Tensors, rows: list[int]) -> Part:
        """Attend from some rows to one segment: one product, as if they were one sequence."""
        batch, kv_heads, group, size = grouped.shape
        everyone = len(rows) == batch
        chosen = grouped if everyone else grouped[mx.array(rows)]
        stacked = chosen.transpose(1, 0, 2, 3).reshape(1, kv_heads, len(rows) * group, size)
        part = _private(stacked, [segment])
        back = [
            x.reshape(kv_heads, len(rows), group, -1).transpose(1, 0, 2, 3)
            for x in (part.output, part.top, part.total)
        ]
        if everyone:
            return Part(*back)
        where = mx.array(rows)
        empty = [
            mx.full((batch, kv_heads, group, x.shape[-1]), fill, x.dtype)
            for x, fill in zip(back, (0.0, -mx.inf, 0.0), strict=True)
        ]
        for target, x in zip(empty, back, strict=True):
            target[where] = x
        return Part(*empty)


class BatchedArrays:
    """Recurrent rows: read as one array, and written back row by row."""

    def __init__(self, rows: Sequence[ArraysCache]) -> None:
        self._rows = list(rows)
        self.lengths = None
        self.left_padding = None

    def __getitem__(self, slot: int) -> mx.array | None:
        arrays = [row[slot] for row in self._rows]
        return None if arrays[0] is None else mx.concatenate(arrays, axis=0)

    def __setitem__(self, slot: int, value: mx.array) -> None:
        for number, row in enumerate(self._rows):
            row[slot] = value[number : number + 1]

    def make_mask(self, tokens: int) -> None:
        """Rows are whole, so none is masked."""
        del tokens

    def advance(self, tokens: int) -> None:
        """Recurrent state does not count tokens."""

    def empty(self) -> bool:
        """Whether the rows have seen no token."""
        return bool(self._rows[0].empty())


def batched(caches: Sequence[list[Any]]) -> list[Any]:
    """View the caches of several sequences as those of one batch.

    Args:
        caches: for each sequence what the model would be called with.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """
    return [_layer(rows) for rows in zip(*caches, strict=True)]


def _layer(rows: tuple[Any, ...]) -> Any:
    kind = type(rows[0])
    if kind is CacheList:
        return CacheList(*[_layer(parts) for parts in zip(*[r.caches for r in rows], strict=True)])
    if kind is TrunkState:
        return BatchedTrunks(rows)
    if kind is RotatingKVCache:
        return BatchedRings(rows)
    if kind is ArraysCache:
        return BatchedArrays(rows)
    raise NotBatchableError(f"{kind.__name__} does not run in batches")


def _own_segments(row: TrunkState, groups: list[tuple[Tensors, list[int]]]) -> list[Tensors]:
    """A row's segments that no other row leases, and its tail."""
    shared = {id(segment) for segment, _ in groups}
    own = [segment for segment in row.trunk if id(segment) not in shared]
    return [*own, row.tail_tensors()]


def _private(grouped: mx.array, segments: list[Tensors]) -> Part:
    """Attend to segments with one softmax: `[1, kv_heads, n, size]` queries."""
    scores = mx.concatenate([grouped @ keys.swapaxes(-1, -2) for keys, _ in segments], axis=-1)
    scores = scores.astype(mx.float32)
    top = scores.max(axis=-1, keepdims=True)
    shares = mx.exp(scores - top)
    total = shares.sum(axis=-1, keepdims=True)
    shares = shares.astype(grouped.dtype)
    done, outputs = 0, []
    for _, values in segments:
        length = values.shape[-2]
        outputs.append(shares[..., done : done + length] @ values)
        done += length
    return Part(sum(outputs[1:], outputs[0]), top, total)


def _stacked(parts: list[Part]) -> Part:
    return Part(
        mx.concatenate([part.output for part in parts], axis=0),
        mx.concatenate([part.top for part in parts], axis=0),
        mx.concatenate([part.total for part in parts], axis=0),
    )


def _merged(parts: list[Part], sinks: mx.array | None) -> mx.array:
    """Merge by log-sum-exp; every row attends to one part at least."""
    top = parts[0].top
    for part in parts[1:]:
        top = mx.maximum(top, part.top)
    if sinks is not None:
        logits = sinks.reshape(1, top.shape[1], top.shape[2], 1).astype(mx.float32)
        top = mx.maximum(top, logits)
    weights = [mx.exp(part.top - top) for part in parts]
    total = sum((w * part.total for w, part in zip(weights, parts, strict=True)), mx.array(0.0))
    if sinks is not None:
        total = total + mx.exp(logits - top)
    output = sum((w * part.output for w, part in zip(weights, parts, strict=True)), mx.array(0.0))
    return (output / total).astype(parts[0].output.dtype)
