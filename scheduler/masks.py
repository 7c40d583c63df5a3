"""Masks of tokens, computed beside the step that they are for."""

from concurrent.futures import Future, ThreadPoolExecutor

from ..models.errors import MatcherError
from ..models.params import Grammar, Mask, Matcher

_THREADS = 2
_PATIENCE = 10.0
"""Seconds that a step waits for a mask. Computing one is bounded to much less."""


class MaskPool:
    """Threads that compute masks while the MLX thread, or the device, computes a step.

    It has at most one mask to compute for each sequence that runs.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="masks")

    def constrain(self, grammar: Grammar) -> "Constraint":
        """Begin an answer, and the mask of its first token."""
        return Constraint(grammar.matcher(), self._threads)


class Constraint:
    """Where one answer stands in its grammar. Belongs to the MLX thread.

    Attributes:
        mask: the tokens that the next one is chosen from, once it was waited for.
        is_complete: whether nothing but the end can follow.
    """

    def __init__(self, matcher: Matcher, threads: ThreadPoolExecutor) -> None:
        self.mask: Mask | None = None
        self.is_complete = False
        self._matcher = matcher
        self._threads = threads
        self._next: Future[Mask] = threads.submit(matcher.mask)

    def wait(self) -> None:
        """Have the mask of the next token.

        Raises:
            TimeoutError: it took too long.
            MatcherError: it cannot be computed.
        """
        try:
            self.mask = self._next.result(_PATIENCE)
        except TimeoutError:
            raise TimeoutError(f"the grammar's mask took over {_PATIENCE:g} s") from None

    def take(self, token: int, *, ends: bool) -> None:
        """Go on behind a token, and begin the mask of the one after it.

        Args:
            token: that was chosen with the last mask.
            ends: whether it is no part of the answer, but its end.

        Raises:
            MatcherError: it is not allowed: the model gave no probability to any that is.
        """
        if self.mask is None or not self.mask[token // 32] >> token % 32 & 1:
            raise MatcherError("the model gives no probability to any token that may follow")
        self.mask = None
        if ends:
            return
        self._matcher.consume(token)
        self.is_complete = self._matcher.is_complete
        if not self.is_complete:  # else the matcher is another thread's until the next wait
            self._next = self._threads.submit(self._matcher.mask)
