"""Measures what a loaded model's state and its computing take in memory."""

import time
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

from ..backends.base import Backend
from ..kv.layout import CacheLayout
from ..kv.sequence_cache import SequenceCache, flat_arrays
from ..kv.spans import PackedSpan, Storage
from ..memory_profile import GROWTH, MemoryProfile, Ring, StateSizes, Transients
from ..runtime import peak_of
from .measured import key_of, measured_once

# Tokens of measured chunks, and before them: from a block of attention to the next, and across the
# step of a recurrence. Where attention is one kernel, a chunk takes what its tokens take. How far
# launching is ahead of computing, and with it how much is not free yet, grows with the work of a
# chunk until it is ahead by a layer and more: short chunks say too little there.
_IN_BLOCKS, _BEFORE_BLOCKS = (33, 128, 256, 512), 1024
_FUSED, _BEFORE_FUSED = (33, 512), 2048
_AGAIN, _TIMES = 3, 12  # runs of a probe that see its highest peak, and in all
_QUICK = 0.2  # seconds of the processor for them
_SHORT = 0.1  # the same of a run whose operations take about as long as their launch
_FEWEST = 5  # runs of these: a busy machine makes them seem longer
_SLOW = 2.0  # seconds of one in which operations take far longer than their launch
_ALIKE = 0.98  # of the highest peak, that is as high
_FORMAT = 13  # of what is kept


def measure(
    layout: CacheLayout,
    prefill: Any,
    backend: Backend,
    vocab_size: int,
    *,
    contiguous: bool,
    multiple: int,
    folder: Path | None = None,
    of: Iterable[Any] = (),
) -> MemoryProfile:
    """Measure a loaded model; see `measure_sizes`, `measure_transients` and `MemoryProfile`.

    Args:
        layout: the model's.
        prefill: advances sequences; see `runner.prefill`.
        backend: how it is run.
        vocab_size: logits of a row.
        contiguous: see `MemoryProfile`.
        multiple: see `MemoryProfile`.
        folder: where the figures that vary are kept for later starts; None measures them now.
        of: the names of the model and of its backend there.
    """
    sizes = measure_sizes(layout, prefill)
    lengths, context = _probes(backend.block)
    names = [f"{tokens} after {before}" for before in (0, context) for tokens in lengths]

    def figures() -> dict[str, float]:
        found = measure_transients(layout, prefill, backend.block)
        return dict(zip(names, found.near + found.far, strict=True))

    versions = getattr(mx, "__version__", "")
    key = key_of(_FORMAT, versions, *of, contiguous, multiple, sizes)
    found = measured_once(folder, key, set(names), figures)
    peaks = tuple(found[name] for name in names)
    near, far = peaks[: len(lengths)], peaks[len(lengths) :]
    transients = Transients(lengths, near, far, context)
    return MemoryProfile(sizes, transients, vocab_size, contiguous=contiguous, multiple=multiple)


def _probes(block: int | None) -> tuple[tuple[int, ...], int]:
    """Tokens of the chunks that are measured, and of the context of the second ones."""
    return (_FUSED, _BEFORE_FUSED) if block is None else (_IN_BLOCKS, _BEFORE_BLOCKS)


def measure_sizes(layout: CacheLayout, prefill: Any) -> StateSizes:
    """Compute a few tokens and look at what their state takes.

    Args:
        layout: the model's.
        prefill: advances sequences; see `runner.prefill`.
    """
    cache = layout.open()
    prefill([1, 2, 3, 4], cache)
    token = sum(_per_token((layer.keys, layer.values)) for layer in cache.token_layers)
    rings, fixed = [], 0
    for layer in cache.non_trimmable:
        held = flat_arrays(layer.state)
        if isinstance(layer, ArraysCache):
            fixed += sum(array.nbytes for array in held)
        else:
            each = _per_token((layer.keys, layer.values))
            if isinstance(layer, ChunkedKVCache):
                rings.append(Ring(each, layer.chunk_size, spare=GROWTH))
            else:
                rings.append(Ring(each, layer.max_size))
    arrays, layers = cache.held().buffers, len(cache.token_layers)
    return StateSizes(token, tuple(rings), fixed, arrays, layers)


def measure_transients(layout: CacheLayout, prefill: Any, block: int | None) -> Transients:
    """Measure the peaks of short and longer chunks, at the start and after a context.

    Args:
        layout: the model's.
        prefill: advances sequences; see `runner.prefill`.
        block: tokens that attend at a time; None where attention is one kernel.
    """
    peak = Peaks(layout, prefill)
    lengths, context = _probes(block)
    near, far = (
        tuple(accumulate((float(peak(tokens, before)) for tokens in lengths), max))
        for before in (0, context)
    )
    return Transients(lengths, near, far, context)


class Peaks:
    """Computes chunks, and says what they take in memory beside their state.

    A buffer is free once the operation that reads it has run. How many have not depends on how
    far launching is ahead of computing. It is as far as can be where an operation takes longer
    than its launch; where it does not, that varies by a fifth, and a run takes no time.

    Args:
        layout: the model's.
        prefill: advances sequences; see `runner.prefill`.
    """

    def __init__(self, layout: CacheLayout, prefill: Any) -> None:
        self._layout = layout
        self._prefill = prefill
        self._like: PackedSpan | None = None  # of a few tokens

    def __call__(self, tokens: int, context: int) -> int:
        """Run a probe until its peak is the highest it can be, or nearly; in bytes.

        Args:
            tokens: of the chunk.
            context: tokens before it, whose state is made up and not computed.
        """
        # How long the first run takes says nothing: it may load kernels, or compile them.
        peaks = [self.once(tokens, context)]
        begun = time.process_time()  # a busy machine is no reason for fewer
        while True:
            started = time.monotonic()
            peaks.append(self.once(tokens, context))
            slow = time.monotonic() - started >= _SLOW
            spent, again = time.process_time() - begun, len(peaks) - 1
            enough = spent >= _QUICK and (again >= _FEWEST or spent >= _SHORT * again)
            if slow or enough or _settled(peaks):
                return max(peaks)

    def once(self, tokens: int, context: int) -> int:
        """The peak of one run; see `__call__`."""
        cache = self._after(context)
        # A buffer that MLX reuses may be two pages larger than what is asked for, and counts as
        # it is.
        mx.clear_cache()
        _, peak = peak_of(lambda: self._prefill([1] * tokens, cache))
        return peak

    def _after(self, context: int) -> SequenceCache:
        """Make a cache with a context to look at."""
        if not context:
            return self._layout.open()
        if self._like is None:
            cache = self._layout.open()
            self._prefill([1, 2], cache)
            self._like = cache.suffix_span()
            if self._like is None:
                return cache
        like = self._like
        arrays = [mx.zeros((*a.shape[:2], context, a.shape[3]), a.dtype) for a in like.arrays]
        mx.eval(arrays)
        return self._layout.open(context, [PackedSpan(Storage(arrays, like.places))])


def _settled(peaks: list[int]) -> bool:
    highest = sum(peak >= _ALIKE * max(peaks) for peak in peaks)
    return highest == _AGAIN or len(peaks) == _TIMES


def _per_token(pair: Iterable[Any]) -> int:
    return sum(array.nbytes // array.shape[-2] for array in flat_arrays(tuple(pair)))
