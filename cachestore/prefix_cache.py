"""Prefix cache of one model: leases on paths of its tries, and the state that becomes part of them.

`restoration` decides where a prompt resumes. The path up to there is retained until close. State
matched beyond it is not: the request computes these tokens again, and so has its own copy.
"""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import takewhile
from typing import Self

from .checkpoints import Captured, Reason, keep
from .compaction import compact
from .errors import CacheError, LeaseClosedError
from .evict import rewrite_longer_files
from .ledger import Kind, Size
from .node import Tokens, TrieNode
from .pins import Pins
from .pool import MemoryPool
from .restoration import Known, Restoration, ResumePoint
from .spans import size_of
from .state import Checkpoint, Layout, Span
from .trie import RadixTrie, attach, insert, node_at
from .tries import Namespace, Tries

SHARED = (Reason.JUNCTION, Reason.SYSTEM, Reason.HINT)
"""Checkpoints for these reasons are resumed at by other requests."""


class Lease:
    """State of the cache that a request holds, and the checkpoints that it has captured.

    A context manager; closing is idempotent, and all else raises a LeaseClosedError afterwards.
    While it is open, its path is neither evicted nor merged. The spans are the trie's own.
    """

    def __init__(
        self,
        cache: "PrefixCache",
        trie: RadixTrie,
        point: ResumePoint,
        total: int,
        base: "Lease | None",
    ) -> None:
        holder, resume = point.holder, node_at(trie, point.node, point.offset)
        self.trie = trie
        self.total = total  # tokens of the prompt
        self.matched = point.matched  # tokens of it that the trie recognised
        self.cached = resume.end  # tokens whose state it restores; never the whole prompt
        self.held = resume.end  # tokens whose spans it holds; more once it has published
        self.reached = resume.end  # the most that it has held, or was to hold
        # Both lie on one path, so that the deeper one retains the other too.
        self.deepest = holder if holder is not None and holder.end > resume.end else resume
        self.base = base  # lease on the shared prompt that its own path follows
        self.checkpoints_kept = cache.checkpoints_kept  # that it may still leave behind
        self.captured: list[Captured] = []
        self.resume = resume  # the node whose end it resumes at, or where it has published to
        self.open = True
        self._checkpoint = base.checkpoint if base is not None else None
        if holder is not None:
            self._checkpoint = holder.checkpoint
        self._cache = cache
        self._account = cache.ledger.account(Kind.CHECKPOINT)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The whole state that restores `cached`, perhaps by rewinding, if the stack needs one."""
        self._check()
        return self._checkpoint

    def spans(self) -> list[Span]:
        """The spans of `[0, held)`, in order; a split of the path changes the list."""
        self._check()
        before = [] if self.base is None else self.base.spans()
        return before + [node.span for node in self.resume.path() if node.span is not None]

    def capture(self, checkpoint: Checkpoint, reason: Reason) -> None:
        """Keep a checkpoint until close, the best ones of many. Takes ownership in any case."""
        if not self.open:
            checkpoint.close()
        self._check()
        self.captured.append(Captured(checkpoint, reason))
        self._keep(self.checkpoints_kept)

    def drop_one_checkpoint(self) -> bool:
        """Close the captured checkpoint that is worth least; False if there is none."""
        return self._keep(len(self.captured) - 1)

    def _keep(self, limit: int) -> bool:
        self.captured, dropped = keep(self.captured, limit)
        for item in dropped:
            item.checkpoint.close()
        self._count()
        return bool(dropped)

    def _count(self) -> None:
        self._account.set(size_of(*(item.checkpoint for item in self.captured)))

    def publish(self, tokens: Tokens, span: Span | None) -> None:
        """Store the state computed so far, for others to lease, and hold it from now on.

        Takes ownership of `span`, the state of all computed `tokens` from `held` on. Checkpoints
        that others are likely to need are stored too. A CacheError leaves the lease as it was.
        """
        self._check()
        self._check_handover(tokens, span)
        trie, tick = self.trie, self._cache.pool.tick()
        insert(trie, tokens, self.held, span)
        for item in list(self.captured):
            if item.reason in SHARED and item.checkpoint.offset <= len(tokens):
                self.captured.remove(item)
                self.checkpoints_kept -= 1
                attach(trie, tokens, item.checkpoint, tick)
        end = node_at(trie, trie.match(tokens).node, len(tokens))
        trie.touch(end, tick)
        self._hold(end)
        self._count()

    def shorten(self, offset: int) -> None:
        """Give back the path's nodes from `offset` on."""
        self._check()
        node = self.resume
        while node.start >= offset and node.parent is not None:
            node = node.parent
        if node is not self.resume:
            self._hold(node)

    def extend(self, tokens: Tokens) -> None:
        """Hold the path of `tokens`, which begin with its own, as far as that is in memory."""
        self._check()
        node, matched = self.trie.match(tokens)
        path = [held for held in node.path() if held.end <= matched]
        whole = list(takewhile(lambda held: held.span is not None, path))
        if whole and whole[-1].end > self.held:
            self._hold(whole[-1])

    def _hold(self, node: TrieNode) -> None:
        """End the path at another node. What was restored is not retained any more."""
        self.trie.retain(node)
        self.trie.release(self.deepest)
        self.resume = self.deepest = node
        self.held = node.end
        self.reached = max(self.reached, self.held)
        self._checkpoint = None

    def close(self, tokens: Tokens | None = None, span: Span | None = None) -> None:
        """Give back the path, and hand over the state computed.

        Takes ownership of `span`, the state of all computed `tokens` from `held` on. Without
        `tokens` nothing is kept: for a request whose state cannot be trusted.

        Raises:
            CacheError: `span` is not as long as the tokens that were computed, or the tokens
                are not those that were leased. The lease is closed, and nothing is kept.
        """
        if not self.open:
            if span is not None:
                span.close()
            return
        self.open = False
        cache, trie = self._cache, self.trie
        cache.leases.remove(self)
        trie.release(self.deepest)
        with ExitStack() as after:  # the last one first, each whatever the others raise
            after.callback(cache.pins.settle)
            after.callback(cache.evict, cache.budget)
            after.callback(self._drop_captured)
            with ExitStack() as unless_stored:
                if span is not None:
                    unless_stored.callback(span.close)
                trie.prune(self.deepest)
                if tokens is None:
                    return
                self._check_handover(tokens, span)
                unless_stored.pop_all()  # it changes hands, whatever happens next
            insert(trie, tokens, self.held, span)
            tick = cache.pool.tick()
            while self.captured:
                attach(trie, tokens, self.captured.pop().checkpoint, tick)
            leaf = trie.prune(trie.match(tokens).node)
            trie.touch(leaf, tick)
            compact(trie, leaf, cache.longest)

    def _drop_captured(self) -> None:
        try:
            while self.captured:
                self.captured.pop().checkpoint.close()
        finally:
            self._account.close()

    def _check_handover(self, tokens: Tokens, span: Span | None) -> None:
        has_spans = self._cache.layout.spans
        fresh = max(0, len(tokens) - self.held) if has_spans else 0
        given = 0 if span is None else span.length
        if given != fresh:
            raise CacheError(f"a span of {given} tokens was handed over for {fresh} computed ones")
        # Without spans, published tokens after the last checkpoint are not kept.
        kept = self.held if has_spans else self.cached
        if self.trie.match(tokens).length < min(kept, len(tokens)):
            raise CacheError("the tokens handed over are not those of the leased path")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if not self.open:
            raise LeaseClosedError("the lease was closed")


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
        self.restoration = Restoration(layout, grid)
        self.budget = budget
        self.checkpoints_kept = checkpoints_kept
        self.grid = grid
        self.longest = longest
        self.leases: set[Lease] = set()  # that are open
        self.pins = Pins(self)

    def begin(self, namespace: Namespace, prompt: Tokens) -> Lease:
        """Match a prompt, not empty, split where it resumes, and lease the path."""
        if not len(prompt):
            raise CacheError("an empty prompt has nothing to match")
        shared = self.pins.shared(namespace, prompt)
        trie = self.pins.trie(namespace, shared)
        point = self.restoration.resume_point(trie, prompt)
        lease = Lease(self, trie, point, len(prompt), shared.lease if shared else None)
        trie.retain(lease.deepest)  # and the root, which keeps the trie while nothing is in it
        self.leases.add(lease)
        try:
            tick = self.pool.tick()
            if lease.resume.parent is not None:
                trie.touch(lease.resume, tick)
            if point.holder is not None:
                trie.touch_checkpoint(point.holder, tick)
        except BaseException:
            lease.close()
            raise
        return lease

    def known(self, namespace: Namespace, tokens: Tokens) -> Known:
        """How much of a prompt is in memory. Refreshes nothing."""
        trie = self.trie_of(namespace, tokens)
        if trie is not None:
            return self.restoration.known(trie, tokens)
        shared = self.pins.shared(namespace, tokens)
        common = 0 if shared is None else len(shared.tokens)
        return Known(common, common, Size())

    def trie_of(self, namespace: Namespace, prompt: Tokens) -> RadixTrie | None:
        """The trie with what is known of a prompt beyond what is shared, if there is one."""
        shared = self.pins.shared(namespace, prompt)
        return self.tries.get(namespace._replace(base=shared.digest) if shared else namespace)

    def refresh(self, trie: RadixTrie, node: TrieNode) -> None:
        """Refresh all of a node's state."""
        tick = self.pool.tick()
        trie.touch(node, tick)
        trie.touch_checkpoint(node, tick)

    def evict(self, budget: int) -> None:
        """Page out or forget the oldest state until at most `budget` bytes are left, or leased."""
        self.pool.evict([self.tries], Size(budget, 1 << 62))

    def clear(self, wanted: Callable[[Namespace], bool] = lambda _: True) -> int:
        """Forget state without leases, on disk too; return how many tokens."""
        forgotten = 0
        for trie in [trie for namespace, trie in self.tries.items() if wanted(namespace)]:
            for node in reversed(list(trie.nodes())):
                if not (node.ref_count or node.children):
                    forgotten += len(node.tokens)
                    self.tries.evictions += 1
                    trie.shorten(node, node.start)
            trie.spans.trim()
            rewrite_longer_files(trie)
        self.tries.drop_empty()
        return forgotten

    def close(self) -> None:
        """Give all memory back, and leave the pool. What is on disk stays there."""
        self.pins.close()
        self.evict(0)
        for trie in self.tries:  # of which a disk that does not answer still has something
            trie.spans.abandon()
            trie.checkpoints.close()
        self.pool.tries.remove(self.tries)
