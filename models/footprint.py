"""What a model's state takes in memory, and what computing takes besides. Measured at load."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

from .blocks import BLOCK
from .device import DevicePolicy
from .layer_states import Held, LayerStack, LiveStates, flat_arrays
from .measured import key_of, measured_once
from .runtime import peak_of
from .spans import PackedSpan

GROWTH = 256
"""Tokens by which mlx-lm's caches grow."""

_FEW, _MORE, _CONTEXT = 32, 128, 1024  # tokens of the probe's chunks, and before them
_MANY = 2 * BLOCK  # tokens of a chunk, and before it, that show whether it is cut into blocks
_MOST = 4 * BLOCK  # tokens of a chunk that show what is not cut though attention is
_TIMES, _QUICK = 3, 0.1  # runs of a probe, while they take less than so many seconds
_LOGIT_COPIES = 4  # logits, scaled logits, probabilities and their order
_UNFORESEEN = 1.25  # what is set aside over what was measured
_SMALL = 2**16  # bytes that are set aside besides, for arrays of a few numbers
_NOISE = 1.05  # by which a peak may differ from the next of the same chunk
_FORMAT = 3  # of what is kept


class Ring(NamedTuple):
    """A layer that keeps the newest tokens.

    Attributes:
        token: bytes of a token.
        window: tokens that it keeps.
        spare: tokens that it has room for besides, always.
    """

    token: int
    window: int
    spare: int = 0

    def nbytes(self, tokens: int, chunk: int) -> int:
        """Bytes after `tokens`, of which `chunk` were the last ones.

        A ring holds a chunk more than its window while one is computed. A single token is
        written in place, for which a ring that is not full makes room in advance.
        """
        room = GROWTH if chunk == 1 else 0
        return self.token * (min(tokens + room, self.window + chunk) + self.spare)


@dataclass(frozen=True)
class StateSizes:
    """Bytes of one sequence's state.

    Attributes:
        token: of each token, in all token-addressable layers together.
        rings: the sliding layers.
        fixed: of recurrent layers, however many tokens they have seen.
        arrays: how many arrays a running sequence has of its own.
    """

    token: int
    rings: tuple[Ring, ...]
    fixed: int
    arrays: int

    def whole(self, tokens: int, chunk: int = 1) -> int:
        """Bytes of sliding and recurrent layers after `tokens`; `chunk` were the last ones."""
        return sum(ring.nbytes(tokens, chunk) for ring in self.rings) + self.fixed

    def tail(self, tokens: int) -> int:
        """Bytes of the token-addressable layers' tails of this many tokens, spare room included."""
        return self.token * (tokens + GROWTH)


@dataclass
class Transients:
    """Bytes that computing takes besides the state, and gives back.

    Fitted to chunks at load, and raised when more was seen.

    Attributes:
        base: of any chunk.
        token: of each token more.
        context: of each token that they look at, themselves included.
        pair: of each token and each that it looks at: scores that are not fused away.
        block: tokens of a chunk that look at a time.
        within: of each pair of its own tokens, in chunks longer than those that the figures
            above are fitted to: masks that a model makes of a whole chunk, and scores of layers
            that look no further.
        margin: what is set aside, as a multiple of what was fitted.
    """

    base: float
    token: float
    context: float
    pair: float
    block: int = 1 << 30
    within: float = 0.0
    margin: float = _UNFORESEEN

    def expected(self, tokens: int, context: int) -> int:
        """Foretell a chunk's peak, in bytes, over what was there before or stays after it."""
        return int(self.margin * self._fitted(tokens, context))

    def promised(self, tokens: int, context: int) -> int:
        """Foretell it as if nothing had been learned since the model was loaded."""
        return int(_UNFORESEEN * self._fitted(tokens, context))

    def observe(self, tokens: int, context: int, measured: int) -> None:
        """Learn from a chunk's peak."""
        fitted = self._fitted(tokens, context)
        if fitted > 0:
            self.margin = max(self.margin, min(_UNFORESEEN * measured / fitted, 8.0))

    def _fitted(self, tokens: int, context: int) -> float:
        each = self.context + self.pair * min(tokens, self.block)
        within = self.within * max(0, tokens - _MORE) ** 2
        return self.base + self.token * tokens + each * (context + tokens) + within + _SMALL


