"""Makes room: pages out and forgets the least recently used state, or state that a user deletes.

`eviction` chooses victims, and `bounds` says how much each tenant keeps. State that a lease retains
or that is being written to disk is never evicted.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from .eviction import Victim, persisted_victims, shortened, victims
from .governor import MemoryPool, Share, stages
from .ledger import NOTHING, Size
from .node import TrieNode, size_in_memory, size_of
from .trie import RadixTrie
from .tries import Namespace, Tries

_PAYS_FOR = 64
"""Nodes that a pass visits for each node that it evicts at least: this bounds the passes."""


class Evictor:
    """Takes state from the tries of a model, and for it from others'. Belongs to the MLX thread.

    Attributes:
        evictions: states that were forgotten.
        page_outs: states that were left to the disk.

    Args:
        tries: whose state.
        pool: has the tries of all models, which come and go, and the bounds of tenants.
    """

    def __init__(self, tries: Tries, pool: MemoryPool) -> None:
        self.evictions = 0
        self.page_outs = 0
        self._tries = tries
        self._pool = pool

    def evict(self, budget: int, buffers: int = 1 << 62) -> None:
        """Page out or forget what the model used longest ago until little enough is in memory.

        What leases retain stays, so that more may be left while they are open.

        Args:
            budget: bytes that may stay.
            buffers: allocations that may stay.
        """
        _Eviction(self, self._pool, [self._tries], Size(budget, buffers)).run()

    def evict_from_all(self, limit: Size) -> None:
        """Do so with the state of all models, whichever was used longest ago.

        Args:
            limit: what may stay of all that is stored.
        """
        _Eviction(self, self._pool, self._pool.tries, limit).run()

    def forget_persisted(self, goal: int) -> int:
        """Forget what was used longest ago on disk until files take at most `goal` bytes.

        The files are those of all models of the pool. State that is in memory too stays there.

        Returns:
            How many nodes lost their files.
        """
        forgotten = 0
        owners = _owners(self._pool.tries)
        bounds = {tenant: self._pool.bounds(tenant) for tenant in set(owners.values())}
        shares = {tenant: Share(bound.floor, bound.disk) for tenant, bound in bounds.items()}
        for kept in stages(shares, goal):
            forgotten += self._forget_persisted(goal, owners, kept)
        for tries in self._pool.tries:
            tries.drop_empty()
        return forgotten

    def _forget_persisted(
        self, goal: int, owners: Mapping[RadixTrie, str], kept: Mapping[str, int]
    ) -> int:
        """Do so with the files of tenants that have more than they keep."""

        def wanted(trie: RadixTrie) -> bool:
            tenant = owners[trie]
            return tenant in kept and self._on_disk(tenant) > kept[tenant]

        forgotten = 0
        if self._pool.stored_on_disk <= goal:
            return 0
        has_spans = {trie: tries.layout.spans for tries in self._pool.tries for trie in tries}
        for trie, node in persisted_victims(filter(wanted, owners), wanted):
            if self._pool.stored_on_disk <= goal:
                break
            in_memory = node.span is not None or node.checkpoint is not None or node.ref_count
            if in_memory or (node.children and not has_spans[trie]):
                trie.persistence.drop_extents(node, node.start)
                trie.persistence.drop_checkpoint(node)
                trie.persistence.mark_clean(node)
                trie.prune(node)
            else:
                trie.forget(node)
            forgotten += 1
        return forgotten

    def _on_disk(self, tenant: str) -> int:
        """Bytes of a tenant's files, of all models."""
        return sum(tries.files.by_tenant[tenant] for tries in self._pool.tries)

    def evictable(self, enough: Size | None = None) -> Size:
        """What could be evicted: all state that no lease holds and that is not being written.

        Args:
            enough: no more is looked for than this. Without it, all nodes are walked.
        """
        free = Size()
        for trie in chain.from_iterable(self._pool.tries):
            for size in _evictable(trie):
                free += size
                if enough is not None and enough.within(free):
                    return free
        return free

    def clear(self, wanted: Callable[[Namespace], bool] = lambda _: True) -> int:
        """Forget all that nobody holds, on disk too.

        Args:
            wanted: whose; without it, all.

        Returns:
            How many tokens were forgotten.
        """
        forgotten = 0
        for trie in [trie for namespace, trie in self._tries.items() if wanted(namespace)]:
            for node in reversed(list(trie.nodes())):
                if not (node.ref_count or node.children):
                    forgotten += len(node.tokens)
                    self.evictions += 1
                    trie.shorten(node, node.start)
            trie.spans.trim()
            _write_anew(trie)
        self._tries.drop_empty()
        return forgotten


