"""Attention in chunks (llama4): a token sees those before it in its own chunk of positions.

The model computes one mask for all rows from one position, and scales queries by another. Rows
have a position each, so the layer answers the first with a number that means nothing, and makes
its own mask; and what counts positions in the model's module is bound to what counts them by row.
"""

from typing import Any

import mlx.core as mx

from ..kv.ring_buffer import RingBuffer
from .batched import BatchedWindowLayer, Step


class BatchedChunkLayer(BatchedWindowLayer):
    """Rows that forget all when a chunk begins: MLX's own attention over a ring buffer."""

    masks_itself = True

    def __init__(self, step: Step, buffer: RingBuffer, first: int) -> None:
        super().__init__(step, buffer, first, buffer.limit)
        self._masking = False

    @property
    def start_position(self) -> int:
        """Where the model's mask begins; it asks for the end of it next."""
        self._masking = True
        return 0

    @property
    def offset(self) -> Any:
        """`[rows]` positions of the rows' next tokens; a number for the model's mask."""
        masking, self._masking = self._masking, False
        return 0 if masking else super().offset

    def maybe_trim_front(self) -> None:
        """What is behind a row is masked, and written over in time."""

    def _sees_all(self, window_size: int | None) -> bool:
        return window_size is None


class CountsByRow:
    """Stands for `mlx.core` in a module of mlx-lm's that counts a sequence's positions."""

    def __getattr__(self, name: str) -> Any:
        """All else is MLX's."""
        return getattr(mx, name)

    def arange(self, start: Any, *rest: Any, **options: Any) -> mx.array:
        """Count from a position; from one position a row, it is that of the row's one token.

        Returns:
            `[tokens]`, or `[rows, 1, 1]`, which stands before heads and tokens as the other does.
        """
        if isinstance(start, mx.array):
            return start.reshape(-1, 1, 1)
        counted: mx.array = mx.arange(start, *rest, **options)
        return counted
