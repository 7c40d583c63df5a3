"""The buffers of a batch: what its rows have of their own, and one step of the model for all.

What a row's sequence leases is read where it lies, whoever else reads it; what is its own is
written into its row when it enters, and grows there. Which row is whose, and when they move, is
`Placement`'s to know and `plan_step`'s to decide.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..attention.batched import BufferedLayer, Step
from ..attention.splits import splits_of
from ..backends import Backend
from ..memory_profile import Held
from ..moves import Enter
from ..runtime import launch, launch_in_turn
from .alignment import aligned
from .batch_layers import BatchLayers
from .non_trimmable import in_order, make_chunk, make_ring
from .recurrent import BatchedRecurrentLayer
from .sequence_cache import SequenceCache, layer_caches_of
from .spans import SpanRun, runs_of
from .token_layer import TokenParts


class Entering(NamedTuple):
    """The state of a sequence that gets a row.

    Attributes:
        slot: of the row.
        reused: another sequence had the row before.
        suffix: for the tensors of each token-addressable layer in turn, their parts, oldest
            first; empty where the row has no tokens of its own.
        layers: its non-trimmable layer caches, mlx-lm's.
    """

    slot: int
    reused: bool
    suffix: Sequence[Sequence[mx.array]]
    layers: Sequence[Any]


def entering(move: Enter, cache: SequenceCache) -> Entering:
    """The state that a planned move puts into a row: the suffix, and the prefix's last spans."""
    copied = runs_of(cache.prefix[len(cache.prefix) - move.spans :])
    suffix = cache.suffix()
    tensors: list[tuple[mx.array, ...]] = []
    for index in range(len(cache.token_layers) if move.tokens else 0):
        parts = [run.layer(index) for run in copied] + suffix[index : index + 1]
        tensors += zip(*parts, strict=True)
    return Entering(move.slot, move.reused, tensors, cache.non_trimmable)


