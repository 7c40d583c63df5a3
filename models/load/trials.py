"""Sequences to try a loaded model out with. Their prefixes are computed once."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from ..errors import UnsupportedCacheError
from ..kv.checkpoints import PackedCheckpoint, in_order
from ..kv.layout import CacheLayout
from ..kv.placement import Placement
from ..kv.sequence_cache import SequenceCache
from ..kv.spans import PackedSpan

_MANY = 18  # with one token more: a prefix that CUDA's products are slow for
_PREFIX = (*(1, 2, 3, 4) * _MANY, 5)
_OTHER = (*(4, 3, 1, 1) * _MANY, 2)
_CUTS = (1 << 20, 25)  # tokens of a chunk: a prompt at once, and in a few pieces

MARGIN = 4.0
"""Times its own rounding by which a model's result may differ: both are means of few draws."""

_ROUNDINGS, _SMALL = 100.0, 1e-3
"""Up to `_SMALL` of the spread, a result may differ by `_ROUNDINGS` times the model's own rounding.

Another order of summation rounds otherwise than another chunk does. A lost state differs by more.
"""


class Trial(NamedTuple):
    """Three sequences: two lease a prefix, one does not.

    Attributes:
        prefix: the first tokens of the first two.
        own: the own tokens of each.
        decoded: tokens that they decode, by step.
    """

    prefix: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    decoded: tuple[tuple[int, ...], ...]

    def prompts(self) -> list[tuple[int, ...]]:
        """All tokens of each before the first that is decoded."""
        first, second, third = self.own
        return [self.prefix + first, self.prefix + second, third]


PROBED = Trial(_PREFIX, ((6, 7, 8), (9,), (2, 9, 4)), ((3, 4, 5), (6, 7, 8)))
"""Its longest prompt has 25 times as many tokens as its shortest."""

NEIGHBOURS = (
    # Other tokens for each row's neighbours: as many, so that shapes stay.
    (0, Trial(_PREFIX, ((6, 7, 8), (5,), (7, 3, 3)), ((3, 9, 1), (6, 2, 4)))),
    (2, Trial(_OTHER, ((5, 2, 9), (8,), (2, 9, 4)), ((8, 1, 5), (2, 9, 8)))),
)


class Outcome(NamedTuple):
    """Logits of some sequences, and their state afterwards.

    Attributes:
        logits: `[..., rows, V]`.
        states: arrays of each sequence, layers first.
    """

    logits: mx.array
    states: list[mx.array]


class Difference(NamedTuple):
    """Mean difference of two outcomes.

    Attributes:
        logits: as a share of their greatest standard deviation in a row.
        states: of the layer that differs most, as a share of its standard deviation.
    """

    logits: float
    states: float

    def within(self, rounding: "Difference") -> bool:
        """True if rounding explains it; a difference that is not a number is never explained."""
        pairs = zip(self, rounding, strict=True)
        return all(differs <= allowed(own) for differs, own in pairs)


_Prefix = tuple[int, Sequence[PackedSpan], PackedCheckpoint | None]
"""Computed tokens that sequences begin with; see `CacheLayout.open`."""


