"""Masks of tokens, computed beside the step that they are for."""

from concurrent.futures import Future, ThreadPoolExecutor, wait

from ..models.errors import MatcherError
from ..models.params import Grammar, Mask, Matcher

_THREADS = 2
_PATIENCE = 10.0  # seconds that a step waits for a mask. Computing one is bounded to much less


class MaskPool:
    """Threads that follow grammars while a step is computed: one mask for each running sequence."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="masks")

    def constrain(self, grammar: Grammar) -> "Constraint":
        """Begin an answer, and the mask of its first token."""
        return Constraint(grammar.matcher(), self._threads)


class Constraint:
    """An answer's place in its grammar. Belongs to the MLX thread."""

    def __init__(self, matcher: Matcher, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._threads = threads
        self._next: Future[Mask | None] = threads.submit(self._look)

    @property
    def mask(self) -> "Mask | None":
        """The tokens that the next one is chosen from; None if only the end can follow.

        Waits for it. Raises `TimeoutError`, or `MatcherError` if it cannot be found.
        """
        try:
            return self._next.result(_PATIENCE)
        except TimeoutError:
            raise TimeoutError(f"the grammar's mask took over {_PATIENCE:g} s") from None

    def is_known(self, timeout: float) -> bool:
        """Return True if the mask is known within `timeout` seconds."""
        return bool(wait([self._next], timeout).done)

    def take(self, token: int, *, ends: bool) -> None:
        """Go on behind a token, and begin the next mask, unless the token `ends` the answer.

        Raises:
            MatcherError: it is not allowed: the model gave no probability to any that is.
        """
        mask = self.mask
        if mask is None or not mask[token // 32] >> token % 32 & 1:
            raise MatcherError("the model gives no probability to any token that may follow")
        if not ends:
            self._next = self._threads.submit(self._follow, token)

    def _follow(self, token: int) -> "Mask | None":
        self._matcher.consume(token)
        return self._look()

    def _look(self) -> "Mask | None":
        return None if self._matcher.is_complete else self._matcher.mask()
