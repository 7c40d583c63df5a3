"""A sequence's hold on a path of the trie, from match to close."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from .checkpoints import Captured, Reason, keep
from .errors import LeaseClosedError
from .ledger import Account, Size
from .node import Tokens, TrieNode
from .state import Checkpoint, Span

Store = Callable[["Lease", Tokens, Span | None], None]
Release = Callable[["Lease", Tokens | None, Span | None], None]


class Lease:
    """What a request was given of the cache, and what it has captured since.

    A context manager; closing is idempotent. While it is open, its path is neither
    evicted nor merged. It copies nothing: the spans are the trie's own.

    Attributes:
        total: tokens of the prompt.
        matched: tokens of it that the trie recognised.
        cached: tokens whose state it restores; never the whole prompt.
        held: tokens whose spans it holds; more than `cached` once it has published.
        captured: checkpoints that the request has taken and that are worth keeping so far.
        deepest: the deepest node that it retains, or the root.
        base: the lease on the shared prompt that its own path follows, if it follows one.
        checkpoints_kept: how many checkpoints it may still leave behind.
    """

    def __init__(
        self,
        prompt: Tokens,
        matched: int,
        resume: TrieNode,
        deepest: TrieNode,
        checkpoint: Checkpoint | None,
        *,
        base: "Lease | None",
        release: Release,
        store: Store,
        checkpoints_kept: int,
        account: Account,
    ) -> None:
        self.total = len(prompt)
        self.matched = matched
        self.cached = self.held = resume.end
        self.captured: list[Captured] = []
        self.deepest = deepest
        self.base = base
        self._checkpoint = checkpoint
        self.checkpoints_kept = checkpoints_kept
        self._resume = resume
        self._release = release
        self._store = store
        self._account = account
        self._open = True

    @property
    def open(self) -> bool:
        """Whether it still holds its path."""
        return self._open

    @property
    def left(self) -> int:
        """Tokens of the prompt that are left to compute."""
        return self.total - self.cached

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The whole state to restore from, for stacks that need one.

        It may stand beyond `cached` if it rewinds to it.

        Raises:
            LeaseClosedError: the lease was closed.
        """
        self._check()
        return self._checkpoint

    def spans(self) -> list[Span]:
        """The spans of `[0, held)`, in order. A split of its path changes the list.

        Raises:
            LeaseClosedError: the lease was closed.
        """
        self._check()
        before = [] if self.base is None else self.base.spans()
        return before + [node.span for node in self._resume.path() if node.span is not None]

    def capture(self, checkpoint: Checkpoint, reason: Reason) -> None:
        """Remember a checkpoint until close. Takes ownership.

        No more are held at a time than may be left behind: a long prompt or answer would
        otherwise hold dozens that are dropped in the end.

        Raises:
            LeaseClosedError: the lease was closed; the checkpoint is closed too.
        """
        if not self._open:
            checkpoint.close()
        self._check()
        self.captured, dropped = keep(
            [*self.captured, Captured(checkpoint, reason)], self.checkpoints_kept
        )
        for item in dropped:
            item.checkpoint.close()
        self.count()

    def count(self) -> None:
        """Enter in the ledger what is captured now."""
        held = Size()
        for item in self.captured:
            held += Size(item.checkpoint.nbytes, item.checkpoint.buffers)
        self._account.set(held)

    def publish(self, tokens: Tokens, span: Span | None) -> None:
        """Store what was computed so far, for others to lease, and hold it from there on.

        Takes ownership of `span`. Checkpoints that others are likely to need are stored too.

        Args:
            tokens: all tokens that were computed, from the first of the prompt on.
            span: their token-addressable state from `held` on, if the stack has such.

        Raises:
            LeaseClosedError: the lease was closed.
            CacheError: as from `close`; the lease stays as it was.
        """
        self._check()
        self._store(self, tokens, span)

    def moved(self, resume: TrieNode, stored: int) -> None:
        """Note where the path ends now, and how many checkpoints have been stored."""
        self._resume = self.deepest = resume
        self.held = resume.end
        self._checkpoint = None  # restored long since, and not retained any more
        self.checkpoints_kept -= stored
        self.count()

    def give_one_up(self) -> bool:
        """Close the captured checkpoint that is worth least; False if there is none."""
        self.captured, dropped = keep(self.captured, len(self.captured) - 1)
        for item in dropped:
            item.checkpoint.close()
        self.count()
        return bool(dropped)

    def drop_captured(self) -> None:
        """Close what was captured and has not been stored."""
        try:
            while self.captured:
                self.captured.pop().checkpoint.close()
        finally:
            self._account.close()

    def close(self, tokens: Tokens | None = None, span: Span | None = None) -> None:
        """Give back the path, and hand over what was computed.

        Takes ownership of `span`. Without `tokens` nothing is kept, captured checkpoints
        included: so ends a request whose state cannot be trusted.

        Args:
            tokens: all tokens that were computed, from the first of the prompt on.
            span: their token-addressable state from `cached` on, if the stack has such.

        Raises:
            CacheError: `span` is not as long as the tokens that were computed, or the tokens
                are not those that were leased. The lease is closed, and nothing is kept.
        """
        if not self._open:
            if span is not None:
                span.close()
            return
        self._open = False
        self._release(self, tokens, span)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self) -> None:
        if not self._open:
            raise LeaseClosedError("the lease was closed")
