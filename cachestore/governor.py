"""Budget of model state: room is made before anything is allocated.

Everything that takes memory asks here first. Room is made by paging out and evicting unused state
(see `evict`). If there is no room, the engine computes less at a time, holds new requests or
preempts a sequence. The allocator is never asked for more: on Metal that would end the process.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import chain

from . import evict
from .ledger import NOTHING, Kind, Size
from .pool import MemoryPool
from .trie import RadixTrie
from .tries import Namespace, Tries


class Governor:
    """Makes room for one model in the budget of all. Belongs to the MLX thread.

    A copy of state (to cut, join or pack it) needs memory while both exist. No copy exceeds
    `max_copy_bytes`, and that much is kept free, so that freeing memory never needs any that is not
    there. State that leases retain, or that is being written, is never evicted.
    """

    def __init__(self, tries: Tries, pool: MemoryPool) -> None:
        self.pool = pool
        self.ledger = pool.ledger
        self._tries = tries
        self._transient = pool.ledger.account(Kind.TRANSIENT)
        pool.governors.append(self)

    def close(self) -> None:
        """Leave the pool: the model is unloaded. Idempotent."""
        self.release()
        self.pool.busy.discard(self)
        if self in self.pool.governors:
            self.pool.governors.remove(self)

    def note(self, *, busy: bool) -> None:
        """Note that requests of this model are at work, or not."""
        (self.pool.busy.add if busy else self.pool.busy.discard)(self)

    @property
    def others_busy(self) -> bool:
        """True if requests of another model are at work, which will give memory back."""
        return bool(self.pool.busy - {self})

    # -- room --------------------------------------------------------------------------

    def fits(self, need: Size) -> bool:
        """True if there is room, or could be made."""
        room = self.pool.room
        if need.within(room):
            return True
        return need.nbytes <= self.pool.spare and need.within(room + self.evictable(need - room))

    def make_room(self, need: Size) -> bool:
        """Page out and evict until `need` fits; False, with nothing evicted, if it cannot."""
        if need.within(self.pool.room):
            return True
        if not self.fits(need):
            return False
        self.evict_excess(need)
        return need.within(self.pool.room)

    def reserve(self, need: Size) -> bool:
        """Make room for a step's temporaries, kept until the next step; False if there is none."""
        self._transient.close()
        if not self.make_room(need):
            return False
        self._transient.set(need)
        return True

    def release(self) -> None:
        """Give back what was reserved: the step is over."""
        self._transient.close()

    # -- eviction ----------------------------------------------------------------------

    def evictable(self, enough: Size | None = None) -> Size:
        """Size of state that is neither leased nor being written; counting stops at `enough`."""
        free = Size()
        for size in chain.from_iterable(map(evict.evictable, chain.from_iterable(self.pool.tries))):
            free += size
            if enough is not None and enough.within(free):
                break
        return free

    def evict_excess(self, need: Size = NOTHING) -> None:
        """Evict the oldest state of all models until the budget has room for `need`."""
        over = need - self.pool.room
        excess = Size(max(0, over.nbytes), max(0, over.buffers))
        self._evict(self.pool.tries, evict.stored(self.pool.tries) - excess)

    def evict(self, budget: int, buffers: int = 1 << 62) -> None:
        """Page out or forget the model's oldest state until what is left is within the limits.

        State that leases retain stays, so that more may be left while they are open.
        """
        self._evict([self._tries], Size(budget, buffers))

    def _evict(self, models: list[Tries], limit: Size) -> None:
        if not evict.stored(models).within(limit):
            self._evict_in_stages(models, limit)
        for tries in models:
            for trie in tries:
                trie.spans.trim()
            tries.drop_empty()

    def _evict_in_stages(self, models: list[Tries], limit: Size) -> None:
        owners = self.pool.owners()
        owned: dict[str, list[RadixTrie]] = defaultdict(list)
        for trie, tenant in owners.items():
            owned[tenant].append(trie)
        bounds = {tenant: self.pool.bounds(tenant) for tenant in owned}
        shares = {tenant: (bound.floor, bound.ceiling) for tenant, bound in bounds.items()}
        on_disk = any(tries.files.counts for tries in models)
        floored = any(floor for floor, _ in shares.values())
        for kept in evict.stages(shares, limit.nbytes):

            def excess(trie: RadixTrie, kept: Mapping[str, int] = kept) -> int:
                tenant = owners[trie]
                if tenant not in kept:
                    return 0
                sizes = ((each.spans.size, each.checkpoints.size) for each in owned[tenant])
                return sum(a.nbytes + b.nbytes for a, b in sizes) - kept[tenant]

            is_last = floored and not any(kept.values())
            for persisted in (True, False) if on_disk else (False,):
                if evict.stored(models).within(limit):
                    return
                evict.evict_excess(models, limit, excess, persisted=persisted, sparing=is_last)

    def forget_persisted(self, goal: int) -> int:
        """Forget the oldest files of all models until `goal` bytes are left; return how many nodes.

        State that is in memory too stays there.
        """
        forgotten, models, owners = 0, self.pool.tries, self.pool.owners()
        bounds = {tenant: self.pool.bounds(tenant) for tenant in set(owners.values())}
        shares = {tenant: (bound.floor, bound.disk) for tenant, bound in bounds.items()}
        has_spans = {trie: tries.layout.spans for tries in models for trie in tries}
        for kept in evict.stages(shares, goal):

            def wanted(trie: RadixTrie, kept: Mapping[str, int] = kept) -> bool:
                tenant = owners[trie]
                on_disk = sum(tries.files.by_tenant[tenant] for tries in models)
                return tenant in kept and on_disk > kept[tenant]

            if self.pool.stored_on_disk <= goal:
                break
            for victim in evict.persisted_victims(filter(wanted, owners), wanted):
                if self.pool.stored_on_disk <= goal:
                    break
                evict.forget_files(victim.trie, victim.node, has_spans=has_spans[victim.trie])
                forgotten += 1
        for tries in models:
            tries.drop_empty()
        return forgotten

    def clear(self, wanted: Callable[[Namespace], bool] = lambda _: True) -> int:
        """Forget the model's state without leases, on disk too; return how many tokens."""
        forgotten = 0
        for trie in [trie for namespace, trie in self._tries.items() if wanted(namespace)]:
            for node in reversed(list(trie.nodes())):
                if not (node.ref_count or node.children):
                    forgotten += len(node.tokens)
                    self._tries.evictions += 1
                    trie.shorten(node, node.start)
            trie.spans.trim()
            evict.rewrite_longer_files(trie)
        self._tries.drop_empty()
        return forgotten
