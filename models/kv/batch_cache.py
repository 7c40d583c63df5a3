"""The buffers of a batch: what its rows have of their own, and one step of the model for all.

A span that several rows read is read where it lies, once for all of them. What a row reads alone
is written into the row when it enters, and grows there. Which row is whose, and when they move, is
`Placement`'s to know and `plan_step`'s to decide.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..attention.batched import RowsLayer, Step
from ..backends import Backend
from ..memory_profile import Held
from ..moves import Arrange, Seat
from ..runtime import launch, launch_in_turn
from .alignment import aligned
from .batch_layers import BatchLayers
from .non_trimmable import in_order, make_chunk, make_ring
from .recurrent import BatchedRecurrentLayer
from .sequence_cache import layer_caches_of
from .spans import SpanRun
from .token_layer import TokenParts


class Entering(NamedTuple):
    """The state of a sequence that gets a row.

    Attributes:
        slot: of the row.
        seat: of its own tokens; None where no layer keeps all.
        own: for the tensors of each token-addressable layer in turn, their parts, oldest first;
            empty where the row has no tokens of its own.
        layers: its non-trimmable layer caches, mlx-lm's.
    """

    slot: int
    seat: Seat | None
    own: Sequence[Sequence[mx.array]]
    layers: Sequence[Any]


class BatchCache:
    """State of sequences that decode together, a row each.

    Attributes:
        layers: argument of the model.
        rows: number of rows, free ones included.
        own: the rows' own tokens of layers that keep all; None if the model has none.
        token_layers: number of layers that keep all.
        windows: those of layers with a window, by its length.
        chunked: lengths of those windows that are emptied when a chunk begins.

    Args:
        like: layer caches of any sequence of the model.
        device: how attention is computed.
        mask_axes: where the model attends by itself, the axes of its masks; see `gathered`. 0
            where it leaves that to the layers.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """

    def __init__(self, like: Sequence[Any], device: Backend, *, mask_axes: int = 0) -> None:
        self.rows = 0
        self._step = Step(device)
        made = BatchLayers(like, self._step, mask_axes=mask_axes)
        self.layers, self.windows, self.chunked = made.layers, made.windows, made.chunked
        self._own, self._non_trimmable = made.own, made.non_trimmable
        self.own = made.own if made.token_layers else None
        self.token_layers = len(made.token_layers)
        self._leaves = list(layer_caches_of(self.layers))
        self._attending = [each for each in self._leaves if isinstance(each, RowsLayer)]
        self._recurrent = [each for each in self._leaves if isinstance(each, BatchedRecurrentLayer)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and positions that the next step computes with."""
        classes = [number for shape in self._own.shapes.values() for number in shape]
        return self.rows, *classes, *[buffer.positions for buffer in self.windows.values()]

    @property
    def launches_layers(self) -> bool:
        """True if each layer of a step is launched by itself."""
        return self._step.device.launches_layers

    def arrays(self) -> list[mx.array]:
        """Every array that a step writes, to evaluate."""
        windows = [t for ring in self.windows.values() for t in ring.tensors if t is not None]
        recurrent = [array for layer in self._recurrent for array in layer.arrays()]
        return self._own.arrays() + windows + recurrent

    def held(self) -> Held:
        """Memory of the rows."""
        arrays = self.arrays()
        return Held(sum(array.nbytes for array in arrays), len(arrays))

    # -- rows --------------------------------------------------------------------------

    def arrange(self, move: Arrange) -> None:
        """Change the number of rows and of their positions, and the seats of rows."""
        if move.renewed:
            self.clear()
        for source, target in move.relocated:
            self._relocate(source, target)
        for length, positions in move.windows:
            buffer = self.windows[length]
            if (buffer.rows, buffer.positions) != (move.rows, positions):
                buffer.resize(move.rows, positions)
        if move.rows != self.rows:
            self.rows = move.rows
            for layer in self._recurrent:
                layer.resize(move.rows)
        self._own.arrange(move.rows, move.shapes, move.seats)

    def _relocate(self, source: int, target: int) -> None:
        """Move a row to a free slot."""
        for buffer in self.windows.values():
            buffer.move(source, target)
        taken = [layer.take(source) for layer in self._recurrent]
        mx.eval([state.state for state in taken])  # see `RingBuffer.move`
        for layer, state in zip(self._recurrent, taken, strict=True):
            layer.put(target, self.rows, state)
        if self.own is not None:
            self.own.relocate(source, target)

    def put(self, row: Entering) -> None:
        """Write a row; nothing of its previous content is left."""
        for buffer in self.windows.values():
            buffer.wipe(row.slot)
        self._put_non_trimmable(row.slot, row.layers)
        if row.seat is not None:
            self._own.put(row.slot, row.seat, row.own)

    def _put_non_trimmable(self, slot: int, layers: Sequence[Any]) -> None:
        by_window: dict[int, list[list[mx.array]]] = {}
        for place, layer in zip(self._non_trimmable, layers, strict=True):
            if isinstance(place, BatchedRecurrentLayer):
                place.put(slot, self.rows, layer)
            elif not layer.empty():
                by_window.setdefault(place[0].limit, []).extend([t] for t in in_order(layer))
        for window, tensors in by_window.items():
            self.windows[window].put(slot, tensors)

    def newest_of(self, slot: int, tokens: int) -> list[list[TokenParts]]:
        """A row's newest own tokens, for each token-addressable layer; see `RingBuffer.newest`."""
        if not tokens or not self.token_layers:
            return []
        flat = self._own.newest(slot, tokens)
        each = len(flat) // self.token_layers
        return [flat[i : i + each] for i in range(0, len(flat), each)]

    def non_trimmable_of(self, slot: int, offset: int) -> list[Any]:
        """Copy a row's non-trimmable layers into caches of mlx-lm's.

        Args:
            slot: of the row.
            offset: number of tokens that its sequence has computed.
        """
        held = {
            window: buffer.take(slot, buffer.lengths[slot])
            for window, buffer in self.windows.items()
        }
        return [
            place.take(slot)
            if isinstance(place, BatchedRecurrentLayer)
            else self._revived(place[0].limit, offset, held[place[0].limit][place[1] :][:2])
            for place in self._non_trimmable
        ]

    def _revived(self, window: int, offset: int, tensors: list[mx.array]) -> Any:
        make = make_chunk if window in self.chunked else make_ring
        return make(window, offset, tensors)

    def free(self, slot: int) -> None:
        """Mark a row as free. Nothing is computed."""
        for buffer in self.windows.values():
            if slot < buffer.rows:
                buffer.free(slot)
        self._own.free(slot)

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        self.rows = 0
        self.forget_prefixes()
        for buffer in self.windows.values():
            buffer.clear()
        self._own.clear()
        for layer in self._recurrent:
            layer.clear()

    # -- steps -------------------------------------------------------------------------

    def read(self, shared: Sequence[tuple[list[SpanRun], tuple[int, ...]]], everyone: int) -> None:
        """Set the spans that rows read besides their own tokens.

        Args:
            shared: spans that several rows read, with the slots of these rows.
            everyone: number of rows in use.
        """
        step = self._step
        step.plan += 1
        step.shared = []
        for runs, slots in shared:
            # Where all rows in use read the spans, free rows do, too: their output is dropped.
            members = None if len(slots) == everyone else mx.array(slots)
            cut = aligned(runs, step.device.length_multiple)
            step.shared += [(parts, members) for parts in cut if parts]

    def forget_prefixes(self) -> None:
        """Drop all references to spans: they may be freed before the next `read`."""
        self._step.shared = []

    def step(
        self,
        model: Any,
        tokens: mx.array,
        slots: list[int],
        offsets: list[int],
        *,
        new: bool,
    ) -> mx.array:
        """Call the model with one token for each of some rows.

        Args:
            model: mlx-lm's.
            tokens: `[B]`.
            slots: of their rows.
            offsets: number of tokens that these rows have computed.
            new: rows were moved or resized since the last step.

        Returns:
            `[B, V]` logits, not yet evaluated.
        """
        positions = np.zeros(self.rows, np.int32)
        positions[slots] = offsets
        self._step.positions = mx.array(positions)
        self._begin_chunks(slots, offsets)
        self._own.begin_step()
        for buffer in self.windows.values():
            buffer.begin_step()
        if new:
            # Before the step, which is then the same operations as every other.
            launch(self.arrays())
        try:
            fed = self._spread(tokens, slots)
            logits: mx.array = model(fed[:, None], cache=self.layers)[:, -1, :]
            if self.launches_layers:
                launch_in_turn([layer.arrays() for layer in self._leaves])
        finally:
            for layer in self._attending:
                layer.end_step()
            if self.own is not None:
                self.own.end_step(slots)
            for buffer in self.windows.values():
                buffer.end_step(slots)
        return logits if slots == list(range(self.rows)) else logits[mx.array(slots)]

    def _begin_chunks(self, slots: list[int], offsets: list[int]) -> None:
        """Empty a row's chunk if its next token is the first of another chunk."""
        if not self.chunked:
            return
        for slot, offset in zip(slots, offsets, strict=True):
            for size in self.chunked:
                if offset % size == 0:
                    self.windows[size].free(slot)

    def _spread(self, tokens: mx.array, slots: list[int]) -> mx.array:
        """Order tokens by row; free rows get token 0."""
        if slots == list(range(self.rows)):
            return tokens
        source = np.full(self.rows, len(slots), np.int32)
        source[slots] = range(len(slots))
        padded = mx.concatenate([tokens, mx.zeros(1, tokens.dtype)])
        return padded[mx.array(source)]
