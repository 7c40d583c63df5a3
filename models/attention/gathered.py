"""Rows whose keys and values the model computes with itself: gathered, padded, and masked.

For models whose attention is their own: soft caps (gemma2), an indexer that picks tokens
(deepseek_v32), MLX's kernel called directly (plamo2). They get what a single sequence would get,
all keys and values, of all rows in one array, and a mask that leaves out other rows' tokens. The
array is made in each layer of each step, so memory holds it for one layer at a time.
"""

import mlx.core as mx
import numpy as np

from ..errors import NotBatchableError
from ..kv.length_classes import LengthClasses
from .rows import RowsLayer, Step


class Gathering:
    """The masks and the gathering of all layers of a batch.

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
        self._leased: tuple[int, mx.array | None] = (-1, None)  # a mask, and the plan it is of

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
            own: the rows' own part of it, `[rows, heads, positions, size]`.

        Returns:
            `[rows, heads, tokens, size]`.
        """
        own = self._own.in_order([own])
        leased = [run.layer(layer)[number] for runs, _ in self._step.shared for run in runs]
        # After the step's own: or all layers could be put together before the first is read.
        parts = [mx.depends(part, own) for part in leased]
        spread = [mx.broadcast_to(part, (len(own), *part.shape[1:])) for part in parts]
        return mx.concatenate([*spread, own], axis=2) if parts else own

    def _mask_of_leased(self) -> mx.array | None:
        lengths = [sum(run.length for run in runs) for runs, _ in self._step.shared]
        if not any(lengths):
            return None
        seen = np.zeros((len(self._step.positions), sum(lengths)), np.bool_)
        start = 0
        for (_, members), length in zip(self._step.shared, lengths, strict=True):
            rows = slice(None) if members is None else np.array(members)
            seen[rows, start : start + length] = True
            start += length
        return mx.array(seen)


class GatheredTokenLayer(RowsLayer[LengthClasses]):
    """Full-attention rows of a model that attends by itself.

    Args:
        step: of the batch.
        own: see `Gathering`.
        gathering: of the batch.
        index: the layer's number among those that spans hold.
    """

    def __init__(self, step: Step, own: LengthClasses, gathering: Gathering, index: int) -> None:
        super().__init__(step, own)
        own.keys_weigh()  # the model may use them in any way
        self._gathering = gathering
        self._index = index

    @property
    def keys(self) -> mx.array | None:
        """The rows' own keys; some models order their work by them."""
        return self.own.members[0].buffer.tensors[self.first]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self.own.members[0].buffer.tensors[self.first] = value

    @property
    def values(self) -> mx.array | None:
        """The rows' own values; an indexer has none, and says so."""
        return self.own.members[0].buffer.tensors[self.first + 1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self.own.members[0].buffer.tensors[self.first + 1] = value

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Mask padding, and other rows' tokens.

        Raises:
            NotBatchableError: the model asks for a window.
        """
        del return_array
        if tokens != 1 or window_size is not None:
            raise NotBatchableError("the model asks for a window over keys that are kept for ever")
        return self._gathering.mask()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token a row; return all keys and values."""
        self._written = True
        first, second = (
            self._gathering.gather(self._index, number, *self.own.append(self.first + number, new))
            for number, new in enumerate((keys, values))
        )
        return first, second
