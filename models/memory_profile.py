"""Memory of a model's state, and of computing besides. Pure figures."""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

GROWTH = 256
"""Tokens by which mlx-lm's caches grow."""

_FEW = 32  # tokens of a short chunk
_LOGIT_COPIES = 4  # logits, scaled logits, probabilities and their order


class Held(NamedTuple):
    """Size of something in memory.

    Attributes:
        nbytes: its bytes.
        buffers: its allocations.
    """

    nbytes: int
    buffers: int


class PlannedChunk(NamedTuple):
    """Tokens of a prompt that are computed at once.

    Attributes:
        tokens: how many.
        offset: tokens before them.
        suffix: those of them that the sequence has of its own.
    """

    tokens: int
    offset: int
    suffix: int


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
        layers: that are token-addressable.
    """

    token: int
    rings: tuple[Ring, ...]
    fixed: int
    arrays: int
    layers: int

    def non_trimmable(self, tokens: int, chunk: int = 1) -> int:
        """Bytes of sliding and recurrent layers after `tokens`; `chunk` were the last ones."""
        return sum(ring.nbytes(tokens, chunk) for ring in self.rings) + self.fixed

    def in_windows(self, tokens: int) -> int:
        """Bytes of what sliding layers keep of so many tokens, without room for more."""
        return sum(ring.token * min(tokens, ring.window) for ring in self.rings)

    def suffix(self, tokens: int) -> int:
        """Bytes of a suffix of so many tokens in caches of its own, spare room included."""
        return self.token * (tokens + GROWTH)

    @property
    def growth(self) -> int:
        """Bytes by which a suffix in caches of its own grows when it is full.

        What a layer grows by is made beside it, and then copied, layer by layer.
        """
        return self.token * GROWTH + self.one_layer(GROWTH)

    def one_layer(self, tokens: int) -> int:
        """Bytes of so many tokens in one token-addressable layer."""
        return self.token * tokens // max(1, self.layers)


SMALL = 2**16
"""Bytes that are reserved besides, for arrays of a few numbers."""

UNFORESEEN = 1.25
"""Reserved bytes, as a multiple of measured ones."""

_MOST = 8.0
"""Most reserved bytes, as a multiple of measured ones, however much a chunk took."""


@dataclass
class _Excess:
    """Excess of chunks of about one size over their estimate.

    Attributes:
        nbytes: of the one that took the most more.
        share: of what was measured, of the one that took the most more by this.
    """

    nbytes: float = 0.0
    share: float = 0.0

    def of(self, fitted: float) -> float:
        """Excess of a chunk of another size: its share, and no more bytes than these."""
        return min(self.nbytes, self.share * fitted)


@dataclass
class Transients:
    """Bytes that computing takes besides the state, and gives back: measured peaks, interpolated.

    Between two lengths a peak is on the line through theirs; after the longest one it also grows by
    the pairs of its tokens, if it did so before. In the context it is linear. If a chunk takes more
    later, a smaller chunk is expected to take more by the same share, and a larger one by the same
    bytes: a short chunk that took three times its estimate says little of one that takes a hundred
    times as much.

    Attributes:
        lengths: tokens of the measured chunks, ascending.
        near: peaks of these at the start of a prompt.
        far: peaks of these after a context.
        context: tokens of that context.
    """

    lengths: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...]
    context: int
    _seen: dict[int, _Excess] = field(default_factory=dict, init=False, repr=False)
    """By powers of two of what was measured."""

    def estimate(self, tokens: int, context: int) -> int:
        """Estimate a chunk's peak, in bytes, over what was there before or stays after it.

        Args:
            tokens: of the chunk.
            context: tokens before these.
        """
        fitted = self.unreserved(tokens, context)
        return int(min(UNFORESEEN * (fitted + self._excess(fitted)), _MOST * fitted))

    def worst_case(self, tokens: int, context: int) -> int:
        """Estimate it as if nothing had been learned since the model was loaded."""
        return int(UNFORESEEN * self.unreserved(tokens, context))

    def observe(self, tokens: int, context: int, measured: int) -> None:
        """Learn from the peak of a chunk."""
        fitted = self.unreserved(tokens, context)
        more = measured - fitted
        if more <= 0:
            return
        excess = self._seen.setdefault(int(fitted).bit_length(), _Excess())
        excess.nbytes = max(excess.nbytes, min(more, _MOST * fitted))
        excess.share = max(excess.share, min(more / fitted, _MOST))

    def _excess(self, fitted: float) -> float:
        """Excess that is expected after what was seen."""
        return max((excess.of(fitted) for excess in self._seen.values()), default=0.0)

    def unreserved(self, tokens: int, context: int) -> float:
        """Measured bytes, without a margin and without what was learned later.

        Args:
            tokens: of the chunk.
            context: tokens before these.
        """
        near, far = self._at(self.near, tokens), self._at(self.far, tokens)
        return near + max(0.0, far - near) * context / self.context + SMALL

    def _at(self, peaks: tuple[float, ...], tokens: int) -> float:
        """Interpolate peaks of the lengths."""
        lengths, slopes = self.lengths, self._slopes(peaks)
        if tokens <= lengths[0]:
            return max(peaks[0] - slopes[0] * (lengths[0] - tokens), peaks[0] * tokens / lengths[0])
        place = min(bisect_left(lengths, tokens), len(lengths) - 1)
        found = peaks[place] + slopes[place - 1] * (tokens - lengths[place])
        if tokens > lengths[-1]:
            found += self._of_pairs() * (tokens - lengths[-1]) * (tokens - lengths[-2])
        return found

    def _slopes(self, peaks: tuple[float, ...]) -> list[float]:
        """Bytes of a token more, from each length to the next."""
        return [
            (more - fewer) / (longer - shorter)
            for (shorter, fewer), (longer, more) in pairwise(zip(self.lengths, peaks, strict=True))
        ]

    def _of_pairs(self) -> float:
        """Bytes of each pair of tokens of a chunk: of scores, or of masks of the whole chunk.

        Scores are of all that a token looks at: they show in what a token takes after a context.
        """
        near, far = self._slopes(self.near), self._slopes(self.far)
        masks = 0.0
        if len(near) > 1:
            masks = (near[-1] - near[-2]) / (self.lengths[-1] - self.lengths[-3])
        return max(0.0, masks, (far[-1] - near[-1]) / self.context)


class MemoryProfile:
    """Memory that a model needs to run. All methods estimate; nothing is allocated.

    Attributes:
        sizes: of one sequence's state.
        least_chunk: tokens of a prompt that are computed at once, however short memory is.

    Args:
        sizes: measured.
        transients: measured; learns on.
        vocab_size: logits of a row.
        contiguous: sequences read all of their keys in one piece, a copy of what they lease.
        multiple: of rows, that every decode step computes with.
    """

    def __init__(
        self,
        sizes: StateSizes,
        transients: Transients,
        vocab_size: int,
        *,
        contiguous: bool,
        multiple: int = 1,
    ) -> None:
        self.sizes = sizes
        self.least_chunk = _FEW
        self._transients = transients
        self._logits = _LOGIT_COPIES * 4 * vocab_size
        self._contiguous = contiguous
        self._multiple = multiple

    def prefill(self, chunk: PlannedChunk, *, logits: int = 0) -> Held:
        """Peak of computing a chunk of a prompt.

        Args:
            chunk: of it.
            logits: tokens whose logits are computed, when all layers are and what these computed
                with is gone.
        """
        # The old states of recurrent and sliding layers go when the new ones are there.
        grown = (
            self.sizes.suffix(chunk.tokens)
            + self.sizes.one_layer(chunk.suffix)
            + self.sizes.non_trimmable(chunk.offset + chunk.tokens, chunk.tokens)
        )
        if self._contiguous and chunk.tokens == 1:
            grown += self.sizes.suffix(chunk.offset)
        computing = self._transients.estimate(chunk.tokens, chunk.offset)
        computing = max(computing, self.logits(logits))
        return Held(grown + computing, 2 * self.sizes.arrays)

    def kept(self, tokens: int) -> int:
        """Bytes of computed tokens once they are stored."""
        return self.sizes.token * tokens

    def captured(self, tokens: int) -> Held:
        """Size of a checkpoint after so many tokens."""
        return Held(self.sizes.in_windows(tokens) + self.sizes.fixed, self.sizes.arrays)

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
        return self._transients.estimate(rows, offset) + self.logits(rows)

    def logits(self, rows: int) -> int:
        """Bytes of so many rows' logits, and of what sampling makes of them."""
        return rows * self._logits

    def gathered(self, rows: int) -> int:
        """Bytes of recurrent layers whose states a step replaces for all rows together."""
        return self._rounded(rows) * self.sizes.fixed

    def put_together(self, rows: int, tokens: int) -> int:
        """Bytes of one layer's keys and values of all rows in one piece, and of the next one's."""
        return 2 * rows * self.sizes.one_layer(tokens)

    def _rounded(self, rows: int) -> int:
        return -(-rows // self._multiple) * self._multiple

    def start(self, tokens: int, context: int) -> Held:
        """Size of a sequence until its first answer tokens, a short step included.

        Args:
            tokens: that it has to compute.
            context: tokens of its prompt, the restored ones included.
        """
        few = self.least_chunk
        return self._started(tokens, context, self._transients.estimate(few, context))

    def worst_case(self, context: int) -> Held:
        """The same for a sequence of which nothing is known: the figure that does not change.

        What was admitted by it is served, whatever has been learned of transients since. A token
        takes a byte at least: a recurrent model's takes none, and a budget bounds its context too.
        """
        computing = self._transients.worst_case(self.least_chunk, context)
        return self._started(context, context, computing + context)

    def _started(self, tokens: int, context: int, computing: int) -> Held:
        few = self.least_chunk
        copy = self.sizes.suffix(context) if self._contiguous else 0
        own = self.sizes.suffix(tokens + GROWTH)
        # A step makes new states of recurrent and sliding layers beside the old ones.
        own += self.sizes.non_trimmable(context, few) + self.sizes.non_trimmable(context)
        own += self.gathered(1)
        return Held(own + copy + computing + _FEW * self._logits, 2 * self.sizes.arrays)

    def longest_context(self, budget: int) -> int:
        """The most tokens of prompt and answer that a budget can hold, alone; 0 for none."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.worst_case(middle).nbytes <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
