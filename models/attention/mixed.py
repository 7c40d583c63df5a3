"""The layers of a mixed step: sequences that decode, and prompts beside them, in one call.

The model is given one token a row, whoever's it is, so that its products read every weight once
for all. Only attention takes a prompt's tokens together again: each part attends as it does in a
call of its own. After Sarathi-Serve (arXiv:2403.02310), whose batches hold chunks of prompts beside
decodes, too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ..errors import NotBatchableError
from ..kv.token_layer import TokenLayerCache
from .batched import BatchedLayer
from .fetched import Attend, CallKeys
from .padded import PaddedLayer

_ONE = (TokenLayerCache, KVCache)
"""Layers of one sequence, whose keys lie apart or in one piece."""


class Parts(NamedTuple):
    """What there is of both parts of a mixed step.

    Attributes:
        decoding: of those who decode.
        prompts: of the prompts.
    """

    decoding: Any
    prompts: Any


class MixedKeys(CallKeys):
    """A mixed step's keys, a token a row, which know what each part reads."""

    _layer: "MixedLayer"

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, attend: Attend
    ) -> mx.array:
        """Compute attention of both parts; see `CallKeys.attend`."""
        if not isinstance(mask, Parts):
            raise NotBatchableError("the model brings a mask of its own for a mixed step")
        layer = self._layer
        decoding, prompts = (
            attend(part, *fetched, cache=cache, scale=scale, mask=own, sinks=sinks)
            for part, fetched, cache, own in zip(
                layer.parted(queries), self._fetched, layer.parts, mask, strict=True
            )
        )
        return layer.joined(decoding, prompts)


class MixedLayer:
    """One layer of a mixed step.

    Attributes:
        parts: the layers of both parts, as they are in calls of their own.
        offset: `[rows]`, the position of each row's token.

    Args:
        parts: as above.
        slots: of those who decode, whose rows come first, in their batch; the others are the
            prompts' tokens, prompt by prompt.
        width: tokens of each prompt, padding included.
        offset: as above.
    """

    def __init__(self, parts: Parts, slots: "Slots", width: int, offset: mx.array) -> None:
        self.parts = parts
        self.offset = offset
        self._slots = slots
        self._width = width

    def make_mask(self, tokens: int, **options: Any) -> Parts:
        """The masks of both parts.

        Raises:
            NotBatchableError: the model asks for one of several tokens a row.
        """
        if tokens != 1:
            raise NotBatchableError("a row of a mixed step has one token")
        decoding, prompts = self.parts
        return Parts(decoding.make_mask(1, **options), prompts.make_mask(self._width, **options))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[MixedKeys, mx.array]:
        """Append each row's token to its sequence, `[rows, kv_heads, 1, size]`."""
        parts = zip(self.parts, self.parted(keys), self.parted(values), strict=True)
        fetched = Parts(*[layer.update_and_fetch(*own) for layer, *own in parts])
        return MixedKeys(keys, self, fetched), values

    def parted(self, tokens: mx.array) -> Parts:
        """Give those who decode a token a row, and put each prompt's tokens into one row.

        Args:
            tokens: `[rows, heads, 1, size]`.

        Returns:
            `[decoding, heads, 1, size]`, and `[prompts, heads, width, size]`.
        """
        heads, size = tokens.shape[1], tokens.shape[3]
        decoding = self._slots.count
        prompts = tokens[decoding:].reshape(-1, self._width, heads, size)
        return Parts(self._slots.spread(tokens[:decoding]), prompts.swapaxes(1, 2))

    def joined(self, decoding: mx.array, prompts: mx.array) -> mx.array:
        """Put them together again as they were parted."""
        _, heads, _, size = prompts.shape
        tokens = prompts.swapaxes(1, 2).reshape(-1, heads, 1, size)
        return mx.concatenate([self._slots.gather(decoding), tokens], axis=0)


class Slots:
    """Which rows of a batch somebody decodes in: the model is not called with the others.

    Attributes:
        count: how many.

    Args:
        slots: those rows.
        rows: of the batch.
    """

    def __init__(self, slots: Sequence[int], rows: int) -> None:
        self.count = len(slots)
        self._slots = self._sources = None
        if [*slots] != [*range(rows)]:
            self._slots = mx.array(list(slots))
            sources = np.zeros(rows, np.int32)
            sources[[*slots]] = range(len(slots))
            self._sources = mx.array(sources)

    def gather(self, rows: mx.array) -> mx.array:
        """Choose them, of `[rows, ...]`."""
        return rows if self._slots is None else rows[self._slots]

    def spread(self, decoding: mx.array) -> mx.array:
        """Put `[count, ...]` where they are among all rows; what others have means nothing."""
        return decoding if self._sources is None else decoding[self._sources]


def mixed_layers(
    decoding: Sequence[Any],
    prompts: Sequence[Any],
    slots: Slots,
    positions: Sequence[int],
    width: int,
) -> list[MixedLayer]:
    """Make the layers of a mixed step of the layers of both parts.

    Args:
        decoding: layers of a batch, or of one sequence.
        prompts: layers of a call of prompts, or of one sequence.
        slots: of the batch's rows, those in which somebody decodes.
        positions: of the prompts' first tokens.
        width: tokens of each prompt, padding included.

    Raises:
        NotBatchableError: a layer's state is not keys and values of all tokens.
    """
    for layers, several in ((decoding, BatchedLayer), (prompts, PaddedLayer)):
        if any(type(layer) not in _ONE and not isinstance(layer, several) for layer in layers):
            raise NotBatchableError("a mixed step's layers attend to all tokens")
    if any(isinstance(layer, BatchedLayer) and layer.masks_itself for layer in decoding):
        raise NotBatchableError("the layers of a mixed step are given no mask of the model's")
    offset = decoding[0].offset
    first = mx.array([offset]) if isinstance(offset, int) else slots.gather(offset)
    each = [start + token for start in positions for token in range(width)]
    offsets = mx.concatenate([first, mx.array(each, first.dtype)])
    return [
        MixedLayer(Parts(*pair), slots, width, offsets)
        for pair in zip(decoding, prompts, strict=True)
    ]
