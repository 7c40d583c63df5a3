"""The place of each running sequence's state: caches of its own, or a slot of the batch.

Plans say when it moves. References go one way, from here to a sequence's cache and to the batch's
buffers, so that state is freed as soon as its sequence ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..errors import StateLostError
from ..memory_profile import Held
from ..step_plan import (
    Arrange,
    Call,
    Enter,
    Leave,
    MakeContiguous,
    Move,
    PrefixGroup,
    Share,
)
from .batch_cache import BatchCache
from .checkpoints import PackedCheckpoint, checkpoint_of
from .layout import CacheLayout
from .length_classes import LengthClasses
from .ring_buffer import RingBuffer
from .sequence_cache import SequenceCache, flat_arrays
from .spans import PackedSpan, TokenParts, in_one, pack_suffix, runs_between, runs_of


class Placement:
    """Moves the state of sequences, and reads it wherever it lies.

    Attributes:
        sequences: the batch's, by their slots.
        batch: their buffers; None where no sequence can be in a batch.
        groups: rows that read the same spans; None after a change.

    Args:
        layout: of the model's layers.
        batch: see above.
    """

    def __init__(self, layout: CacheLayout, batch: BatchCache | None) -> None:
        self._layout = layout
        self.batch = batch
        self.sequences: dict[int, SequenceCache] = {}
        self.groups: tuple[PrefixGroup, ...] | None = None

    @property
    def rows(self) -> int:
        """Number of rows, free ones included."""
        return 0 if self.batch is None else self.batch.rows

    @property
    def own(self) -> LengthClasses | None:
        """See `BatchCache`."""
        return None if self.batch is None else self.batch.own

    @property
    def windows(self) -> Mapping[int, RingBuffer]:
        """See `BatchCache`."""
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

    # -- one sequence's state ------------------------------------------------------------

    def capture(self, cache: SequenceCache) -> PackedCheckpoint:
        """Copy a sequence's non-trimmable layers at its present offset."""
        self._check(cache)
        if cache.slot is None:
            return cache.capture()
        layers = self._batch.non_trimmable_of(cache.slot, cache.offset)
        return checkpoint_of(cache.offset, layers)

    def lease(self, cache: SequenceCache, spans: Sequence[PackedSpan]) -> None:
        """Replace a sequence's leased spans: by others of the same tokens, or of more or fewer.

        A row, and a sequence whose keys lie in one piece, keep their copy of leased tokens.
        """
        cache.lease(spans)
        self._regroup()

    def own_begin(self, cache: SequenceCache) -> int:
        """The first token that a sequence reads in its row, or in caches of its own."""
        if not self._layout.has_spans:
            return cache.offset
        if cache.slot is not None and self.own is not None:
            return cache.offset - self.own.length(cache.slot)
        return 0 if cache.is_contiguous else cache.offset - cache.suffix_length

    def suffix_span(self, cache: SequenceCache, tokens: int | None = None) -> PackedSpan | None:
        """Copy the tokens after the leased ones into a span; None if there are none.

        Args:
            cache: of the sequence.
            tokens: the most that are copied, from the first one on; None for all.
        """
        self._check(cache)
        if cache.slot is None:
            return cache.suffix_span(tokens)
        parts = self._batch.newest_of(cache.slot, cache.suffix_length)
        if tokens is not None:
            parts = [[_beginning(tensor, tokens) for tensor in layer] for layer in parts]
        return pack_suffix(parts) if parts and tokens != 0 else None

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
            caches: of sequences by their numbers; the batch's own may be left out.
        """
        known = {cache.number: cache for cache in self.sequences.values()} | dict(caches)
        for move in moves:
            self._apply(move, known)

    def _apply(self, move: Move, caches: Mapping[int, SequenceCache]) -> None:
        match move:
            case Arrange():
                self._batch.arrange(move)
                for source, target in move.relocated:
                    cache = self.sequences[target] = self.sequences.pop(source)
                    cache.slot = target
            case Enter():
                self._enter(move, caches[move.sequence])
            case Leave():
                self._leave(move, caches[move.sequence])
            case Share():
                self._share(move, caches[move.sequence])
            case MakeContiguous():
                caches[move.sequence].make_contiguous()

    def _enter(self, move: Enter, cache: SequenceCache) -> None:
        own: list[tuple[mx.array, ...]] = []
        suffix, copied = cache.suffix(), runs_between(cache.leased, move.begin, cache.offset)
        for index in range(len(cache.token_layers) if move.tokens else 0):
            parts = [run.layer(index) for run in copied] + suffix[index : index + 1]
            own += zip(*parts, strict=True)
        self._batch.put(move.slot, move.seat, own, cache.non_trimmable)
        cache.slot = move.slot
        cache.set_layers([])
        self.sequences[move.slot] = cache

    def _leave(self, move: Leave, cache: SequenceCache) -> None:
        whole = self._batch.non_trimmable_of(move.slot, cache.offset)
        own = [
            tuple(mx.contiguous(in_one(parts)) for parts in layer)
            for layer in self._batch.newest_of(move.slot, move.tokens)
        ]
        # Slices that are not evaluated would make the next write a copy of all rows.
        mx.eval(flat_arrays([layer.state for layer in whole]), own)
        layers = self._layout.layers(cache.leased, whole)
        # Last: a failure before it leaves the sequence in the batch, which is lost then.
        self.close(cache)
        cache.set_layers(layers)
        for layer, tensors in zip(cache.token_layers, own, strict=bool(own)):
            layer.begin_suffix(tensors)

    def _share(self, move: Share, cache: SequenceCache) -> None:
        if cache.slot is None or self.own is None:
            raise ValueError("a row shares tokens of layers that keep all, and has no such")
        held = cache.offset - self.own.length(cache.slot)
        if move.begin >= held:
            self.own.shorten(cache.slot, move.tokens)
            return
        copied = runs_between(cache.leased, move.begin, held)
        layers = [
            zip(*[run.layer(index) for run in copied], strict=True)
            for index in range(self._batch.token_layers)
        ]
        self.own.put_before(cache.slot, [parts for layer in layers for parts in layer])

    # -- steps -------------------------------------------------------------------------

    def step(self, model: Any, call: Call, tokens: mx.array) -> mx.array:
        """Give rows of the batch a token each, after the call's moves.

        Args:
            model: mlx-lm's.
            call: its plan.
            tokens: `[B]`, in the order of its slots.

        Returns:
            `[B, V]` logits, not yet evaluated.
        """
        if call.regroups:
            shared = [
                (runs_of(self.sequences[slots[0]].leased[start:stop]), slots)
                for slots, start, stop in call.groups
            ]
            self._batch.read(shared, len(self.sequences))
        self.groups = call.groups
        offsets = [self.sequences[slot].offset for slot in call.slots]
        new = call.regroups or bool(call.moves)
        return self._batch.step(model, tokens, list(call.slots), offsets, new=new)

    @property
    def _batch(self) -> BatchCache:
        if self.batch is None:
            raise ValueError("this model's sequences are not in a batch")
        return self.batch

    @staticmethod
    def _check(cache: SequenceCache) -> None:
        if cache.is_lost:
            raise StateLostError("a step failed under the sequence, and its state is lost")

    def _regroup(self) -> None:
        self.groups = None
        if self.batch is not None:
            self.batch.forget_prefixes()


def _beginning(parts: TokenParts, tokens: int) -> TokenParts:
    """The first tokens of a tensor in parts, without a copy."""
    found, left = [], tokens
    for part in parts:
        if left > 0:
            found.append(part[..., :left, :])
        left -= part.shape[-2]
    return found
