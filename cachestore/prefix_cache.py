"""The prefix cache: the only writer of tries, leases and stored state.

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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .checkpoints import Reason
from .disk_index import Record
from .errors import CacheError
from .eviction import Victim, shortened, stored_victims, victims
from .lease import Lease
from .ledger import Kind, Ledger, Size
from .pieces import FileUse
from .state import Checkpoint, Span
from .trie import RadixTrie, Tokens, TrieNode, has_checkpoint, size_in_memory, size_of

_SHARED = (Reason.JUNCTION, Reason.SYSTEM)  # checkpoints that other requests resume at
_REWIND_SEARCH = 32  # nodes below a match that are looked at for a checkpoint that rewinds


class Namespace(NamedTuple):
    """Who may share state: requests of one tenant to one model.

    Attributes:
        tenant: see `daemon.tenants`.
        fingerprint: see `models.fingerprint`.
    """

    tenant: str
    fingerprint: str


@dataclass(frozen=True)
class Layout:
    """What a stack's state consists of.

    Attributes:
        spans: it has token-addressable layers.
        checkpoints: it has layers that restore only as a whole.
    """

    spans: bool
    checkpoints: bool


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
        records = [piece.record for piece in node.stored] if node.span is None else []
        if node is self.holder and node.checkpoint is None and node.stored_checkpoint is not None:
            records.append(node.stored_checkpoint)
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


@dataclass(frozen=True)
class CacheStatistics:
    """The tries' shape, all namespaces together. Sizes in bytes.

    Attributes:
        tokens: that are recognised.
        stored_tokens: of these, whose state is on disk (too).
        evictions: states that were forgotten.
        page_outs: states that were left to the disk.
    """

    namespaces: int = 0
    nodes: int = 0
    tokens: int = 0
    checkpoints: int = 0
    leases: int = 0
    span_bytes: int = 0
    checkpoint_bytes: int = 0
    stored_tokens: int = 0
    evictions: int = 0
    page_outs: int = 0


class PrefixCache:
    """All tries of one loaded model. Belongs to the MLX thread.

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
        self.layout = layout
        self.budget = budget
        self.grid = grid
        self.ledger = Ledger() if ledger is None else ledger
        self.files = FileUse()
        self.longest = longest
        self._checkpoints_kept = checkpoints_kept
        self._tries: dict[Namespace, RadixTrie] = {}
        self._leases: dict[Lease, RadixTrie] = {}
        self._tick = 0
        self._evictions = 0
        self._page_outs = 0

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
        for pinned in deepest.path():
            pinned.pins += 1
        self._refresh(resume, holder)
        return lease

    def open_trie(self, namespace: Namespace) -> RadixTrie:
        """The trie of a namespace, made if there is none."""
        if namespace not in self._tries:
            self._tries[namespace] = RadixTrie(self.ledger, self.files)
        return self._tries[namespace]

    def trie(self, namespace: Namespace) -> RadixTrie | None:
        """The trie of a namespace, to look at."""
        return self._tries.get(namespace)

    def tries(self) -> Iterator[tuple[Namespace, RadixTrie]]:
        """All tries, to look at. Those without nodes or leases are dropped."""
        yield from list(self._tries.items())

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

    @property
    def size(self) -> Size:
        """What all tries hold in memory."""
        held = Size()
        for trie in self._tries.values():
            held += trie.spans.size + trie.checkpoints.size
        return held

    @property
    def nbytes(self) -> int:
        """Bytes of all that the tries hold in memory."""
        return self.size.nbytes

    def statistics(self) -> CacheStatistics:
        """Describe the tries. Costs a walk over all nodes."""
        nodes = [node for trie in self._tries.values() for node in trie.nodes()]
        return CacheStatistics(
            namespaces=len(self._tries),
            nodes=len(nodes),
            tokens=sum(len(node.tokens) for node in nodes),
            checkpoints=sum(node.checkpoint is not None for node in nodes),
            leases=len(self._leases),
            span_bytes=sum(trie.span_bytes for trie in self._tries.values()),
            checkpoint_bytes=sum(trie.checkpoint_bytes for trie in self._tries.values()),
            stored_tokens=sum(node.stored_to - node.start for node in nodes),
            evictions=self._evictions,
            page_outs=self._page_outs,
        )

    def clear(self, namespace: Namespace | None = None) -> int:
        """Forget all that nobody holds, on disk too.

        Args:
            namespace: whose; of all, if it is None.

        Returns:
            How many tokens were forgotten.
        """
        forgotten = 0
        for trie in [t for n, t in self._tries.items() if namespace in (None, n)]:
            for node in reversed(list(trie.nodes())):
                if not (node.pins or node.children):
                    forgotten += len(node.tokens)
                    self._evictions += 1
                    trie.shorten(node, node.start)
            _write_anew(trie)
        self.drop_empty_tries()
        return forgotten

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

    def missing(self, trie: RadixTrie, prompt: Tokens) -> Missing:
        """Say which state a prompt could be restored from if it were in memory."""
        node, matched = trie.match(prompt)
        limit = self._limit(matched, len(prompt))
        path, holder = node.path(), None
        if self.layout.checkpoints:
            holder = next((n for n in reversed(path) if n.end <= limit and has_checkpoint(n)), None)
            path = path[: path.index(holder) + 1] if holder is not None else []
        nodes = [n for n in path if n.paged_out and n.start < limit]
        if holder is not None and holder.checkpoint is None and holder not in nodes:
            nodes.append(holder)
        return Missing(nodes, holder)

    def refresh(self, node: TrieNode) -> None:
        """Have a node count as just used."""
        node.last_used = node.checkpoint_used = self._next_tick()

    def remember_tick(self, tick: int) -> None:
        """Count recency on from what was used before a restart."""
        self._tick = max(self._tick, tick)

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

    # -- evicting ----------------------------------------------------------------------

    def evict(self, budget: int, buffers: int = 1 << 62) -> None:
        """Page out or forget what was used longest ago until little enough is in memory.

        What is pinned stays, so that more may be left while leases are open.

        Args:
            budget: bytes that may stay.
            buffers: allocations that may stay.
        """
        limit = Size(budget, buffers)
        for saved in (True, False) if len(self.files) else (False,):
            if self.size.within(limit):
                break
            self._evict(limit, saved=saved)
        self.drop_empty_tries()

    def _evict(self, limit: Size, *, saved: bool) -> None:
        """Evict to a limit; if `saved`, only what is on disk."""
        candidates = victims(self._tries.values(), saved=saved)
        while not (held := self.size).within(limit) and (victim := next(candidates, None)):
            over = held - limit
            if victim.checkpoint:
                self._drop_checkpoint(victim)
            elif victim.node.stored_to > victim.node.start:
                victim.trie.page_out(victim.node)
                self._page_outs += 1
            else:
                everything = over.buffers > 0
                end = victim.node.start if everything else shortened(victim.node, over.nbytes)
                victim.trie.shorten(victim.node, end)
                self._evictions += 1

    def _drop_checkpoint(self, victim: Victim) -> None:
        if victim.node.stored_checkpoint is None:
            self._evictions += 1
        else:
            self._page_outs += 1
        victim.trie.drop_checkpoint(victim.node)
        victim.trie.prune(victim.node)

    def forget_stored(self, goal: int) -> int:
        """Forget what was used longest ago on disk until files take at most `goal` bytes.

        What is in memory too stays there.

        Returns:
            How many nodes lost their files.
        """
        forgotten = 0
        for trie, node in stored_victims(self._tries.values()):
            if self.files.nbytes <= goal:
                break
            in_memory = node.span is not None or node.checkpoint is not None or node.pins
            if in_memory or (node.children and not self.layout.spans):
                trie.drop_stored(node, node.start)
                trie.drop_stored_checkpoint(node)
                trie.unsaved.pop(node, None)
                trie.prune(node)
            else:
                trie.forget(node)
            forgotten += 1
        self.drop_empty_tries()
        return forgotten

    def evictable(self) -> Size:
        """What could be evicted: all but what a lease holds or is being written.

        Costs a walk over all nodes.
        """
        free = Size()
        for trie in self._tries.values():
            below: set[TrieNode | None] = set()  # something stays below them, so their span does
            for node in reversed(list(trie.nodes())):
                if node.pins or node.busy or node in below:
                    below.add(node.parent)
                if node.pins or node.busy:
                    continue
                if node not in below:
                    free += size_in_memory(node)
                elif node.checkpoint is not None:
                    free += size_of(node.checkpoint)
        return free

    @property
    def writing(self) -> bool:
        """Whether some state is being written to disk, and stays until it is."""
        return any(node.busy for trie in self._tries.values() for node in trie.nodes())

    def drop_empty_tries(self) -> None:
        """Forget namespaces that hold nothing and that nobody uses."""
        leased = {id(trie) for trie in self._leases.values()}
        for namespace, trie in list(self._tries.items()):
            if not trie.root.children and id(trie) not in leased:
                del self._tries[namespace]

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def _write_anew(trie: RadixTrie) -> None:
    """Give up files that hold more than what is left; a restart would find all of it."""
    left: dict[int, int] = {}
    for node in trie.nodes():
        for piece in node.stored:
            left[piece.record.id] = max(piece.stop, left.get(piece.record.id, 0))
    for node in trie.nodes():  # parents first: the disk has no tokens without those before them
        parent = node.parent
        after = parent is not None and parent.parent is not None and parent.stored_to < parent.end
        more = (p.start for p in node.stored if left[p.record.id] < p.record.end)
        start = node.start if after else next(more, None)
        if node.stored and node.span is not None and start is not None:
            trie.drop_stored(node, start)
            trie.unsaved[node] = None


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
