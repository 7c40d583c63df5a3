"""The tries of a model, all namespaces together: what they hold, and what of it goes first.

Victims are chosen in `eviction`; here they go. What a lease holds never does, nor what is being
written to disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .eviction import Victim, persisted_victims, shortened, victims
from .extents import FileUse
from .ledger import Ledger, Size
from .node import TrieNode, size_in_memory, size_of
from .trie import RadixTrie


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


class Forest:
    """All tries of one loaded model. Belongs to the MLX thread.

    Attributes:
        layout: what the model's state consists of.
        ledger: where all state is entered.
        files: who refers to which file of the disk tier.

    Args:
        layout: as above.
        ledger: as above; one of its own, if it is None.
    """

    def __init__(self, layout: Layout, *, ledger: Ledger | None = None) -> None:
        self.layout = layout
        self.ledger = Ledger() if ledger is None else ledger
        self.files = FileUse()
        self._tries: dict[Namespace, RadixTrie] = {}
        self._tick = 0
        self._evictions = 0
        self._page_outs = 0

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
            leases=sum(trie.root.pins for trie in self._tries.values()),
            span_bytes=sum(trie.span_bytes for trie in self._tries.values()),
            checkpoint_bytes=sum(trie.checkpoint_bytes for trie in self._tries.values()),
            stored_tokens=sum(node.persisted_end - node.start for node in nodes),
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

    def refresh(self, node: TrieNode) -> None:
        """Have a node count as just used."""
        node.last_used = node.checkpoint_used = self._next_tick()

    def remember_tick(self, tick: int) -> None:
        """Count recency on from what was used before a restart."""
        self._tick = max(self._tick, tick)

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    # -- evicting ----------------------------------------------------------------------

    def evict(self, budget: int, buffers: int = 1 << 62) -> None:
        """Page out or forget what was used longest ago until little enough is in memory.

        What is pinned stays, so that more may be left while leases are open.

        Args:
            budget: bytes that may stay.
            buffers: allocations that may stay.
        """
        limit = Size(budget, buffers)
        for persisted in (True, False) if len(self.files) else (False,):
            if self.size.within(limit):
                break
            self._evict(limit, persisted=persisted)
        self.drop_empty_tries()

    def _evict(self, limit: Size, *, persisted: bool) -> None:
        """Evict to a limit; if `persisted`, only what is on disk."""
        candidates = victims(self._tries.values(), persisted=persisted)
        while not (held := self.size).within(limit) and (victim := next(candidates, None)):
            over = held - limit
            if victim.checkpoint:
                self._drop_checkpoint(victim)
            elif victim.node.persisted_end == victim.node.end:
                victim.trie.page_out(victim.node)
                self._page_outs += 1
            else:
                everything = over.buffers > 0
                end = victim.node.start if everything else shortened(victim.node, over.nbytes)
                # What is on disk is left to it as a whole, and only if the rest is not enough.
                victim.trie.shorten(victim.node, max(end, victim.node.persisted_end))
                self._evictions += 1

    def _drop_checkpoint(self, victim: Victim) -> None:
        if victim.node.persisted_checkpoint is None:
            self._evictions += 1
        else:
            self._page_outs += 1
        victim.trie.drop_checkpoint(victim.node)
        victim.trie.prune(victim.node)

    def forget_persisted(self, goal: int) -> int:
        """Forget what was used longest ago on disk until files take at most `goal` bytes.

        What is in memory too stays there.

        Returns:
            How many nodes lost their files.
        """
        forgotten = 0
        for trie, node in persisted_victims(self._tries.values()):
            if self.files.nbytes <= goal:
                break
            in_memory = node.span is not None or node.checkpoint is not None or node.pins
            if in_memory or (node.children and not self.layout.spans):
                trie.drop_extents(node, node.start)
                trie.drop_persisted_checkpoint(node)
                trie.dirty.pop(node, None)
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
                if node.pins or node.writing or node in below:
                    below.add(node.parent)
                if node.pins or node.writing:
                    continue
                if node not in below:
                    free += size_in_memory(node)
                elif node.checkpoint is not None:
                    free += size_of(node.checkpoint)
        return free

    @property
    def writing(self) -> bool:
        """Whether some state is being written to disk, and stays until it is."""
        return any(node.writing for trie in self._tries.values() for node in trie.nodes())

    def drop_empty_tries(self) -> None:
        """Forget namespaces that hold nothing and that nobody uses."""
        for namespace, trie in list(self._tries.items()):
            if not (trie.root.children or trie.root.pins):
                del self._tries[namespace]


def _write_anew(trie: RadixTrie) -> None:
    """Give up files that hold more than what is left; a restart would find all of it."""
    left: dict[int, int] = {}
    for node in trie.nodes():
        for extent in node.extents:
            left[extent.record.id] = max(extent.stop, left.get(extent.record.id, 0))
    for node in trie.nodes():  # parents first: the disk has no tokens without those before them
        parent = node.parent
        after = (
            parent is not None and parent.parent is not None and parent.persisted_end < parent.end
        )
        more = (p.start for p in node.extents if left[p.record.id] < p.record.end)
        start = node.start if after else next(more, None)
        if node.extents and node.span is not None and start is not None:
            trie.drop_extents(node, start)
            trie.dirty[node] = None
