"""Rows whose keys and values the model computes with itself: gathered, padded, and masked.

For models whose attention is their own: soft caps (gemma2), an indexer that picks tokens
(deepseek_v32), MLX's kernel called directly (plamo2). They get what a single sequence would get,
all keys and values, of all rows in one array, and a mask that leaves out what is not a row's own.
The array is made anew in each step and layer, so memory holds it for one layer at a time.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import NotBatchableError
from ..kv.length_classes import LengthClasses
from ..kv.spans import SpanRun
from .batched import RowsLayer, Shared, Step


class Gathering:
    """What all gathered layers of a batch have in common.

    Args:
        step: of the batch.
        own: the rows' own keys and values, in one length class.
        mask_axes: of the model's masks: a model that groups its heads by itself has one more
            than others.
    """

    def __init__(self, step: Step, own: LengthClasses, mask_axes: int) -> None:
        self._step = step
        self._own = own
        self._axes = mask_axes
        self._leased: tuple[int, mx.array | None] = (-1, None)

    def mask(self) -> mx.array:
        """Where each row may look in this step: `[rows, 1, .., 1, tokens]`."""
        if self._leased[0] != self._step.plan:
            self._leased = self._step.plan, self._mask_of_leased()
        (members,) = self._own.members
        ring = members.buffer
        mask = (
            mx.ones((ring.rows, 1, 1, ring.positions), mx.bool_) if ring.mask is None else ring.mask
        )
        own = self._own.in_order([mask[:, 0, 0]])
        seen = own if self._leased[1] is None else mx.concatenate([self._leased[1], own], axis=1)
        return seen.reshape(len(seen), *[1] * (self._axes - 2), -1)

    def gather(self, layer: int, number: int, own: mx.array) -> mx.array:
        """Put together one tensor of one layer.

        Args:
            layer: its number among those that spans hold.
            number: of the tensor.
            own: what is the rows' own of it, `[rows, heads, positions, size]`.

        Returns:
            `[rows, heads, tokens, size]`.
        """
        own = self._own.in_order([own])
        rows = len(own)

        def read(spans: Sequence[SpanRun]) -> list[mx.array]:
            # After the step's own: or all layers could be put together before the first is read.
            return [mx.depends(span.layer(layer)[number], own) for span in spans]

        parts = [
            mx.broadcast_to(part, (rows, *part.shape[1:]))
            for spans, _ in self._shared
            for part in read(spans)
        ]
        return mx.concatenate([*parts, own], axis=2) if parts else own

    @property
    def _shared(self) -> list[Shared]:
        return self._step.shared

    def _mask_of_leased(self) -> mx.array | None:
        tokens = sum(_length(spans) for spans, _ in self._shared)
        if not tokens:
            return None
        seen = np.zeros((len(self._step.positions), tokens), np.bool_)
        start = 0
        for spans, members in self._shared:
            stop = start + _length(spans)
            rows = slice(None) if members is None else np.array(members)
            seen[rows, start:stop] = True
            start = stop
        return mx.array(seen)


class GatheredTokenLayer(RowsLayer):
    """Full-attention rows of a model that attends by itself.

    Args:
        gathering: of the batch.
        index: the layer's number among those that spans hold.
    """

    def __init__(
        self, step: Step, own: LengthClasses, first: int, gathering: Gathering, index: int
    ) -> None:
        super().__init__(step, first)
        own.keys_weigh()  # who knows what the model does with them
        self._own = own
        self._gathering = gathering
        self._index = index

    @property
    def keys(self) -> mx.array | None:
        """The rows' own keys; some models order their work by them."""
        return self._tensor(self._first)

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._own.members[0].buffer.tensors[self._first] = value

    @property
    def values(self) -> mx.array | None:
        """The rows' own values; an indexer has none, and says so."""
        return self._tensor(self._first + 1)

    @values.setter
    def values(self, value: mx.array) -> None:
        self._own.members[0].buffer.tensors[self._first + 1] = value

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Mask what is padding, and what others hold."""
        del return_array
        if tokens != 1 or window_size is not None:
            raise NotBatchableError("the model asks for a window over keys that are kept for ever")
        return self._gathering.mask()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token a row; return all keys and values."""
        self._written = True
        first, second = (
            self._gathering.gather(
                self._index, number, *self._own.append(self._first + number, new)
            )
            for number, new in enumerate((keys, values))
        )
        return first, second

    def arrays(self) -> Sequence[mx.array]:
        """See `RowsLayer`."""
        return self._own.arrays_of(self._first, self._count)

    def _tensor(self, number: int) -> mx.array | None:
        return self._own.members[0].buffer.tensors[number]


def _length(spans: Sequence[SpanRun]) -> int:
    return sum(span.length for span in spans)
