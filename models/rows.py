"""A batch of rows: who sits where, what they share, and one step of the model for all.

Rows come and go between steps. What a sequence leases is read where it lies, whoever else
reads it; what is its own is written into its row when it joins, bounded by `_OWN` tokens, and
grows there. A row that leaves is free for the next one; rows move only when the batch becomes
smaller.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, RotatingKVCache

from .batch import BatchedRings, BatchedTrunks, DenseColumns, NotBatchableError, Step
from .chunked import BatchedChunks
from .dense import DenseRows, bucket
from .device import DevicePolicy
from .gathered import GatheredTrunks, Gathering, padded_to
from .layer_states import Held, LiveStates, leaves_of
from .recurrent import BatchedArrays
from .runtime import launch
from .sharing import runs
from .spans import PackedSpan
from .trunk import Tensors, TrunkState
from .whole import chunk_in_order, make_chunk, make_ring, ring_in_order

OWN = 256
"""See `Rows`."""

_SHARED = 32
"""Tokens of a segment that is not copied, because another row leases it too."""

LIMIT = 512
"""Tokens of its own after which a row is sealed into a segment."""


class Growth(NamedTuple):
    """What a step makes of the rows, at most.

    Attributes:
        rows: there will be.
        columns: of their tails.
        rings: columns of the sliding layers, by their window.
        sealed: rows whose tokens become a segment.
        resized: whether all rows may be copied for it.
        gathered: tokens that each layer puts together for each row.
        padded: those of them that single rows read, and that are padded first.
    """

    rows: int
    columns: int
    rings: dict[int, int]
    sealed: int
    resized: bool
    gathered: int
    padded: int


class Row:
    """A sequence's seat in a batch."""

    def __init__(self, rows: "Rows", number: int, states: LiveStates) -> None:
        self._rows = rows
        self.number = number
        self.states = states

    def tail(self, count: int) -> list[Tensors]:
        """Copy the newest tokens, for each token-addressable layer."""
        return self._rows.tail(self.number, count)

    def wholes(self) -> list[Any]:
        """Copy the whole-state layers into caches of mlx-lm's."""
        return self._rows.wholes(self)

    def changed(self) -> None:
        """Hear that the leased spans were cut or joined elsewhere."""
        self._rows.replan()

    def sealed(self) -> None:
        """Hear that the newest tokens are part of the trunk now."""
        self._rows.empty(self.number)

    def leave(self) -> None:
        """Give the row back."""
        self._rows.leave(self)


