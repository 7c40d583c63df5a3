"""Prompts of several rows in a model of MLA, which makes keys and values of latents by itself.

Such a model gets back from its cache what it has stored, latents and the keys' rotated part, and
expands the latents: to keys and values of each head where a call has several tokens a row. It
multiplies queries with the rotated part itself and passes that on as a mask (see `fetched`).
"""

from typing import Any

import mlx.core as mx

from ..errors import NotBatchableError
from .fetched import Rotated, RotatedQueries
from .joint import attend_jointly, shared_segments
from .padded import SharingLayer
from .products import Segment


class LatentLayer(SharingLayer):
    """One layer: the model expands all that any row reads, once.

    That is what rows share, one after the other, and then what each row reads by itself.
    """

    _rotated: mx.array | None = None

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """No mask: the model would put it on scores that are not there yet.

        Raises:
            NotBatchableError: it asks for one that is not of all that comes before.
        """
        del tokens, return_array
        if window_size is not None:
            raise NotBatchableError("the model has latents, and a window")

    def update_and_fetch(self, latents: mx.array, rotated: mx.array) -> tuple[mx.array, mx.array]:
        """Append each row's own tokens, and return the latents to expand, `[1, 1, N, size]`."""
        own = self.append(latents, rotated)
        shared = [part for parts in shared_segments(self._prompts, self._index) for part in parts]
        read, self._rotated = (
            mx.concatenate([*parts, tensor.reshape(1, 1, -1, tensor.shape[-1])], axis=2)
            for *parts, tensor in zip(*shared, own, strict=True)
        )
        return read, Rotated(rotated)

    def attend_expanded(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        rotated: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Compute attention of all rows.

        Args:
            queries: `[rows, heads, tokens, size]`.
            keys: `[1, kv_heads, N, size]`, of the latents that the layer returned.
            values: likewise.
            scale: of the products of these queries and keys.
            rotated: what the model passes in the place of a mask.
            sinks: None, in all models of MLA so far.

        Returns:
            `[rows, heads, tokens, size of a value]`.

        Raises:
            NotBatchableError: the model does not do with the latents what MLA does.
        """
        found, self._rotated = self._rotated, None
        if found is None or sinks is not None or not isinstance(rotated, RotatedQueries):
            raise NotBatchableError("the model has latents, and attends to them in its own way")
        if keys.shape[2] != found.shape[2] or values.shape[2] != found.shape[2]:
            raise NotBatchableError("the model attends to other latents than its cache returned")
        of_heads = mx.broadcast_to(found, (*keys.shape[:3], found.shape[3]))
        expanded = mx.concatenate([keys, of_heads], axis=-1), values
        asked = mx.concatenate([queries * scale, rotated.queries], axis=-1)
        at = 0
        shared: list[list[Segment]] = [[] for _ in self._prompts.shared]
        for segments, (runs, _) in zip(shared, self._prompts.shared, strict=True):
            for run in runs:
                segments.append(tuple(x[:, :, at : at + run.length] for x in expanded))
                at += run.length
        own = _by_row(tuple(x[:, :, at:] for x in expanded), queries.shape[0])
        return attend_jointly(self._prompts, shared, own, asked, None, self._device)


def _by_row(tensors: Segment, rows: int) -> Segment:
    """Give each row its own, `[rows, kv_heads, n, size]`: they lie behind each other."""
    return tuple(x.reshape(x.shape[1], rows, -1, x.shape[3]).swapaxes(0, 1) for x in tensors)
