"""How many tokens of a prompt a step computes beside streams: a fit to the latest calls. Pure."""

import statistics
from collections import deque
from itertools import combinations

LEAST_TOKENS = 16  # shorter chunks cost more in overhead than they spare streams
_UNTRIED = 64  # tokens, before the first call was measured
_FURTHER = 4  # times the longest measured chunk: the fit is not trusted beyond
_SHARE = 0.8  # of the bound: a call takes longer than estimated about as often as shorter
_CALLS = 16


class PrefillPace:
    """Sizes prefill chunks so that sequences that decode wait no longer than a bound.

    A call takes a constant time, to read the weights, and a time for each token. Both are medians
    over pairs of calls (Theil-Sen), so that a call in which a kernel was compiled does not count.
    """

    def __init__(self, max_stall: float, limit: int) -> None:
        self.max_stall = max_stall  # the longest that one call may take beside streams, in seconds
        self.limit = limit  # tokens of the longest chunk
        self._calls: deque[tuple[int, float]] = deque(maxlen=_CALLS)
        self._fitted = (0.0, 0.0)  # kept: every step asks, few steps observe

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn how long a call of so many tokens took."""
        self._calls.append((tokens, seconds))
        self._fitted = self._fit()

    def prefill_tokens(self, beside: int) -> int:
        """Choose the length of the next chunk, beside so many sequences that decode.

        It is the whole limit if there are none. Else it is a multiple of `LEAST_TOKENS`, as lengths
        that come again need no new kernels, and at least that many, unless the limit is lower.
        """
        if not beside:
            return self.limit
        if not self._calls:
            return min(_UNTRIED, self.limit)
        (constant, each), bound = self._fitted, _SHARE * self.max_stall
        most = min(self.limit, _FURTHER * max(tokens for tokens, _ in self._calls))
        if constant + each * most > bound:
            most = int((bound - constant) / each) if each > 0 else LEAST_TOKENS
        if most >= self.limit:
            return self.limit
        return min(self.limit, max(LEAST_TOKENS, most // LEAST_TOKENS * LEAST_TOKENS))

    def _fit(self) -> tuple[float, float]:
        """Seconds of a call, and of each of its tokens; neither is negative."""
        slopes = [
            (later - earlier) / (more - fewer)
            for (fewer, earlier), (more, later) in combinations(self._calls, 2)
            if more != fewer
        ]
        ratio = statistics.median(seconds / tokens for tokens, seconds in self._calls)
        each = min(max(statistics.median(slopes), 0.0), ratio) if slopes else ratio
        rest = statistics.median(seconds - each * tokens for tokens, seconds in self._calls)
        return max(rest, 0.0), each