class BatchCache:
    """State of sequences that decode together, a row each.

    Attributes:
        layers: argument of the model.
        rows: number of rows, free ones included.
        suffixes: the rows' own tokens of layers that keep all; None if the model has none.
        windows: those of layers with a window, by its length.
        chunked: lengths of those windows that are emptied when a chunk begins.

    Args:
        like: layer caches of any sequence of the model.
        device: how attention is computed.
        row_limit: the most tokens of a suffix.
        mask_axes: where the model attends by itself, the axes of its masks; see `gathered`. 0
            where it leaves that to the layers.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """

    def __init__(
        self, like: Sequence[Any], device: Backend, *, row_limit: int, mask_axes: int = 0
    ) -> None:
        self.rows = 0
        self._step = Step(device)
        made = BatchLayers(like, self._step, row_limit=row_limit, mask_axes=mask_axes)
        self.layers, self.windows, self.chunked = made.layers, made.windows, made.chunked
        self._suffixes, self._non_trimmable = made.suffixes, made.non_trimmable
        self.suffixes = made.suffixes if made.token_layers else None
        self._num_token_layers = len(made.token_layers)
        self._gathers = mask_axes > 0
        self._leaves = list(layer_caches_of(self.layers))
        self._attending = [each for each in self._leaves if isinstance(each, BufferedLayer)]
        self._recurrent = [each for each in self._leaves if isinstance(each, BatchedRecurrentLayer)]
        suffixes = [] if self.suffixes is None else [self.suffixes]
        self._buffers = [*suffixes, *self.windows.values()]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and positions that the next step computes with."""
        return self.rows, *[buffer.positions for buffer in self._buffers]

    @property
    def launches_layers(self) -> bool:
        """True if each layer of a step is launched by itself."""
        return self._step.device.launches_layers

    def arrays(self) -> list[mx.array]:
        """Every array that a step writes, to evaluate."""
        held = [t for buffer in self._buffers for t in buffer.tensors if t is not None]
        return held + [array for layer in self._recurrent for array in layer.arrays()]

    def held(self) -> Held:
        """Memory of the rows."""
        arrays = self.arrays()
        return Held(sum(array.nbytes for array in arrays), len(arrays))

    # -- rows --------------------------------------------------------------------------

    def resize(self, rows: int, positions: int, windows: Mapping[int, int]) -> None:
        """Change the number of rows and of their positions.

        Args:
            rows: rows beyond are dropped, new ones are free.
            positions: of the suffixes.
            windows: positions of each window, by its length.
        """
        for buffer in self._buffers:
            wanted = positions if buffer is self._suffixes else windows[buffer.limit]
            if (buffer.rows, buffer.positions) != (rows, wanted):
                buffer.resize(rows, wanted)
        if rows != self.rows:
            self.rows = rows
            for layer in self._recurrent:
                layer.resize(rows)

    def put(self, row: Entering) -> None:
        """Write a row; nothing of its previous content is left."""
        for buffer in self._buffers if row.reused else ():
            buffer.wipe(row.slot)
        self._put_non_trimmable(row.slot, row.layers)
        if row.suffix:
            self._suffixes.put(row.slot, row.suffix)

    def _put_non_trimmable(self, slot: int, layers: Sequence[Any]) -> None:
        by_window: dict[int, list[list[mx.array]]] = {}
        for place, layer in zip(self._non_trimmable, layers, strict=True):
            if isinstance(place, BatchedRecurrentLayer):
                place.put(slot, self.rows, layer)
            elif not layer.empty():
                by_window.setdefault(place[0].limit, []).extend([t] for t in in_order(layer))
        for window, tensors in by_window.items():
            self.windows[window].put(slot, tensors)

    def suffix_of(self, slot: int, tokens: int) -> list[list[TokenParts]]:
        """A row's newest tokens, for each token-addressable layer; see `RingBuffer.newest`."""
        if not tokens:
            return []
        flat = self._suffixes.newest(slot, tokens)
        each = len(flat) // self._num_token_layers
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

    def move(self, source: int, target: int) -> None:
        """Copy a row onto a free one, and free it."""
        for buffer in self._buffers:
            buffer.move(source, target)
        taken = [layer.take(source) for layer in self._recurrent]
        mx.eval([state.state for state in taken])  # see `RingBuffer.move`
        for layer, state in zip(self._recurrent, taken, strict=True):
            layer.put(target, self.rows, state)

    def free(self, slot: int) -> None:
        """Mark a row as free. Nothing is computed."""
        for buffer in self._buffers:
            if slot < buffer.rows:
                buffer.free(slot)

    def restart_suffix(self, slot: int) -> None:
        """Empty a row's suffix. The prefix must have its tokens."""
        self._suffixes.free(slot)

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        self.rows = 0
        self.forget_prefixes()
        for buffer in self._buffers:
            buffer.clear()
        for layer in self._recurrent:
            layer.clear()

    # -- steps -------------------------------------------------------------------------

    def read(
        self,
        shared: list[tuple[list[SpanRun], tuple[int, ...]]],
        private: dict[int, list[SpanRun]],
        everyone: int,
    ) -> None:
        """Set the spans that rows read besides their own tokens.

        Args:
            shared: spans that several rows read, with the slots of these rows.
            private: spans that one row reads, by its slot.
            everyone: number of rows in use.
        """
        step = self._step
        self._read_shared(shared, everyone)
        step.plan += 1
        if step.device.attention_kernels and not self._gathers:
            step.splits = splits_of(private, self.rows, self._num_token_layers)
        if not step.splits:
            step.private = private
            step.of_private = order_of(list(private), self.rows)

    def _read_shared(
        self, shared: list[tuple[list[SpanRun], tuple[int, ...]]], everyone: int
    ) -> None:
        step = self._step
        step.shared = []
        for runs, slots in shared:
            # Where all rows in use read the spans, free rows do, too: their output is dropped.
            members = None if len(slots) == everyone else mx.array(slots)
            cut = aligned(runs, step.device.length_multiple)
            step.shared += [(parts, members) for parts in cut if parts]

    def forget_prefixes(self) -> None:
        """Drop all references to spans: they may be freed before the next `read`."""
        step = self._step
        step.shared, step.private, step.of_private, step.splits = [], {}, None, []

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
        for buffer in self._buffers:
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
            for buffer in self._buffers:
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


def order_of(readers: Sequence[int], rows: int) -> mx.array | None:
    """The index of each row among `readers`, or `len(readers)` if it is not one of them.

    Args:
        readers: slots of rows.
        rows: of the batch.

    Returns:
        None if all rows are readers, in their order.
    """
    places = {slot: place for place, slot in enumerate(readers)}
    order = [places.get(slot, len(readers)) for slot in range(rows)]
    return None if order == list(range(len(readers))) else mx.array(order)
