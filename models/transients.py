"""What computing takes in memory besides state: fitted once, and learned where that was too low."""

from dataclasses import dataclass, field

SMALL = 2**16
"""Bytes that are reserved besides, for arrays of a few numbers."""

UNBROKEN = 1 << 30
"""Tokens of a block where attention is not computed in blocks."""

UNFORESEEN = 1.25
"""What is reserved, as a multiple of what was measured."""

_MOST = 8.0
"""What is reserved at most, as a multiple of what was fitted, whatever a chunk took."""


@dataclass
class _Excess:
    """What chunks of about one size took more than was fitted.

    Attributes:
        nbytes: of the one that took the most more.
        share: of what was fitted, of the one that took the most more by this.
    """

    nbytes: float = 0.0
    share: float = 0.0

    def of(self, fitted: float) -> float:
        """What one of another size would take more: its share, and no more bytes than these."""
        return min(self.nbytes, self.share * fitted)


@dataclass
class Transients:
    """Bytes that computing takes besides the state, and gives back.

    Fitted to chunks at load. Where one takes more later, what is smaller is taken to need more by
    the same share, and what is larger by the same bytes: a short chunk that took three times what
    was fitted says nothing of that kind about one that takes a hundred times as much.

    Attributes:
        base: of any chunk.
        token: of each token more.
        context: of each token that they look at, themselves included.
        pair: of each token and each that it looks at: scores that are not fused away.
        block: tokens of a chunk that look at a time.
    """

    base: float
    token: float
    context: float
    pair: float
    block: int = UNBROKEN
    _seen: dict[int, _Excess] = field(default_factory=dict, init=False, repr=False)
    """By powers of two of what was fitted."""

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
        """What it may take more, by what was seen."""
        return max((excess.of(fitted) for excess in self._seen.values()), default=0.0)

    def unreserved(self, tokens: int, context: int) -> float:
        """What was fitted, in bytes, with nothing besides for what was learned or is unforeseen.

        Args:
            tokens: of the chunk.
            context: tokens before these.
        """
        each = self.context + self.pair * min(tokens, self.block)
        return self.base + self.token * tokens + each * (context + tokens) + SMALL