def _evictable(trie: RadixTrie) -> Iterator[Size]:
    """Yield what could be evicted of each node, after those below it."""
    path = [_Visit(trie.root)]
    while path:
        visit, node = path[-1], path[-1].node
        if (child := next(visit.children, None)) is not None:
            path.append(_Visit(child))
            continue
        path.pop()
        if not path:
            return
        stays = node.ref_count or node.writing
        if stays or visit.stays_below:
            path[-1].stays_below = True
        if stays:
            continue
        if not visit.stays_below:
            yield size_in_memory(node)
        elif node.checkpoint is not None:
            yield size_of(node.checkpoint)


class _Visit:
    """A node on the way of a walk.

    Attributes:
        children: that were not visited yet.
        stays_below: something below it stays, so its span does.
    """

    def __init__(self, node: TrieNode) -> None:
        self.node = node
        self.children = iter(node.children.values())
        self.stays_below = False


def _owners(everybody: Iterable[Tries]) -> dict[RadixTrie, str]:
    """Say which tenant each trie belongs to."""
    return {trie: namespace.tenant for tries in everybody for namespace, trie in tries.items()}


class _Holdings:
    """What each tenant has in memory, of all models, while tries stay the same."""

    def __init__(self, everybody: Iterable[Tries]) -> None:
        self.owners = _owners(everybody)
        self.tries: dict[str, list[RadixTrie]] = defaultdict(list)
        for trie, tenant in self.owners.items():
            self.tries[tenant].append(trie)

    def held(self, tenant: str) -> int:
        """Bytes of a tenant's stored state."""
        return sum(
            trie.spans.size.nbytes + trie.checkpoints.size.nbytes for trie in self.tries[tenant]
        )


class _Eviction:
    """One pass over the tries of some models, for one that needs room."""

    def __init__(
        self, evictor: Evictor, pool: MemoryPool, models: list[Tries], limit: Size
    ) -> None:
        self._evictor = evictor
        self._pool = pool
        self._models = models
        self._limit = limit

    def run(self) -> None:
        if not self._held.within(self._limit):
            self._evict_in_stages()
        for tries in self._models:
            for trie in tries:
                trie.spans.trim()
            tries.drop_empty()

    @property
    def _held(self) -> Size:
        return sum((tries.size for tries in self._models), Size())

    def _evict_in_stages(self) -> None:
        holdings = _Holdings(self._pool.tries)
        bounds = {tenant: self._pool.bounds(tenant) for tenant in holdings.tries}
        shares = {tenant: Share(bound.floor, bound.ceiling) for tenant, bound in bounds.items()}
        on_disk = any(len(tries.files) for tries in self._models)
        floored = any(share.floor for share in shares.values())
        for kept in stages(shares, self._limit.nbytes):
            is_last = floored and not any(kept.values())
            for persisted in (True, False) if on_disk else (False,):
                if self._held.within(self._limit):
                    return
                self._evict(holdings, kept, persisted=persisted, sparing=is_last)

    def _evict(
        self, holdings: _Holdings, kept: Mapping[str, int], *, persisted: bool, sparing: bool
    ) -> None:
        """Evict to the limit, from tenants that have more than they keep.

        Of many nodes a few more go than need be: to find out which takes a walk over all.

        Args:
            holdings: of all tenants.
            kept: bytes that they keep; nothing goes of those that are not named.
            persisted: only what is on disk.
            sparing: no more goes than need be: it is below the floors.
        """

        def excess(trie: RadixTrie) -> int:
            tenant = holdings.owners[trie]
            return holdings.held(tenant) - kept[tenant] if tenant in kept else 0

        tries = [trie for trie in chain.from_iterable(self._models) if excess(trie) > 0]
        due = 0 if sparing else sum(trie.totals.nodes for trie in tries) // _PAYS_FOR
        candidates = victims(tries, persisted=persisted, wanted=lambda trie: excess(trie) > 0)
        for victim in candidates:
            over = self._held - self._limit
            if due <= 0 and over.within(NOTHING):
                return
            due -= 1
            if victim.checkpoint:
                self._drop_checkpoint(victim)
            elif victim.node.persisted_end == victim.node.end:
                victim.trie.page_out(victim.node)
                self._evictor.page_outs += 1
            else:
                everything = over.buffers > 0
                most = excess(victim.trie)
                nbytes = most if over.within(NOTHING) else min(over.nbytes, most)
                end = victim.node.start if everything else shortened(victim.node, nbytes)
                # What is on disk is left to it as a whole, and only if the rest is not enough.
                victim.trie.shorten(victim.node, max(end, victim.node.persisted_end))
                self._evictor.evictions += 1

    def _drop_checkpoint(self, victim: Victim) -> None:
        if victim.node.persisted_checkpoint is None:
            self._evictor.evictions += 1
        else:
            self._evictor.page_outs += 1
        victim.trie.drop_checkpoint(victim.node)
        victim.trie.prune(victim.node)


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
            trie.persistence.drop_extents(node, start)
            trie.persistence.mark_dirty(node)
