"""What several rows of a batch lease alone, side by side in one array a layer."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .packed import PackedSpan
from .token_layer import Tensors


class SpanStack:
    """Copies of spans, a row for each row of the batch that reads them. Read-only for a step.

    Attributes:
        rows: how many, free ones included.
        positions: tokens that each has room for.
        mask: `[rows, 1, 1, positions]`, where each may look; None if everywhere.

    Args:
        rows: as above.
        positions: as above.
    """

    def __init__(self, rows: int, positions: int) -> None:
        self.rows = rows
        self.positions = positions
        self.mask: mx.array | None = None
        self._layers: list[list[mx.array]] = []

    def layer(self, index: int) -> Tensors:
        """One layer's tensors, `[rows, heads, positions, size]` each."""
        return tuple(self._layers[index])

    def arrays(self) -> list[mx.array]:
        """All tensors."""
        return [tensor for layer in self._layers for tensor in layer]

    def put(self, row: int, spans: Sequence[PackedSpan], layers: int) -> None:
        """Write a row: the tokens of some spans, oldest first.

        Args:
            row: its number.
            spans: what it holds from now on.
            layers: how many token-addressable layers the model has.
        """
        for index in range(layers):
            parts = [span.layer(index) for span in spans]
            if index == len(self._layers):
                self._layers.append([self._empty(tensor) for tensor in parts[0]])
            for tensor, pieces in zip(self._layers[index], zip(*parts, strict=True), strict=True):
                done = 0
                for piece in pieces:
                    tensor[row : row + 1, :, done : done + piece.shape[2]] = piece
                    done += piece.shape[2]
                if done < self.positions:
                    # What is masked weighs nothing, but nothing times a NaN is a NaN.
                    tensor[row : row + 1, :, done:] = 0

    def look(self, lengths: Sequence[int]) -> None:
        """Say how many tokens each row holds. Free rows look at one, which nobody reads."""
        seen = np.arange(self.positions)[None] < np.maximum(lengths, 1)[:, None]
        self.mask = None if seen.all() else mx.array(seen)[:, None, None, :]

    def _empty(self, like: mx.array) -> mx.array:
        return mx.zeros((self.rows, like.shape[1], self.positions, like.shape[3]), like.dtype)
