"""The prefix cache: what of a prompt is known, who leases it, and what becomes part of the tries.

Restore rules (all layers aligned to one offset, or none):

- a stack of token-addressable layers only resumes at any offset; a match that ends inside an
  edge splits it there;
- a stack with sliding or recurrent layers resumes at the deepest checkpoint at or before the
  match, or at the match itself where a later checkpoint rewinds to it;
- what is on disk only is not restored: the pager brings it back before a request begins;
- at least one token of the prompt is always left to compute.

What is restored from is pinned from match to close. What matches beyond it is not: a request that
computes these tokens again has them itself, and must not keep a second copy from being evicted.
"""

from collections.abc import Container
from typing import NamedTuple

from .checkpoints import Reason
from .errors import CacheError
from .forest import Forest, Layout, Namespace
from .lease import Lease
from .ledger import Kind, Ledger, Size
from .node import Tokens, TrieNode, has_checkpoint, size_in_memory
from .record import Record
from .state import Checkpoint, Span
from .trie import RadixTrie

# Checkpoints for these reasons are resumed at by other requests.
_SHARED = (Reason.JUNCTION, Reason.SYSTEM, Reason.HINT)
_REWIND_SEARCH = 32  # nodes below a match that are looked at for a checkpoint that rewinds


class Missing(NamedTuple):
    """State that is on disk only.

    Attributes:
        nodes: whose it is, parents first.
        holder: of the checkpoint that would be restored; None where none would.
    """

    nodes: list[TrieNode]
    holder: TrieNode | None

    def records(self, node: TrieNode) -> list[Record]:
        """The files that one of the nodes is read from."""
        records = [extent.record for extent in node.extents] if node.span is None else []
        if (
            node is self.holder
            and node.checkpoint is None
            and node.persisted_checkpoint is not None
        ):
            records.append(node.persisted_checkpoint)
        return records


class Known(NamedTuple):
    """How much of a prompt is in memory.

    Attributes:
        tokens: from the first one on.
        cached: of these, what a request would restore.
        idle: what a lease on it would hold, and none does yet.
    """

    tokens: int
    cached: int
    idle: Size


