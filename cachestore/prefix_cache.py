"""The prefix cache: the only writer of tries, leases and stored state.

Restore rules (all layers aligned to one offset, or none):

- a stack of token-addressable layers only resumes at any offset; a match that ends inside an
  edge splits it there;
- a stack with sliding or recurrent layers resumes at the deepest checkpoint at or before the
  match, or at the match itself where a later checkpoint rewinds to it;
- at least one token of the prompt is always left to compute.

The matched path, down to the checkpoint that is restored from, is pinned from match to close.
Without that pin a node could be evicted between a match and the capture that belongs to it, and
state be attached to a wrong place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .checkpoints import Reason
from .errors import CacheError
from .eviction import shortened, victims
from .lease import Lease
from .state import Checkpoint, Span
from .trie import RadixTrie, Tokens, TrieNode

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


@dataclass(frozen=True)
class CacheStatistics:
    """The tries' shape, all namespaces together. Sizes in bytes."""

    namespaces: int = 0
    nodes: int = 0
    tokens: int = 0
    checkpoints: int = 0
    leases: int = 0
    span_bytes: int = 0
    checkpoint_bytes: int = 0
    evictions: int = 0


class PrefixCache:
    """All tries of one loaded model. Belongs to the MLX thread.

    Args:
        layout: what the model's state consists of.
        budget: bytes that stored state may take; what is over it is evicted at close.
        checkpoints_kept: checkpoints that one request may leave behind.
        grid: requests resume at multiples of this many tokens only.
    """

    def __init__(
        self, layout: Layout, *, budget: int, checkpoints_kept: int = 4, grid: int = 1
    ) -> None:
        self.layout = layout
        self.budget = budget
        self.grid = grid
        self._checkpoints_kept = checkpoints_kept
        self._tries: dict[Namespace, RadixTrie] = {}
        self._leases: dict[Lease, RadixTrie] = {}
        self._tick = 0
        self._evictions = 0

    def begin(self, namespace: Namespace, prompt: Tokens) -> Lease:
        """Match a prompt, split where it resumes, and lease the path.

        Raises:
            CacheError: the prompt is empty.
        """
        if not len(prompt):
            raise CacheError("an empty prompt has nothing to match")
        trie = self._tries.setdefault(namespace, RadixTrie())
        node, matched = trie.match(prompt)
        limit = min(matched, len(prompt) - 1) // self.grid * self.grid
        holder = self._holder(node, limit)
        offset = 0 if holder is None else min(holder.end, limit)
        resume = self._cut(trie, node, offset if self.layout.checkpoints else limit)
        # All of them lie on one path, so that the deepest pins the others too.
        held = [resume, *([holder] if holder else []), *([node] if matched > resume.end else [])]
        deepest = max(held, key=lambda candidate: candidate.end)
        checkpoint = None if holder is None else holder.checkpoint
        lease = Lease(
            prompt,
            matched,
            resume,
            deepest,
            checkpoint,
            self._release,
            self._publish,
            self._checkpoints_kept,
        )
        self._leases[lease] = trie
        for pinned in deepest.path():
            pinned.pins += 1
        self._refresh(resume, holder)
        return lease

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

    def known(self, namespace: Namespace, tokens: Tokens) -> int:
        """How many tokens of a prompt are recognised. Refreshes nothing."""
        trie = self._tries.get(namespace)
        return 0 if trie is None else trie.match(tokens).length

    @property
    def nbytes(self) -> int:
        """Bytes of all stored state."""
        return sum(t.span_bytes + t.checkpoint_bytes for t in self._tries.values())

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
            evictions=self._evictions,
        )

    def clear(self) -> None:
        """Forget everything that no open lease holds."""
        self.evict(0)

    # -- restoring ---------------------------------------------------------------------

    def _holder(self, node: TrieNode, limit: int) -> TrieNode | None:
        """Find the checkpoint that restores the deepest offset at or before `limit`."""
        if not self.layout.checkpoints or not limit:
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
        shared = [item for item in lease.captured if item.reason in _SHARED]
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
            if span is not None:
                span.close()
            return
        if known < node.end:
            node = trie.split(node, known)
        if span is not None and known > start:
            had, span = span.split(known - start)
            had.close()
        trie.append(node, tokens[known:].copy(), span)

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
        geometrically and a token is copied O(log n) times, not once a turn.
        """
        parent = node.parent
        while (
            parent is not None
            and parent.parent is not None
            and len(parent.children) == 1
            and parent.checkpoint is None
            and not parent.pins  # so neither is the node: a lease lies on all of its path
            and len(parent.tokens) <= 2 * len(node.tokens)
        ):
            node = trie.merge(parent)
            parent = node.parent

    # -- evicting ----------------------------------------------------------------------

    def evict(self, budget: int) -> None:
        """Forget what was used longest ago until at most `budget` bytes are stored.

        What is pinned stays, so the budget may stay exceeded while leases are open.
        """
        candidates = victims(self._tries.values())
        while (over := self.nbytes - budget) > 0 and (victim := next(candidates, None)):
            self._evictions += 1
            if victim.checkpoint:
                victim.trie.drop_checkpoint(victim.node)
                victim.trie.prune(victim.node)
            else:
                victim.trie.shorten(victim.node, shortened(victim.node, over))
        self._drop_empty_tries()

    def _drop_empty_tries(self) -> None:
        """Forget namespaces that hold nothing and that nobody uses."""
        leased = {id(trie) for trie in self._leases.values()}
        for namespace, trie in list(self._tries.items()):
            if not trie.root.children and id(trie) not in leased:
                del self._tries[namespace]

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


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