class Footprint:
    """What a model needs to run. All methods foretell; nothing is allocated.

    Attributes:
        sizes: of one sequence's state.
        least_chunk: tokens of a prompt that are computed at once, however short memory is.

    Args:
        sizes: measured.
        transients: measured; learns on.
        vocab_size: logits of a row.
        joins: sequences read all of their keys in one piece, a copy of what they lease.
        multiple: of rows, that every decode step computes with.
    """

    def __init__(
        self,
        sizes: StateSizes,
        transients: Transients,
        vocab_size: int,
        *,
        joins: bool,
        multiple: int = 1,
    ) -> None:
        self.sizes = sizes
        self.least_chunk = _FEW
        self._transients = transients
        self._logits = _LOGIT_COPIES * 4 * vocab_size
        self._joins = joins
        self._multiple = multiple

    def chunk(self, tokens: int, states: LiveStates) -> Held:
        """What prefilling so many more tokens takes at its peak."""
        offset, tail = states.offset, states.tail_length
        layers = max(1, self.sizes.arrays // 2)
        grown = self.sizes.tail(tokens) + self.sizes.token * tail // layers
        whole = self.sizes.whole(offset + tokens, tokens)  # the old one goes when this is there
        return Held(
            grown + whole + self._transients.expected(tokens, offset), 2 * self.sizes.arrays
        )

    def captured(self, tokens: int) -> Held:
        """What a copy of the whole states takes after so many tokens, packed."""
        kept = sum(ring.token * min(tokens, ring.window) for ring in self.sizes.rings)
        return Held(kept + self.sizes.fixed, self.sizes.arrays)

    def observe(self, tokens: int, offset: int, peak: int) -> None:
        """Learn from a chunk's peak."""
        self._transients.observe(tokens, offset, peak)

    def compute(self, rows: int, offset: int) -> int:
        """Bytes that a decode step computes with, besides all state.

        Args:
            rows: of the step.
            offset: the most tokens that one of them looks at.
        """
        rows = self._rounded(rows)
        return self._transients.expected(rows, offset) + rows * self._logits

    def gathered(self, rows: int) -> int:
        """Bytes of recurrent layers whose states a step replaces for all rows together."""
        return self._rounded(rows) * self.sizes.fixed

    def _rounded(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def start(self, tokens: int, context: int) -> Held:
        """What a sequence takes until its first answer tokens are there, a short step included.

        Args:
            tokens: that it has to compute.
            context: tokens of its prompt, the restored ones included.
        """
        few = self.least_chunk
        return self._started(tokens, context, self._transients.expected(few, context))

    def promise(self, context: int) -> Held:
        """The same for a sequence of which nothing is known: the figure that does not change.

        What was admitted by it is served, whatever has been learned of transients since.
        """
        few = self.least_chunk
        return self._started(context, context, self._transients.promised(few, context))

    def _started(self, tokens: int, context: int, computing: int) -> Held:
        few = self.least_chunk
        copy = self.sizes.tail(context) if self._joins else 0
        own = self.sizes.tail(tokens + GROWTH)
        # A step makes new whole states beside the old ones.
        own += self.sizes.whole(context, few) + self.sizes.whole(context)
        own += self.gathered(1)
        return Held(own + copy + computing + _FEW * self._logits, 2 * self.sizes.arrays)

    def longest_context(self, budget: int) -> int:
        """The most tokens of prompt and answer that a budget can hold, alone; 0 for none."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.promise(middle).nbytes <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def measure(
    stack: LayerStack,
    feed: Any,
    device: DevicePolicy,
    vocab_size: int,
    *,
    joins: bool,
    multiple: int,
    folder: Path | None = None,
    of: Iterable[Any] = (),
) -> Footprint:
    """Measure a loaded model; see `measure_sizes`, `measure_transients` and `Footprint`.

    Args:
        stack: the model's.
        feed: called with token ids and live states, advances the states over them.
        device: how it is run.
        vocab_size: logits of a row.
        joins: see `Footprint`.
        multiple: see `Footprint`.
        folder: where what varies is kept for later starts; None measures it now.
        of: what names the model there.
    """
    sizes = measure_sizes(stack, feed)
    if folder is None:
        transients = measure_transients(stack, feed, device)
    else:
        key = key_of(_FORMAT, getattr(mx, "__version__", ""), *of, device, joins, multiple, sizes)
        names = {field.name for field in fields(Transients)}
        kept = measured_once(
            folder, key, names, lambda: asdict(measure_transients(stack, feed, device))
        )
        shape = kept["base"], kept["token"], kept["context"], kept["pair"]
        transients = Transients(*shape, int(kept["block"]), kept["within"], kept["margin"])
    return Footprint(sizes, transients, vocab_size, joins=joins, multiple=multiple)


def measure_sizes(stack: LayerStack, feed: Any) -> StateSizes:
    """Compute a few tokens and look at what their state takes.

    Args:
        stack: the model's.
        feed: called with token ids and live states, advances the states over them.
    """
    states = stack.open()
    feed([1, 2, 3, 4], states)
    token = sum(_per_token((leaf.keys, leaf.values)) for leaf in states.addressable)
    rings, fixed = [], 0
    for leaf in states.wholes:
        held = flat_arrays(leaf.state)
        if isinstance(leaf, ArraysCache):
            fixed += sum(array.nbytes for array in held)
        else:
            each = _per_token((leaf.keys, leaf.values))
            if isinstance(leaf, ChunkedKVCache):
                rings.append(Ring(each, leaf.chunk_size, spare=GROWTH))
            else:
                rings.append(Ring(each, leaf.max_size))
    return StateSizes(token, tuple(rings), fixed, states.held().buffers)


def measure_transients(stack: LayerStack, feed: Any, device: DevicePolicy) -> Transients:
    """Compute short and longer chunks, at the start and after a context, and fit the peaks."""

    def peak(tokens: int, context: int) -> int:
        return _highest(stack, feed, tokens, context)

    probes = [(tokens, context) for context in (0, _CONTEXT) for tokens in (_FEW, _MORE)]
    peaks = np.array([peak(*probe) for probe in probes], float)
    seen = [tokens + context for tokens, context in probes]
    features = [[1, n, c, n * c] for (n, _), c in zip(probes, seen, strict=True)]
    solved = np.linalg.solve(np.array(features, float), peaks)
    base, token, context, pair = np.maximum(solved, 0).tolist()
    together = Transients(base, token, context, pair)
    if device.fused:
        return together
    in_blocks = Transients(base, token, context, pair, block=BLOCK)
    # Some models bring an attention, or scores, of their own: of all of a chunk together. If some
    # of their layers only do, the peak lies between, and grows with the chunk like the larger.
    fitted = in_blocks.promised(_MANY, _MANY) / _UNFORESEEN
    chosen = together if peak(_MANY, _MANY) > _NOISE * fitted else in_blocks
    fitted, seen_most = chosen.promised(_MOST, 0) / _UNFORESEEN, peak(_MOST, 0)
    if seen_most > _NOISE * fitted:
        chosen.within = (seen_most - fitted + _SMALL) / (_MOST - _MORE) ** 2
    return chosen


def _highest(stack: LayerStack, feed: Any, tokens: int, context: int) -> int:
    """Run a probe until its peak is the highest it can be, or nearly.

    A buffer is free once the operation that reads it has run. How many have not depends on how
    far launching is ahead of computing. It is as far as can be where an operation takes longer
    than its launch; where it does not, that varies by a fifth, and a run takes no time.
    """
    begun, peaks = time.perf_counter(), list[int]()
    while not peaks or (len(peaks) < _TIMES and time.perf_counter() - begun < _QUICK):
        peaks.append(_peak(stack, feed, tokens, context))
    return max(peaks)


def _peak(stack: LayerStack, feed: Any, tokens: int, context: int) -> int:
    states = _after(stack, feed, context)
    _, peak = peak_of(lambda: feed([1] * tokens, states))
    return peak


def _after(stack: LayerStack, feed: Any, context: int) -> LiveStates:
    """Make states that have a context to look at, which nobody needs to compute."""
    first = stack.open()
    if not context:
        return first
    feed([1, 2], first)
    span = first.seal()
    if span is None:
        return first
    arrays = [mx.zeros((*a.shape[:2], context, a.shape[3]), a.dtype) for a in span.arrays]
    mx.eval(arrays)
    return stack.open(context, [PackedSpan(arrays, span.places)])


def _per_token(pair: Iterable[Any]) -> int:
    return sum(array.nbytes // array.shape[-2] for array in flat_arrays(tuple(pair)))