class PrefixCache(Forest):
    """A model's tries, and the leases on them. Belongs to the MLX thread.

    Args:
        layout: what the model's state consists of.
        budget: bytes that stored state may take; what is over it is evicted at close.
        checkpoints_kept: checkpoints that one request may leave behind.
        grid: requests resume at multiples of this many tokens only.
        longest: tokens up to which neighbours are joined: what is joined is copied.
        ledger: where all state is entered.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        budget: int,
        checkpoints_kept: int = 4,
        grid: int = 1,
        longest: int = 1 << 62,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(layout, ledger=ledger)
        self.budget = budget
        self.grid = grid
        self.longest = longest
        self._checkpoints_kept = checkpoints_kept
        self._leases: dict[Lease, RadixTrie] = {}

    def begin(self, namespace: Namespace, prompt: Tokens) -> Lease:
        """Match a prompt, split where it resumes, and lease the path.

        Raises:
            CacheError: the prompt is empty.
        """
        if not len(prompt):
            raise CacheError("an empty prompt has nothing to match")
        trie = self.open_trie(namespace)
        node, matched = trie.match(prompt)
        offset, holder = self._resumes_at(node, self._in_memory(node, matched), len(prompt))
        resume = self._cut(trie, node, offset)
        # Both lie on one path, so that the deeper one pins the other too.
        deepest = holder if holder is not None and holder.end > resume.end else resume
        checkpoint = None if holder is None else holder.checkpoint
        lease = Lease(
            prompt,
            matched,
            resume,
            deepest,
            checkpoint,
            release=self._release,
            store=self._publish,
            checkpoints_kept=self._checkpoints_kept,
            account=self.ledger.account(Kind.CHECKPOINT),
        )
        self._leases[lease] = trie
        trie.root.pins += 1  # which keeps the trie, also while nothing is in it
        for pinned in deepest.path():
            pinned.pins += 1
        self._refresh(resume, holder)
        return lease

    def leases(self, trie: RadixTrie | None = None) -> list[Lease]:
        """The open leases, of one trie or of all."""
        return [lease for lease, its in self._leases.items() if trie is None or its is trie]

    @property
    def splits(self) -> int:
        """Changes when spans that a lease has given out may have been cut."""
        return sum(trie.splits for trie in self._tries.values())

    def known(self, namespace: Namespace, tokens: Tokens) -> Known:
        """How much of a prompt is in memory. Refreshes nothing."""
        trie = self._tries.get(namespace)
        if trie is None:
            return Known(0, 0, Size())
        node, matched = trie.match(tokens)
        in_memory = self._in_memory(node, matched)
        cached, holder = self._resumes_at(node, in_memory, len(tokens))
        return Known(in_memory, cached, _idle(node, cached, holder))

    # -- restoring ---------------------------------------------------------------------

    def _resumes_at(self, node: TrieNode, matched: int, length: int) -> tuple[int, TrieNode | None]:
        """Say where a prompt resumes, and with whose checkpoint.

        Args:
            node: the deepest that it matches.
            matched: its tokens that are there to be restored.
            length: all of its tokens.
        """
        limit = self._limit(matched, length)
        if not self.layout.checkpoints:
            return limit, None
        holder = self._holder(node, limit)
        return (0 if holder is None else min(holder.end, limit)), holder

    def _limit(self, matched: int, length: int) -> int:
        """The last offset of a match at which a prompt may resume: something is left to compute."""
        return max(0, min(matched, length - 1)) // self.grid * self.grid

    def _in_memory(self, node: TrieNode, matched: int) -> int:
        """How many of the matched tokens have their state in memory."""
        if not self.layout.spans:
            return matched
        return min([matched, *(n.start for n in node.path() if n.span is None)])

    def missing(self, trie: RadixTrie, prompt: Tokens, unreadable: Container[int] = ()) -> Missing:
        """Say which state a prompt could be restored from if it were in memory.

        Args:
            trie: where.
            prompt: all of its tokens.
            unreadable: ids of files that are as good as not there.
        """
        node, matched = trie.match(prompt)
        limit = self._limit(matched, len(prompt))
        path, holder = _readable(node.path(), unreadable), None
        if self.layout.checkpoints:
            whole = (n for n in reversed(path) if n.end <= limit and has_checkpoint(n))
            holder = next((n for n in whole if _restorable(n, unreadable)), None)
            path = path[: path.index(holder) + 1] if holder is not None else []
        nodes = [n for n in path if n.paged_out and n.start < limit]
        if holder is not None and holder.checkpoint is None and holder not in nodes:
            nodes.append(holder)
        return Missing(nodes, holder)

    def _holder(self, node: TrieNode, limit: int) -> TrieNode | None:
        """Find the checkpoint that restores the deepest offset at or before `limit`."""
        if not limit:
            return None
        before = (n for n in reversed(node.path()) if n.checkpoint is not None and n.end <= limit)
        best = next(before, None)
        if best is not None and best.end == limit:
            return best
        return _rewindable(node, limit) or best

    def _cut(self, trie: RadixTrie, node: TrieNode, offset: int) -> TrieNode:
        """Make `offset`, on the path of `node`, a node's end; return that node."""
        while node.start >= offset and node.parent is not None:
            node = node.parent
        return trie.split(node, offset) if node.end > offset else node

    def _refresh(self, resume: TrieNode, holder: TrieNode | None) -> None:
        """Refresh what a request resumes at, and nothing above it."""
        tick = self._next_tick()
        if resume.parent is not None:
            resume.last_used = tick
        if holder is not None:
            holder.checkpoint_used = tick

    # -- closing -----------------------------------------------------------------------

    def _release(self, lease: Lease, tokens: Tokens | None, span: Span | None) -> None:
        trie = self._leases.pop(lease)
        trie.root.pins -= 1
        for pinned in lease.deepest.path():
            pinned.pins -= 1
        trie.prune(lease.deepest)
        try:
            if tokens is not None:
                self._check_handover(trie, lease, tokens, span)
                given, span = span, None  # it changes hands, whatever happens next
                self._store(trie, lease, tokens, given)
        finally:
            lease.drop_captured()
            if span is not None:
                span.close()
            self.evict(self.budget)

    def _publish(self, lease: Lease, tokens: Tokens, span: Span | None) -> None:
        trie = self._leases[lease]
        self._check_handover(trie, lease, tokens, span)
        self._insert(trie, tokens, lease.held, span)
        shared = [
            item
            for item in lease.captured
            if item.reason in _SHARED and item.checkpoint.offset <= len(tokens)
        ]
        tick = self._next_tick()
        for item in shared:
            lease.captured.remove(item)
            self._attach(trie, tokens, item.checkpoint, tick)
        end = self._cut(trie, trie.match(tokens).node, len(tokens))
        for pinned in end.path():
            pinned.pins += 1
        for pinned in lease.deepest.path():
            pinned.pins -= 1
        end.last_used = tick
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
        self._insert(trie, tokens, lease.held, span)
        tick = self._next_tick()
        while lease.captured:
            self._attach(trie, tokens, lease.captured.pop().checkpoint, tick)
        leaf = trie.prune(trie.match(tokens).node)
        leaf.last_used = tick
        self._compact(trie, leaf)

    def _insert(self, trie: RadixTrie, tokens: Tokens, start: int, span: Span | None) -> None:
        """Add what the trie lacks of `tokens`; `span` is the state of `tokens[start:]`."""
        node, known = trie.match(tokens)
        if known == len(tokens):
            if span is not None and known < node.end and node.span is None:
                node = trie.split(node, known)
            self._revive(trie, node, start, span)
            return
        if known < node.end:
            node = trie.split(node, known)
        span = self._revive(trie, node, start, span)
        trie.append(node, tokens[known:].copy(), span)

    def _revive(
        self, trie: RadixTrie, node: TrieNode, start: int, span: Span | None
    ) -> Span | None:
        """Give nodes that are on disk only what was computed again; return what is left.

        Args:
            trie: where.
            node: the last one whose tokens `span` may have.
            start: offset of the span's first token; a node starts there, or later.
            span: its last tokens, after the node's, are left.
        """
        for had in node.path():
            if span is None or had.end <= start:
                continue
            own, rest = span, None
            if span.length > had.end - start:
                own, rest = span.split(had.end - start)
            if had.span is None:
                trie.set_span(had, own)
            else:
                own.close()
            start, span = had.end, rest
        return span

    def _attach(self, trie: RadixTrie, tokens: Tokens, checkpoint: Checkpoint, tick: int) -> None:
        """Put a checkpoint where it belongs, if the trie reaches that far."""
        node, known = trie.match(tokens[: checkpoint.offset])
        if not 0 < checkpoint.offset == known:
            checkpoint.close()
            return
        if known < node.end:
            node = trie.split(node, known)
        node.checkpoint_used = tick
        trie.set_checkpoint(node, checkpoint)

    def _compact(self, trie: RadixTrie, node: TrieNode) -> None:
        """Join small neighbours without siblings, so that paths stay short.

        A node joins its parent when that is at most twice its size: sizes then grow
        geometrically and a token is copied O(log n) times, not once a turn. Both are in
        memory then: the leaf was just used, and its parents are where it is.
        """
        parent = node.parent
        while (
            parent is not None
            and parent.parent is not None
            and len(parent.children) == 1
            and not has_checkpoint(parent)
            and (parent.span is None) == (node.span is None)
            and not parent.pins  # so neither is the node: a lease lies on all of its path
            and len(parent.tokens) <= 2 * len(node.tokens)
            and len(parent.tokens) + len(node.tokens) <= self.longest
        ):
            node = trie.merge(parent)
            parent = node.parent


