"""Prefix cache of one model: leases on paths of its tries, and the state that becomes part of them.

`restoration` decides where a prompt resumes. The path up to there is retained from match to close.
State matched beyond it is not: a request that computes these tokens again has its own copy, and
must not keep a second one from being evicted.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from .checkpoints import Captured, Reason, keep
from .compaction import compact
from .errors import CacheError, LeaseClosedError
from .evict import Evictor
from .governor import MemoryPool
from .ledger import Account, Kind, Size
from .node import Tokens, TrieNode
from .restoration import Known, Missing, Restoration
from .shared_prompts import SharedPrompts
from .spans import size_of
from .state import Checkpoint, Layout, Span
from .trie import RadixTrie, attach, insert, node_at
from .tries import CacheStatistics, Namespace, Tries, describe

Store = Callable[["Lease", Tokens, Span | None], None]
Release = Callable[["Lease", Tokens | None, Span | None], None]


class Lease:
    """State of the cache that a request holds, and the checkpoints that it has captured.

    A context manager; closing is idempotent. While it is open, its path is neither evicted nor
    merged. It copies nothing: the spans are the trie's own.

    Attributes:
        total: tokens of the prompt.
        matched: tokens of it that the trie recognised.
        cached: tokens whose state it restores; never the whole prompt.
        held: tokens whose spans it holds; more than `cached` once it has published.
        deepest: the deepest node that it retains, or the root.
        base: lease on the shared prompt that its own path follows, if any.
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
        """The whole state to restore from, if the stack needs one; a LeaseClosedError after close.

        It may stand beyond `cached` if it rewinds to it.
        """
        self._check()
        return self._checkpoint

    def spans(self) -> list[Span]:
        """The spans of `[0, held)`, in order; a LeaseClosedError after close.

        A split of its path changes the list.
        """
        self._check()
        before = [] if self.base is None else self.base.spans()
        return before + [node.span for node in self._resume.path() if node.span is not None]

    def capture(self, checkpoint: Checkpoint, reason: Reason) -> None:
        """Keep a checkpoint until close. Takes ownership, also if it raises LeaseClosedError.

        It holds no more at a time than it may leave behind: a long prompt or answer would otherwise
        hold dozens that are dropped in the end.
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
        self._account.set(size_of(*(item.checkpoint for item in self.captured)))

    def publish(self, tokens: Tokens, span: Span | None) -> None:
        """Store what was computed so far, for others to lease, and hold it from there on.

        Takes ownership of `span`, the state of all computed `tokens` from `held` on. Checkpoints
        that others are likely to need are stored too.

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

        Takes ownership of `span`, the state of all computed `tokens` from `cached` on. Without
        `tokens` nothing is kept, captured checkpoints included: for a request whose state cannot be
        trusted.

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


SHARED = (Reason.JUNCTION, Reason.SYSTEM, Reason.HINT)
"""Checkpoints for these reasons are resumed at by other requests."""


