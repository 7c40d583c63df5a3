"""The place of each running sequence's state: caches of its own, or a slot of the batch.

One object moves it, as plans say. References go one way, from here to a sequence's cache and to
the batch's buffers, so that state is freed as soon as its sequence ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..errors import StateLostError
from ..memory_profile import Held
from ..moves import Enter, Leave, MakeContiguous, Move, Pack, Relocate, Resize
from ..step_plan import Call
from .batch_cache import BatchCache, entering
from .layout import CacheLayout
from .packed import PackedCheckpoint, pack_suffix
from .prefix_groups import PrefixGroup
from .ring_buffer import RingBuffer
from .sequence_cache import SequenceCache, checkpoint_of, flat_arrays
from .spans import PackedSpan, runs_of
from .token_layer import TokenParts, in_parts


class Placement:
    """Moves the state of sequences, and reads it wherever it lies.

    Attributes:
        sequences: those in the batch, by their slots.
        batch: the buffers of those; None where no sequence can be in a batch.
        groups: rows that read the same spans; None after a change.

    Args:
        layout: of the model's layers.
        batch: as above.
    """

    def __init__(self, layout: CacheLayout, batch: BatchCache | None) -> None:
        self._layout = layout
        self.batch = batch
        self.sequences: dict[int, SequenceCache] = {}
        self.groups: tuple[PrefixGroup, ...] | None = None

    @property
    def launches_layers(self) -> bool:
        """True if each layer of a decode step is launched by itself."""
        return self.batch is not None and self.batch.launches_layers

    @property
    def rows(self) -> int:
        """Number of rows, free ones included."""
        return 0 if self.batch is None else self.batch.rows

    @property
    def suffixes(self) -> RingBuffer | None:
        """Own tokens of rows, of layers that keep all."""
        return None if self.batch is None else self.batch.suffixes

    @property
    def windows(self) -> Mapping[int, RingBuffer]:
        """Own tokens of rows, of layers with a window, by its length."""
        return {} if self.batch is None else self.batch.windows

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and positions that the last step computed with."""
        return self._batch.shape

    def arrays(self) -> list[mx.array]:
        """Every array of the batch, to evaluate."""
        return [] if self.batch is None else self.batch.arrays()

    def held(self) -> Held:
        """Memory of the batch."""
        return Held(0, 0) if self.batch is None else self.batch.held()

    # -- what others read and change -----------------------------------------------------

    def capture(self, cache: SequenceCache) -> PackedCheckpoint:
        """Copy a sequence's non-trimmable layers at its present offset."""
        self._check(cache)
        if cache.slot is None:
            return cache.capture()
        layers = self._batch.non_trimmable_of(cache.slot, cache.offset)
        return checkpoint_of(cache.offset, layers)

    def lease(self, cache: SequenceCache, spans: Sequence[PackedSpan]) -> None:
        """Replace a sequence's leased spans by others of the same tokens, cut or merged."""
        cache.lease(spans)
        self._regroup()

    def take_packed(self, cache: SequenceCache) -> list[PackedSpan]:
        """Pack all of a sequence's state that it does not lease, and hand it over, in order.

        Call `replace_own` or `close` next.
        """
        self._check(cache)
        return cache.take_packed(self._suffix(cache, cache.suffix_length))

    def replace_own(self, cache: SequenceCache, spans: Sequence[PackedSpan]) -> None:
        """Replace leased and own spans by `spans`, which have all tokens; the suffix is empty."""
        cache.leased, cache.packed = list(spans), []
        self._restart_suffix(cache)

    def close(self, cache: SequenceCache) -> None:
        """Free a sequence's slot and drop its state. Idempotent."""
        slot, cache.slot = cache.slot, None
        if slot is None or self.sequences.get(slot) is not cache:
            return
        del self.sequences[slot]
        self._batch.free(slot)
        self._regroup()
        if not self.sequences:
            self._batch.clear()

    def clear(self) -> None:
        """Drop the batch after a failed step: its layers may be at different tokens."""
        for cache in self.sequences.values():
            cache.slot, cache.is_lost = None, True
        self.sequences = {}
        self._regroup()
        self._batch.clear()

    # -- moves -------------------------------------------------------------------------

    def apply(self, moves: Iterable[Move], caches: Mapping[int, SequenceCache]) -> None:
        """Make a plan's moves, in their order.

        Args:
            moves: of one call.
            caches: of those that are no member of the batch yet, at least, by their numbers.
        """
        known = {cache.number: cache for cache in self.sequences.values()} | dict(caches)
        for move in moves:
            self._apply(move, known)

    def _apply(self, move: Move, caches: Mapping[int, SequenceCache]) -> None:
        match move:
            case Resize():
                if move.renewed:
                    self._batch.clear()
                self._batch.resize(move.rows, move.positions, dict(move.windows))
            case Relocate():
                self._batch.move(move.source, move.target)
                cache = self.sequences[move.target] = self.sequences.pop(move.source)
                cache.slot = move.target
            case Enter():
                self._enter(move, caches[move.sequence])
            case Leave():
                self._leave(move, caches[move.sequence])
            case Pack():
                self._pack(caches[move.sequence], move.merges)
            case MakeContiguous():
                caches[move.sequence].make_contiguous()

    def _enter(self, move: Enter, cache: SequenceCache) -> None:
        self._batch.put(entering(move, cache))
        cache.slot = move.slot
        cache.set_layers([])
        self.sequences[move.slot] = cache

    def _leave(self, move: Leave, cache: SequenceCache) -> None:
        self._pack(cache, move.merges)
        whole = self._batch.non_trimmable_of(move.slot, cache.offset)
        # Slices that are not evaluated would make the next write a copy of all rows.
        mx.eval(flat_arrays([layer.state for layer in whole]))
        layers = self._layout.layers(cache.prefix, whole)
        self.close(
            cache
        )  # last: a failure before it leaves the sequence in the batch, which is lost then
        cache.set_layers(layers)

    def _pack(self, cache: SequenceCache, merges: int) -> None:
        tokens = cache.suffix_length
        if tokens:
            packed = pack_suffix(self._suffix(cache, tokens))
            cache.add_packed(packed, merges)
            self._restart_suffix(cache)

    # -- steps -------------------------------------------------------------------------

    def step(self, model: Any, call: Call, tokens: mx.array) -> mx.array:
        """Give rows of the batch a token each, after the call's moves.

        Args:
            model: mlx-lm's.
            call: what was planned.
            tokens: `[B]`, in the order of its slots.

        Returns:
            `[B, V]` logits, not yet evaluated.
        """
        if call.regroups:
            self._read(call.groups)
        self.groups = call.groups
        offsets = [self.sequences[slot].offset for slot in call.slots]
        new = call.regroups or bool(call.moves)
        return self._batch.step(model, tokens, list(call.slots), offsets, new=new)

    def _read(self, groups: Iterable[PrefixGroup]) -> None:
        shared, private = [], {}
        for slots, start, stop in groups:
            runs = runs_of(self.sequences[slots[0]].prefix[start:stop])
            if len(slots) > 1:
                shared.append((runs, slots))
            else:
                private[slots[0]] = runs
        self._batch.forget_prefixes()
        self._batch.read(shared, private, len(self.sequences))

    @property
    def _batch(self) -> BatchCache:
        if self.batch is None:
            raise ValueError("this model's sequences are not in a batch")
        return self.batch

    def _suffix(self, cache: SequenceCache, tokens: int) -> list[list[TokenParts]]:
        if cache.slot is None:
            return in_parts(cache.suffix())
        return self._batch.suffix_of(cache.slot, tokens)

    @staticmethod
    def _check(cache: SequenceCache) -> None:
        if cache.is_lost:
            raise StateLostError("a step failed under the sequence, and its state is lost")

    def _restart_suffix(self, cache: SequenceCache) -> None:
        cache.restart_suffix()
        if cache.slot is not None:
            self._batch.restart_suffix(cache.slot)
            self._regroup()

    def _regroup(self) -> None:
        self.groups = None
        if self.batch is not None:
            self.batch.forget_prefixes()