def _readable(path: list[TrieNode], unreadable: Container[int]) -> list[TrieNode]:
    """Cut a path where a node's tokens are on disk only, and cannot be read."""
    for number, node in enumerate(path):
        if node.span is None and any(p.record.id in unreadable for p in node.extents):
            return path[:number]
    return path


def _restorable(node: TrieNode, unreadable: Container[int]) -> bool:
    """Whether a node's checkpoint is in memory, or in a file that can be read."""
    record = node.persisted_checkpoint
    return node.checkpoint is not None or (record is not None and record.id not in unreadable)


def _idle(node: TrieNode, offset: int, holder: TrieNode | None) -> Size:
    """What a lease that resumes at an offset would hold, and none does yet."""
    idle = Size()
    end = offset if holder is None else max(offset, holder.end)
    deepest = node if holder is None or node.end > holder.end else holder
    for held in deepest.path():
        if held.pins or held.start >= end:
            continue
        size = size_in_memory(held)
        if held.end > end:  # it is cut there
            size = Size(size.nbytes * (end - held.start) // len(held.tokens), size.buffers)
        idle += size
    return idle


def _rewindable(node: TrieNode, limit: int) -> TrieNode | None:
    """Find a checkpoint beyond `limit`, on the matched edge or below, that rewinds to it."""
    pending, seen = [node], 0
    while pending and seen < _REWIND_SEARCH:
        candidate = pending.pop()
        seen += 1
        checkpoint = candidate.checkpoint
        if candidate.end > limit and checkpoint is not None and checkpoint.rewinds_to(limit):
            return candidate
        pending.extend(candidate.children.values())
    return None
