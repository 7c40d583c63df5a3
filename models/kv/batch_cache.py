"""The buffers of a batch: its rows' own state, and one step of the model for all.

A span that several rows read is read where it lies, once for all of them. Spans that a row reads
alone are copied into the row when it enters, and it grows there. `Placement` knows which row is
whose, and `plan_step` decides when rows move.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from ..attention.gathered import GatheredTokenLayer, Gathering
from ..attention.rows import (
    BatchedChunkLayer,
    BatchedQuantizedLayer,
    BatchedTokenLayer,
    BatchedWindowLayer,
    RowsLayer,
    Step,
)
from ..backends.base import Backend
from ..errors import NotBatchableError
from ..memory_profile import Held
from ..runtime import launch, launch_in_turn
from ..step_plan import Arrange, Seat
from .checkpoints import in_order, live_window
from .length_classes import LengthClasses
from .recurrent import BatchedRecurrentLayer
from .ring_buffer import RingBuffer
from .sequence_cache import layer_caches_of
from .spans import SpanRun, TokenParts
from .token_layer import QuantizedTokenLayerCache, TokenLayerCache


class BatchCache:
    """State of sequences that decode together, a row each.

    Attributes:
        layers: argument of the model: a layer of rows in the place of each layer cache.
        rows: number of rows, free ones included.
        own: the rows' own tokens of layers that keep all; None if the model has none.
        token_layers: number of layers that keep all.
        windows: buffers of layers with a window, by its length.
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
        self.token_layers = 0
        self.windows: dict[int, RingBuffer] = {}
        self.chunked: set[int] = set()
        self._step = Step(device)
        self._own = LengthClasses()
        self._gathering = Gathering(self._step, self._own, mask_axes) if mask_axes else None
        self.layers = [self._layer(cache) for cache in like]
        self.own = self._own if self.token_layers else None
        self._leaves = list(layer_caches_of(self.layers))
        self._attending = [each for each in self._leaves if isinstance(each, RowsLayer)]
        self._recurrent = [each for each in self._leaves if isinstance(each, BatchedRecurrentLayer)]
        whole = BatchedWindowLayer | BatchedRecurrentLayer
        self._non_trimmable = [each for each in self._leaves if isinstance(each, whole)]

    def _layer(self, cache: Any) -> Any:
        step = self._step
        if type(cache) is CacheList:
            return CacheList(*[self._layer(part) for part in cache.caches])
        if isinstance(cache, TokenLayerCache):
            return self._token_layer(cache)
        if type(cache) is RotatingKVCache and not cache.keep:
            if cache.max_size in self.chunked:
                raise NotBatchableError("windows and chunks of one length")
            return BatchedWindowLayer(step, self._window(cache.max_size))
        if type(cache) is ChunkedKVCache:
            self.chunked.add(cache.chunk_size)
            return BatchedChunkLayer(step, self._window(cache.chunk_size))
        if type(cache) is ArraysCache:
            return BatchedRecurrentLayer(len(cache.cache))
        raise NotBatchableError(
            f"a layer keeps its state in a {type(cache).__name__}, which has no rows"
        )

    def _window(self, length: int) -> RingBuffer:
        return self.windows.setdefault(length, RingBuffer(length))

    def _token_layer(self, cache: TokenLayerCache) -> RowsLayer[LengthClasses]:
        index = self.token_layers
        self.token_layers += 1
        if isinstance(cache, QuantizedTokenLayerCache):
            if self._gathering is not None:
                raise NotBatchableError("the model attends by itself, and its keys are quantised")
            return BatchedQuantizedLayer(self._step, self._own, index, cache.quantization)
        if self._gathering is not None:
            return GatheredTokenLayer(self._step, self._own, self._gathering, index)
        return BatchedTokenLayer(self._step, self._own, index)

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
        for buffer in self.windows.values():
            buffer.move(source, target)
        taken = [layer.take(source) for layer in self._recurrent]
        mx.eval([state.state for state in taken])  # see `RingBuffer.move`
        for layer, state in zip(self._recurrent, taken, strict=True):
            layer.put(target, self.rows, state)
        if self.own is not None:
            self.own.relocate(source, target)

    def put(
        self, slot: int, seat: Seat | None, own: Sequence[TokenParts], layers: Sequence[Any]
    ) -> None:
        """Write a row. All of its previous content is overwritten.

        Args:
            slot: of the row.
            seat: of its own tokens; None where no layer keeps all.
            own: for the tensors of each token-addressable layer in turn, their parts, oldest first;
                empty where the row has no tokens of its own.
            layers: the sequence's non-trimmable layer caches, mlx-lm's.
        """
        for buffer in self.windows.values():
            buffer.wipe(slot)
        by_window: dict[int, list[TokenParts]] = {}
        for place, layer in zip(self._non_trimmable, layers, strict=True):
            if isinstance(place, BatchedRecurrentLayer):
                place.put(slot, self.rows, layer)
            elif not layer.empty():
                by_window.setdefault(place.own.limit, []).extend([t] for t in in_order(layer))
        for window, tensors in by_window.items():
            self.windows[window].put(slot, tensors)
        if seat is not None:
            self._own.put(slot, seat, own)

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
        taken = []
        for place in self._non_trimmable:
            if isinstance(place, BatchedRecurrentLayer):
                taken.append(place.take(slot))
            else:
                window = place.own.limit
                pair = held[window][place.first : place.first + place.tensors]
                taken.append(live_window(window, offset, pair, chunked=window in self.chunked))
        return taken

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
        self, model: Any, tokens: mx.array, slots: list[int], offsets: list[int], *, new: bool
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
        for size in self.chunked:
            for slot, offset in zip(slots, offsets, strict=True):
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


def aligned(runs: Iterable[SpanRun], multiple: int) -> tuple[list[SpanRun], list[SpanRun]]:
    """Cut the last tokens off runs, so that the length of each that stays is a multiple.

    cuBLAS multiplies matrices whose rows are no multiple of 16 bytes with kernels for any GPU since
    2018, of which one takes as long as ten of the others: a step of 32 rows over 7,999 shared
    tokens took 15 ms for one of its products, and 0.7 over 8,000 (one H200, 8B shapes). A prefix
    may have any length, so its last few tokens are a product of their own.

    Args:
        runs: of spans.
        multiple: of tokens; 1 where products are fast for all lengths.

    Returns:
        The aligned runs, and the ends that were cut off.
    """
    if multiple == 1:
        return list(runs), []
    whole, rests = [], []
    for run in runs:
        length = run.length // multiple * multiple
        if length:
            whole.append(run.between(0, length))
        if length < run.length:
            rests.append(run.between(length, run.length))
    return whole, rests