class Rows:
    """Sequences that decode together.

    Attributes:
        layers: what the model is called with.

    Args:
        like: the state of any sequence of the model, in caches of its own.
        device: how attention is computed, and for how many steps there may be more rows than
            are needed.
        own: tokens of its trunk's end, at most, that a row copies so as to read them as its
            own: many short segments of single rows cost more to read one by one than the
            copy takes.
        limit: tokens of its own after which a row is sealed into a segment.
        mask_axes: where the model attends by itself, the axes of its masks; see `gathered`. 0
            where it leaves that to the layers.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """

    def __init__(
        self,
        like: LiveStates,
        device: DevicePolicy,
        *,
        own: int = OWN,
        limit: int = LIMIT,
        mask_axes: int = 0,
    ) -> None:
        self._limit = limit
        self._patience = device.spare_steps
        self._loose = 0  # steps that fewer rows were enough for
        self._own = min(own, limit // 2)
        self._step = Step(device)
        self._tails = DenseRows(limit, scores_masked=True)
        self._rings: dict[int, DenseRows] = {}
        self._chunks: set[int] = set()  # those of them that are emptied when a chunk begins
        self._trunks: list[DenseColumns] = []
        self._gathering = Gathering(self._step, self._tails, mask_axes) if mask_axes else None
        self._wholes: list[tuple[DenseRows, int] | BatchedArrays] = []
        self._seats: dict[int, Row] = {}
        self._size = 0
        self._planned = False
        self.layers = [self._layer(cache) for cache in like.caches]
        leaves = list(leaves_of(self.layers))
        self._attending = [leaf for leaf in leaves if isinstance(leaf, DenseColumns)]
        self._recurrent = [leaf for leaf in leaves if isinstance(leaf, BatchedArrays)]

    def __len__(self) -> int:
        """How many sequences sit here."""
        return len(self._seats)

    @property
    def trunks(self) -> int:
        """How many layers keep all tokens."""
        return len(self._trunks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns that the next step computes with."""
        return self._size, *[dense.columns for dense in self._all_dense()]

    def others(self, states: Sequence[LiveStates]) -> list[LiveStates]:
        """Who sits here besides these."""
        known = {id(state) for state in states}
        return [seat.states for seat in self._seats.values() if id(seat.states) not in known]

    def join(self, newcomers: Sequence[LiveStates]) -> None:
        """Give sequences rows, and copy into them what is their own."""
        everyone = [*[seat.states for seat in self._seats.values()], *newcomers]
        leased = Counter(id(span) for states in everyone for span in states.trunk)
        for states in newcomers:
            self._seat(states, leased)

    def _seat(self, states: LiveStates, leased: Counter[int]) -> None:
        if states.tail_length > self._own:
            states.seal_tail()
        number = next(n for n in range(len(self._seats) + 1) if n not in self._seats)
        used_before = number < self._size
        self._resize(max(self._size, bucket(len(self._seats) + 1)))
        for dense in self._all_dense() if used_before else []:
            dense.wipe(number)
        self._write_tail(number, states, leased)
        self._write_wholes(number, states)
        row = self._seats[number] = Row(self, number, states)
        states.sit_down(row)
        self.replan()

    def leave(self, row: Row) -> None:
        """Free a row. Nothing is computed here: it may be a computation that failed."""
        if self._seats.get(row.number) is not row:
            return  # the batch was cleared under it, and the number is another's by now
        del self._seats[row.number]
        for dense in self._all_dense():
            dense.free(row.number)
        self.replan()
        if not self._seats:
            self.clear()

    def clear(self) -> None:
        """Forget all rows, and free their memory."""
        self._seats = {}
        self._size = 0
        self.replan()
        for dense in self._all_dense():
            dense.clear()
        for recurrent in self._recurrent:
            recurrent.clear()

    def feed(self, model: Any, states: Sequence[LiveStates], tokens: mx.array) -> mx.array:
        """Feed a token to every row.

        Args:
            model: mlx-lm's.
            states: all that sit here, in the order of `tokens`.
            tokens: `[B]`.

        Returns:
            `[B, V]` logits, not yet evaluated.
        """
        self._close_gaps()
        self._seal_full_rows()
        numbers = self._numbers(states)
        self._step.positions = self._positions(states, numbers)
        changed = not self._planned
        if changed:
            self._plan()
        self._begin_chunks()
        for dense in self._all_dense():
            changed |= dense.begin_step()
        if changed:
            # Apart from the step, which is then the same operations as every other.
            launch(self.arrays())
        try:
            logits = model(self._spread(tokens, numbers)[:, None], cache=self.layers)[:, -1, :]
        finally:
            for layer in self._attending:
                layer.end_step()
            for dense in self._all_dense():
                dense.end_step(list(self._seats))
        gathered: mx.array = logits
        if numbers != list(range(self._size)):
            gathered = logits[mx.array(numbers)]
        return gathered

    def held(self) -> Held:
        """What the rows take in memory."""
        arrays = self.arrays()
        return Held(sum(array.nbytes for array in arrays), len(arrays))

    def growth(self, states: Sequence[LiveStates]) -> Growth:
        """Foretell what a step with these sequences makes of the rows, at most."""
        newcomers = [state.offset for state in states if state.seat is None]
        rows = max(bucket(len(self._seats) + len(newcomers)), self._size)
        columns = {
            dense.limit: dense.columns_with(self._longest(dense, newcomers) + 1)
            for dense in self._rings.values()
        }
        tails = sealed = 0
        if self._tails.tensors:
            own = [self._own] if newcomers else []
            tails = self._tails.columns_with(self._longest(self._tails, own) + 1)
            sealed = sum(self._tails.lengths[number] >= self._limit for number in self._seats)
        before = (self._size, self._tails.columns, *[d.columns for d in self._rings.values()])
        resized = before != (rows, tails, *columns.values())
        padded, joint = self._gathered(states) if self._gathering else (0, 0)
        # Where nothing is leased, the rows are read as they lie.
        gathered = padded + joint + tails if padded or joint else 0
        copied = resized or len(newcomers) > 0
        return Growth(rows, tails, columns, sealed, copied, gathered, padded)

    def _gathered(self, states: Sequence[LiveStates]) -> tuple[int, int]:
        """Foretell how many tokens of trunks are put together for each row, at most.

        Returns:
            Those that it reads alone, padding included, and those that rows share.
        """
        rows = {id(row.states): row for row in self._seats.values()}
        read, sealed = {}, []
        for number, state in enumerate(states):
            row = rows.get(id(state))
            if row is None:
                stays, segment = False, state.tail_length > self._own
            else:
                stays = self._tails.lengths[row.number] < self._limit
                segment = not stays
            read[number] = self._read_by(row) if row is not None and stays else state.trunk
            sealed.append(state.tail_length if segment else 0)
        shared, private = runs(read)
        alone = [
            length + sum(span.length for span in private.get(number, ()))
            for number, length in enumerate(sealed)
        ]
        return padded_to(max(alone)), sum(span.length for spans, _ in shared for span in spans)

    def _longest(self, dense: DenseRows, more: Sequence[int]) -> int:
        return max([0, *more, *[dense.lengths[number] for number in self._seats]])

    def arrays(self) -> list[mx.array]:
        """Every array of the rows, to evaluate."""
        held = [t for dense in self._all_dense() for t in dense.tensors if t is not None]
        return held + [array for recurrent in self._recurrent for array in recurrent.arrays()]

    def tail(self, number: int, count: int) -> list[Tensors]:
        """Copy a row's newest tokens, for each token-addressable layer."""
        flat = self._tails.take(number, count)
        return [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]

    def wholes(self, row: Row) -> list[Any]:
        """Copy a row's whole-state layers into caches of mlx-lm's."""
        offset = row.states.offset
        held = {
            window: dense.take(row.number, dense.lengths[row.number])
            for window, dense in self._rings.items()
        }
        return [
            whole.take(row.number)
            if isinstance(whole, BatchedArrays)
            else self._revived(whole[0].limit, offset, held[whole[0].limit][whole[1] :][:2])
            for whole in self._wholes
        ]

    def _revived(self, window: int, offset: int, tensors: list[mx.array]) -> Any:
        make = make_chunk if window in self._chunks else make_ring
        return make(window, offset, tensors)

    def empty(self, number: int) -> None:
        """Forget what a row has of its own; it is read from the trunk from now on."""
        self._tails.free(number)
        self.replan()

    def replan(self) -> None:
        """Look anew at who shares what, before the next step."""
        self._step.shared, self._step.private = [], {}  # they may be freed until then
        self._planned = False

    # -- layers ------------------------------------------------------------------------

    def _layer(self, cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*[self._layer(part) for part in cache.caches])
        if type(cache) is TrunkState:
            self._trunks.append(self._trunk(self._tails.reserve(2), len(self._trunks)))
            return self._trunks[-1]
        if type(cache) is RotatingKVCache and not cache.keep:
            if cache.max_size in self._chunks:
                raise NotBatchableError("windows and chunks of one length")
            dense = self._rings.setdefault(cache.max_size, DenseRows(cache.max_size))
            first = dense.reserve(2)
            self._wholes.append((dense, first))
            return BatchedRings(self._step, dense, first, cache.max_size)
        if type(cache) is ChunkedKVCache:
            self._chunks.add(cache.chunk_size)
            dense = self._rings.setdefault(cache.chunk_size, DenseRows(cache.chunk_size))
            first = dense.reserve(2)
            self._wholes.append((dense, first))
            return BatchedChunks(self._step, dense, first)
        if type(cache) is ArraysCache:
            arrays = BatchedArrays(len(cache.cache))
            self._wholes.append(arrays)
            return arrays
        raise NotBatchableError(
            f"a layer keeps its state in a {type(cache).__name__}, which has no rows"
        )

    def _trunk(self, first: int, index: int) -> DenseColumns:
        if self._gathering is None:
            return BatchedTrunks(self._step, self._tails, index)
        return GatheredTrunks(self._step, self._tails, first, self._gathering, index)

    def _all_dense(self) -> list[DenseRows]:
        return [dense for dense in (self._tails, *self._rings.values()) if dense.tensors]

    # -- seats -------------------------------------------------------------------------

    def _resize(self, size: int) -> None:
        if size == self._size:
            return
        self._size = size
        for dense in self._all_dense():
            dense.resize(size)
        for recurrent in self._recurrent:
            recurrent.resize(size)

    def _close_gaps(self) -> None:
        """Have fewer rows if they have been enough for a while."""
        size = bucket(len(self._seats))
        self._loose = self._loose + 1 if size < self._size else 0
        if self._loose <= self._patience:
            return
        for number in sorted(n for n in self._seats if n >= size):
            self._move(number, next(n for n in range(size) if n not in self._seats))
        self._resize(size)
        self.replan()

    def _move(self, source: int, target: int) -> None:
        for dense in self._all_dense():
            dense.move(source, target)
        for recurrent in self._recurrent:
            recurrent.put(target, self._size, recurrent.take(source))
        row = self._seats[target] = self._seats.pop(source)
        row.number = target

    def _write_tail(self, number: int, states: LiveStates, leased: Counter[int]) -> None:
        """Copy the tail, and the trunk's end as far as it is short."""
        absorbed: list[PackedSpan] = []
        length = states.tail_length
        for span in reversed(states.trunk):
            length += span.length
            if length > self._own or (leased[id(span)] > 1 and span.length > _SHARED):
                break
            absorbed.insert(0, span)
        tail = states.tail() if states.tail_length else []
        if not absorbed and not tail:
            return
        tensors = []
        for index in range(len(self._trunks)):
            parts = [span.layer(index) for span in absorbed] + tail[index : index + 1]
            tensors += [mx.concatenate([p[i] for p in parts], axis=2) for i in (0, 1)]
        self._tails.put(number, tensors)

    def _write_wholes(self, number: int, states: LiveStates) -> None:
        rings: dict[int, list[mx.array]] = {}
        for whole, leaf in zip(self._wholes, states.wholes, strict=True):
            if isinstance(whole, BatchedArrays):
                whole.put(number, self._size, leaf)
            elif leaf.empty():
                continue
            elif isinstance(leaf, ChunkedKVCache):
                rings.setdefault(leaf.chunk_size, []).extend(chunk_in_order(leaf))
            else:
                rings.setdefault(leaf.max_size, []).extend(ring_in_order(leaf))
        for window, tensors in rings.items():
            self._rings[window].put(number, tensors)

    def _seal_full_rows(self) -> None:
        for row in self._seats.values():
            if self._tails.tensors and self._tails.lengths[row.number] >= self._limit:
                row.states.seal_tail()

    # -- steps -------------------------------------------------------------------------

    def _numbers(self, states: Sequence[LiveStates]) -> list[int]:
        by_state = {id(row.states): row.number for row in self._seats.values()}
        return [by_state[id(state)] for state in states]

    def _begin_chunks(self) -> None:
        """Forget a row's chunk where its next token is the first of another one."""
        for size in self._chunks:
            dense = self._rings[size]
            for row in self._seats.values():
                if row.states.offset % size == 0:
                    dense.free(row.number)

    def _positions(self, states: Sequence[LiveStates], numbers: list[int]) -> mx.array:
        positions = np.zeros(self._size, np.int32)
        positions[numbers] = [state.offset for state in states]
        return mx.array(positions)

    def _spread(self, tokens: mx.array, numbers: list[int]) -> mx.array:
        """Put tokens into their rows; free rows get token 0."""
        if numbers == list(range(self._size)):
            return tokens
        source = np.full(self._size, len(numbers), np.int32)
        source[numbers] = range(len(numbers))
        padded = mx.concatenate([tokens, mx.zeros(1, tokens.dtype)])
        return padded[mx.array(source)]

    def _plan(self) -> None:
        """Find the runs of spans that the same rows read."""
        trunks = {row.number: self._read_by(row) for row in self._seats.values()}
        shared, self._step.private = runs(trunks)
        everyone = len(self._seats)  # free rows may look too: nobody reads what they find
        self._step.shared = [
            (spans, None if len(members) == everyone else mx.array(members))
            for spans, members in shared
        ]
        self._step.plan += 1
        self._planned = True

    def _read_by(self, row: Row) -> list[PackedSpan]:
        """The part of a row's trunk that is not in the row itself."""
        if not self._trunks:
            return []
        left = row.states.offset - self._tails.lengths[row.number]
        spans = []
        for span in row.states.trunk:
            if left <= 0:
                break
            spans.append(span)
            left -= span.length
        return spans