class PrefixCache:
    """A model's tries, and the leases on them. Belongs to the MLX thread.

    Args:
        layout: of the model's state.
        budget: bytes that stored state may take; excess is evicted when a lease closes.
        checkpoints_kept: checkpoints that one request may leave behind.
        grid: requests resume at multiples of this many tokens only.
        longest: tokens up to which neighbours are joined, by a copy.
        pool: shared with other models; one of its own, if None.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        budget: int,
        checkpoints_kept: int = 4,
        grid: int = 1,
        longest: int = 1 << 62,
        pool: MemoryPool | None = None,
    ) -> None:
        self.layout = layout
        self.pool = MemoryPool() if pool is None else pool
        self.ledger = self.pool.ledger
        self.tries = Tries(layout, self.ledger)
        self.pool.tries.append(self.tries)
        self.evictor = Evictor(self.tries, self.pool)
        self.shared = SharedPrompts(self.tries, self.evictor)
        self.budget = budget
        self.grid = grid
        self.longest = longest
        self._restoration = Restoration(layout, grid)
        self._checkpoints_kept = checkpoints_kept
        self._leases: dict[Lease, RadixTrie] = {}

    def begin(self, namespace: Namespace, prompt: Tokens) -> Lease:
        """Match a prompt, split where it resumes, and lease the path.

        Raises:
            CacheError: the prompt is empty.
        """
        if not len(prompt):
            raise CacheError("an empty prompt has nothing to match")
        shared = self.shared.find(namespace, prompt)
        if shared is None:
            trie = self.tries.open(namespace)
        else:
            trie = self.tries.open(shared.namespace(namespace), shared.tokens)
        base = None if shared is None else shared.lease
        point = self._restoration.resume_point(trie, prompt)
        holder, resume = point.holder, node_at(trie, point.node, point.offset)
        # Both lie on one path, so that the deeper one retains the other too.
        deepest = holder if holder is not None and holder.end > resume.end else resume
        if holder is None:
            checkpoint = None if base is None else base.checkpoint
        else:
            checkpoint = holder.checkpoint
        lease = Lease(
            prompt,
            point.matched,
            resume,
            deepest,
            checkpoint,
            base=base,
            release=self._release,
            store=self._publish,
            checkpoints_kept=self._checkpoints_kept,
            account=self.ledger.account(Kind.CHECKPOINT),
        )
        trie.retain(deepest)  # and the root, which keeps the trie while nothing is in it
        self._leases[lease] = trie
        try:
            self._touch(trie, resume, holder)
        except BaseException:
            lease.close()
            raise
        return lease

    def leases(self) -> dict[Lease, RadixTrie]:
        """The open leases, each with the trie that it is on."""
        return self._leases.copy()

    def known(self, namespace: Namespace, tokens: Tokens) -> Known:
        """How much of a prompt is in memory. Refreshes nothing."""
        trie = self.trie_of(namespace, tokens)
        if trie is not None:
            return self._restoration.known(trie, tokens)
        shared = self.shared.find(namespace, tokens)
        common = 0 if shared is None else len(shared.tokens)
        return Known(common, common, Size())

    def trie_of(self, namespace: Namespace, prompt: Tokens) -> RadixTrie | None:
        """The trie that has what is known of a prompt beyond what is shared, if there is one."""
        shared = self.shared.find(namespace, prompt)
        return self.tries.get(namespace if shared is None else shared.namespace(namespace))

    def missing(self, trie: RadixTrie, prompt: Tokens, unreadable: Container[int] = ()) -> Missing:
        """State that a prompt could be restored from if read; see `Restoration.missing`."""
        return self._restoration.missing(trie, prompt, unreadable)

    def refresh(self, trie: RadixTrie, node: TrieNode) -> None:
        """Have all of a node's state count as just used."""
        tick = self.pool.recency.next()
        trie.touch(node, tick)
        trie.touch_checkpoint(node, tick)

    def close(self) -> None:
        """Give all memory back, and leave the pool. What is on disk stays there."""
        self.evictor.evict(0, 0)
        for trie in self.tries:  # of which a disk that does not answer still has something
            trie.spans.abandon()
            trie.checkpoints.close()
        self.pool.tries.remove(self.tries)

    def statistics(self, tenant: str | None = None) -> CacheStatistics:
        """Describe the tries of a tenant, or of all for None."""
        tries = [trie for name, trie in self.tries.items() if tenant in (None, name.tenant)]
        gone, left = self.evictor.evictions, self.evictor.page_outs
        return describe(tries, evictions=gone, page_outs=left)

    def _touch(self, trie: RadixTrie, resume: TrieNode, holder: TrieNode | None) -> None:
        tick = self.pool.recency.next()
        if resume.parent is not None:
            trie.touch(resume, tick)
        if holder is not None:
            trie.touch_checkpoint(holder, tick)

    # -- closing -----------------------------------------------------------------------

    def _release(self, lease: Lease, tokens: Tokens | None, span: Span | None) -> None:
        trie = self._leases.pop(lease)
        trie.release(lease.deepest)
        with ExitStack() as after:  # the last one first, each whatever the others raise
            after.callback(self.shared.settle)
            after.callback(self.evictor.evict, self.budget)
            after.callback(lease.drop_captured)
            with ExitStack() as unless_stored:
                if span is not None:
                    unless_stored.callback(span.close)
                trie.prune(lease.deepest)
                if tokens is None:
                    return
                self._check_handover(trie, lease, tokens, span)
                unless_stored.pop_all()  # it changes hands, whatever happens next
            self._store(trie, lease, tokens, span)

    def _publish(self, lease: Lease, tokens: Tokens, span: Span | None) -> None:
        trie = self._leases[lease]
        self._check_handover(trie, lease, tokens, span)
        insert(trie, tokens, lease.held, span)
        shared = [
            item
            for item in lease.captured
            if item.reason in SHARED and item.checkpoint.offset <= len(tokens)
        ]
        tick = self.pool.recency.next()
        for item in shared:
            lease.captured.remove(item)
            attach(trie, tokens, item.checkpoint, tick)
        end = node_at(trie, trie.match(tokens).node, len(tokens))
        trie.retain(end)
        trie.release(lease.deepest)
        trie.touch(end, tick)
        lease.moved(end, len(shared))

    def _check_handover(
        self, trie: RadixTrie, lease: Lease, tokens: Tokens, span: Span | None
    ) -> None:
        """Refuse what is not the state of these tokens, before it is in the trie."""
        fresh = max(0, len(tokens) - lease.held) if self.layout.spans else 0
        given = 0 if span is None else span.length
        if given != fresh:
            raise CacheError(f"a span of {given} tokens was handed over for {fresh} computed ones")
        # Without spans, published tokens after the last checkpoint are not kept.
        kept = lease.held if self.layout.spans else lease.cached
        if trie.match(tokens).length < min(kept, len(tokens)):
            raise CacheError("the tokens handed over are not those of the leased path")

    def _store(self, trie: RadixTrie, lease: Lease, tokens: Tokens, span: Span | None) -> None:
        insert(trie, tokens, lease.held, span)
        tick = self.pool.recency.next()
        while lease.captured:
            attach(trie, tokens, lease.captured.pop().checkpoint, tick)
        leaf = trie.prune(trie.match(tokens).node)
        trie.touch(leaf, tick)
        compact(trie, leaf, self.longest)
