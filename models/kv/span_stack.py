"""What several rows of a batch lease alone, side by side in one array a layer."""

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from .packed import PackedSpan
from .stacking import Stack
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


class SpanStacks:
    """All stacks of a batch.

    Attributes:
        plan: what they hold.

    Args:
        layers: how many token-addressable layers the model has.
    """

    def __init__(self, layers: int) -> None:
        self.plan: tuple[Stack, ...] = ()
        self._layers = layers
        self._stacks: list[SpanStack] = []

    def make(self, stacks: tuple[Stack, ...], alone: Mapping[int, Sequence[PackedSpan]]) -> None:
        """Have these stacks from now on.

        Nobody may hold the arrays of those that were: what stays is written in place.

        Args:
            stacks: as `stacks_of` says after `plan`.
            alone: what each slot's row alone reads.
        """
        before, self.plan = self.plan, stacks
        kept = [self._stacks[stack.kept] if stack.kept >= 0 else None for stack in stacks]
        self._stacks = []  # what is not kept is freed before the next one is made
        for stack, there in zip(stacks, kept, strict=True):
            held = there or SpanStack(len(stack.rows), stack.positions)
            for place in stack.written(before):
                row = stack.rows[place]
                if row is not None:
                    held.put(place, alone[row.slot][: len(row.spans)], self._layers)
            held.look([0 if row is None else row.tokens for row in stack.rows])
            self._stacks.append(held)

    def read_by(self, rows: int) -> list[tuple[SpanStack, mx.array | None]]:
        """The stacks, each with the slots of its rows; None where these are all in order."""
        return [
            (held, _numbers([0 if row is None else row.slot for row in stack.rows], rows))
            for stack, held in zip(self.plan, self._stacks, strict=True)
        ]

    @property
    def readers(self) -> list[int | None]:
        """The slots of all their rows, one stack after the other; None for free ones."""
        return [None if row is None else row.slot for stack in self.plan for row in stack.rows]

    def arrays(self) -> list[mx.array]:
        """All arrays."""
        return [array for stack in self._stacks for array in stack.arrays()]

    def clear(self) -> None:
        """Free their memory. What they hold is read one by one from now on."""
        self.plan, self._stacks = (), []


def order_of(readers: Sequence[int | None], rows: int) -> mx.array | None:
    """Where each of so many rows is among readers; one after the last for who is not.

    Args:
        readers: slots; None for who is nobody's.
        rows: of the batch.

    Returns:
        None where that is the order of the rows.
    """
    places = {slot: place for place, slot in enumerate(readers) if slot is not None}
    order = [places.get(slot, len(readers)) for slot in range(rows)]
    return _numbers(order, len(readers))


def _numbers(numbers: list[int], count: int) -> mx.array | None:
    """As an array; None where they are all of so many in order."""
    return None if numbers == list(range(count)) else mx.array(numbers)
