"""Sequences to try a loaded model out with. What they begin with is computed once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..kv.alignment import FEW
from ..kv.layout import CacheLayout
from ..kv.packed import PackedCheckpoint, PackedSpan, pack_suffix
from ..kv.sequence_cache import SequenceCache
from ..kv.token_layer import in_parts

_MANY = FEW // 4 + 2  # with one token more: on CUDA there is a product, and a token beside it
_PREFIX = (*(1, 2, 3, 4) * _MANY, 5)
_OTHER = (*(4, 3, 1, 1) * _MANY, 2)
_NEXT = 5  # a token


class Trial(NamedTuple):
    """Three sequences: two lease a prefix, one does not.

    Attributes:
        prefix: tokens that the first two begin with.
        own: what each of them has of its own.
        decoded: tokens that they decode, by step.
    """

    prefix: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    decoded: tuple[tuple[int, ...], ...]

    def prompts(self) -> list[tuple[int, ...]]:
        """All tokens of each before the first that is decoded."""
        first, second, third = self.own
        return [self.prefix + first, self.prefix + second, third]


PROBED = Trial(_PREFIX, ((6, 7, 8), (9,), (2, 9, 4, 1)), ((3, 4, 5), (6, 7, 8)))
NEIGHBOURS = (
    # What each row's neighbours could hold instead: as many tokens, so that shapes stay.
    (0, Trial(_PREFIX, ((6, 7, 8), (5,), (7, 3, 3, 8)), ((3, 9, 1), (6, 2, 4)))),
    (2, Trial(_OTHER, ((5, 2, 9), (8,), (2, 9, 4, 1)), ((8, 1, 5), (2, 9, 8)))),
)


class _Computed(NamedTuple):
    """The state of a sequence, from which others go on.

    Attributes:
        offset: its tokens.
        leased: the first of them.
        checkpoint: what is not token-addressable, if anything is.
        suffix: what comes after those that are leased, if anything does.
    """

    offset: int
    leased: tuple[PackedSpan, ...]
    checkpoint: PackedCheckpoint | None
    suffix: PackedSpan | None


class Trials:
    """Tries a model out.

    Attributes:
        model: mlx-lm's.
        layout: of its layers.
    """

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        self.model = model
        self.layout = layout
        self._begun: dict[tuple[int, ...], _Computed] = {}
        self._computed: dict[tuple[Any, ...], list[_Computed]] = {}
        self._alone: mx.array | None = None

    def prefilled(self, trial: Trial) -> list[SequenceCache]:
        """Sequences of a trial after their prompts; those who share a prefix lease it.

        All that are returned for the same prompts have the same state, and may change it.
        """
        key = (trial.prefix, trial.own)
        if key not in self._computed:
            self._computed[key] = [self._taken(cache) for cache in self._prefill(trial)]
        return [self._continued(computed) for computed in self._computed[key]]

    def forward(self, cache: SequenceCache, tokens: Sequence[int]) -> mx.array:
        """Advance a sequence; its logits, `[1, tokens, V]`."""
        logits: mx.array = self.model(mx.array([tokens]), cache=cache.layers)
        cache.advanced(len(tokens))
        mx.eval(logits, cache.arrays())
        return logits

    def next_logits(self, caches: Sequence[SequenceCache]) -> mx.array:
        """The logits of one token more of each, which show what its state is worth; `[rows, V]`."""
        return mx.concatenate([self.forward(cache, [_NEXT])[:, -1] for cache in caches])

    def alone(self) -> mx.array:
        """What `PROBED` gives where its sequences decode one by one, `[steps, rows, V]`."""
        if self._alone is None:
            caches = self.prefilled(PROBED)
            steps = [
                [self.forward(s, [t])[:, -1] for t, s in zip(tokens, caches, strict=True)]
                for tokens in PROBED.decoded
            ]
            self._alone = mx.stack([mx.concatenate(rows) for rows in steps])
        return self._alone

    def _prefill(self, trial: Trial) -> list[SequenceCache]:
        prefix = self._begin(trial.prefix)
        caches = [self._continued(prefix), self._continued(prefix), self.layout.open()]
        for each, tokens in zip(caches, trial.own, strict=True):
            self.forward(each, tokens)
        return caches

    def _begin(self, prefix: tuple[int, ...]) -> _Computed:
        """Compute a prefix, once, and have it leased by whoever goes on from it."""
        if prefix not in self._begun:
            cache = self.layout.open()
            self.forward(cache, prefix)
            checkpoint = self._checkpoint_of(cache)
            spans = tuple(cache.take_packed())
            self._begun[prefix] = _Computed(cache.offset, spans, checkpoint, None)
        return self._begun[prefix]

    def _taken(self, cache: SequenceCache) -> _Computed:
        checkpoint, suffix = self._checkpoint_of(cache), cache.suffix()
        # Packed: a slice would keep all of a cache's room.
        packed = pack_suffix(in_parts(suffix)) if suffix else None
        return _Computed(cache.offset, tuple(cache.leased), checkpoint, packed)

    def _checkpoint_of(self, cache: SequenceCache) -> PackedCheckpoint | None:
        return cache.capture() if self.layout.has_checkpoints else None

    def _continued(self, computed: _Computed) -> SequenceCache:
        cache = self.layout.open(computed.offset, computed.leased, computed.checkpoint)
        if computed.suffix is not None:
            for index, layer in enumerate(cache.token_layers):
                layer.begin_suffix(computed.suffix.layer(index))
        return cache


def deviation(logits: mx.array, expected: mx.array) -> float:
    """The mean difference of logits `[..., V]`, as a share of their greatest deviation in a row."""
    expected = expected.astype(mx.float32)
    spread = mx.sqrt(mx.var(expected, axis=-1)).max()
    return float(mx.abs(logits.astype(mx.float32) - expected).mean() / spread)