class Trials:
    """Tries a model out.

    Attributes:
        model: mlx-lm's.
        layout: of its layers.
    """

    def __init__(self, model: Any, layout: CacheLayout) -> None:
        self.model = model
        self.layout = layout
        self._prefixes: dict[tuple[int, ...], _Prefix] = {}

    def prefilled(self, trial: Trial) -> list[SequenceCache]:
        """Sequences of a trial after their prompts. The first two lease the prefix."""
        prefix = self._computed(trial.prefix)
        caches = [*[self.layout.open(*prefix) for _ in range(2)], self.layout.open()]
        for cache, tokens in zip(caches, trial.own, strict=True):
            self.forward(cache, tokens)
        return caches

    def forward(self, cache: SequenceCache, tokens: Sequence[int]) -> mx.array:
        """Advance a sequence; its logits, `[1, tokens, V]`."""
        logits: mx.array = self.model(mx.array([tokens]), cache=cache.layers)
        cache.add_tokens(len(tokens))

        mx.eval(logits, cache.arrays())
        return logits

    @cached_property
    def alone(self) -> Outcome:
        """Outcome of `PROBED` where its sequences decode one by one; logits `[steps, rows, V]`."""
        caches = self.prefilled(PROBED)
        steps = [
            [self.forward(s, [t])[:, -1] for t, s in zip(tokens, caches, strict=True)]
            for tokens in PROBED.decoded
        ]
        logits = mx.stack([mx.concatenate(rows) for rows in steps])
        return Outcome(logits, states_of(caches))

    @cached_property
    def rounding(self) -> Difference:
        """Difference of the model from itself: the tokens of `PROBED` computed in other chunks.

        It is at least the precision of a single number. In bf16 a near-tie of two experts makes it
        a fifth of the spread.
        """
        steps, answers = len(PROBED.decoded), zip(*PROBED.decoded, strict=True)
        own = [len(tokens) + steps for tokens in PROBED.own]
        whole = [[*p, *decoded] for p, decoded in zip(PROBED.prompts(), answers, strict=True)]
        found = [Difference(*[_epsilon(self.alone)] * 2)]
        for cut in _CUTS:
            ends, caches = [], []
            for tokens in whole:
                cache = self.layout.open()
                parts = [
                    self.forward(cache, tokens[start : start + cut])[0]
                    for start in range(0, len(tokens), cut)
                ]
                ends.append(mx.concatenate(parts)[-steps:])
                caches.append(cache)
            states = states_of(caches, own)
            found.append(difference(Outcome(mx.stack(ends, axis=1), states), self.alone))
        return Difference(*map(largest, zip(*found, strict=True)))

    def _computed(self, tokens: tuple[int, ...]) -> _Prefix:
        """Compute a prefix, once.

        Raises:
            UnsupportedCacheError: a layer does not keep what its cache is for.
        """
        if tokens not in self._prefixes:
            cache = self.layout.open()
            self.forward(cache, tokens)
            if any(layer.offset != len(tokens) for layer in cache.token_layers):
                raise UnsupportedCacheError(
                    "the model has a cache for a layer that never writes to it, and umbel cannot "
                    "serve such a model"
                )
            checkpoint = cache.capture() if self.layout.has_checkpoints else None
            span = cache.suffix_span()
            spans = [] if span is None else [span]
            self._prefixes[tokens] = cache.offset, spans, checkpoint
        return self._prefixes[tokens]


def states_of(
    caches: Sequence[SequenceCache],
    last: Sequence[int] | None = None,
    placement: Placement | None = None,
) -> list[mx.array]:
    """Take the state of sequences, in the order of their tokens, layers first in each array.

    Args:
        caches: of the sequences, which do not continue.
        last: number of each one's newest tokens; None for all after the leased ones.
        placement: of sequences in a batch.
    """
    states: list[mx.array] = []
    for number, cache in enumerate(caches):
        checkpoint = cache.capture() if placement is None else placement.capture(cache)
        for layer in checkpoint.restore_all(cache.offset):
            recurrent = isinstance(layer, ArraysCache)
            states += [a for a in layer.cache if a is not None] if recurrent else in_order(layer)
        span = cache.suffix_span() if placement is None else placement.suffix_span(cache)
        packed = [] if span is None else span.arrays
        states += packed if last is None else [a[..., -last[number] :, :] for a in packed]
    mx.eval(states)
    return states


def allowed(rounding: float) -> float:
    """The largest difference that a model's own rounding explains."""
    return max(MARGIN * rounding, min(_ROUNDINGS * rounding, _SMALL))


def difference(outcome: Outcome, expected: Outcome) -> Difference:
    """Compare an outcome with the expected one."""
    pairs = zip(outcome.states, expected.states, strict=True)
    return Difference(
        deviation(outcome.logits, expected.logits),
        largest(_of_states(*pair) for pair in pairs if _is_float(pair[0])),
    )


def largest(values: Iterable[float]) -> float:
    """The largest value, 0 of none; a NaN is larger than any."""
    return float(np.max([0.0, *values]))


def deviation(logits: mx.array, expected: mx.array) -> float:
    """The mean difference of logits `[..., V]`, as a share of their greatest deviation in a row."""
    expected = expected.astype(mx.float32)
    spread = mx.sqrt(mx.var(expected, axis=-1)).max()
    return float(mx.abs(logits.astype(mx.float32) - expected).mean() / spread)


def _of_states(state: mx.array, expected: mx.array) -> float:
    """The mean difference of the layer that differs most, as a share of its own deviation."""
    layers = expected.shape[0]
    expected = expected.astype(mx.float32).reshape(layers, -1)
    differs = mx.abs(state.astype(mx.float32).reshape(layers, -1) - expected).mean(axis=-1)
    spread = mx.sqrt(mx.var(expected, axis=-1))
    return float(mx.where(differs == 0, 0.0, differs / spread).max())


def _is_float(array: mx.array) -> bool:
    """False for the packed integers of quantised keys: their scales are compared."""
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _epsilon(outcome: Outcome) -> float:
    arrays = [array for array in (outcome.logits, *outcome.states) if _is_float(array)]
    return max(float(mx.finfo(array.dtype).eps) for array in arrays)
