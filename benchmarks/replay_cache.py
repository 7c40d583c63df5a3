"""The daemon's cache under a trace: trie, cache and pool are its own, state is pretended."""

import heapq
from collections.abc import Sequence

from pretended import Pretended
from replay_traces import Request

from umbel.cachestore.ledger import Size
from umbel.cachestore.node import Extent, Tokens, TrieNode
from umbel.cachestore.prefix_cache import Lease, PrefixCache
from umbel.cachestore.record import Record, RecordKind
from umbel.cachestore.state import Layout
from umbel.cachestore.trie import RadixTrie
from umbel.cachestore.tries import Namespace

NAMESPACE = Namespace("tenant")


class Replay:
    """The daemon's cache, with requests that take no computing.

    A prompt is stored as soon as it begins, so that who comes next shares it. A request that
    does not fit beside those in flight would wait in the daemon; here it runs over the budget.

    Attributes:
        over: requests for which there was no room.
        read: tokens that came back from the disk.

    Args:
        budget: tokens that may be in memory.
        disk: whether there is a disk; it is endless, and has what is stored at once.
    """

    def __init__(self, budget: int, *, disk: bool = False) -> None:
        self.over = self.read = 0
        self.cache = PrefixCache(Layout(spans=True, checkpoints=False), budget=budget)
        # The pool keeps a sixteenth of its own budget free.
        self.cache.pool.resize(Size(budget * 16 // 15, 1 << 62))
        self._pool = self.cache.pool
        self._disk = disk
        self._records = 0

    def begin(self, prompt: Tokens) -> Lease:
        """Begin a request, and store its prompt."""
        if self._disk:
            self._page_in(prompt)
        lease = self.cache.begin(NAMESPACE, prompt)
        if not self._pool.make_room(Size(lease.total - lease.cached, 1)):
            self.cache.evict(0)
            self.over += 1
        lease.publish(prompt, Pretended(lease.total - lease.cached))
        if self._disk:
            self._write()
        return lease

    def _page_in(self, prompt: Tokens) -> None:
        """Read what the disk has of a prompt, parents first, as the pager does."""
        trie = self.cache.tries.open(NAMESPACE)
        for node in self.cache.restoration.missing(trie, prompt, ()).nodes:
            if not self._room_below(trie, node.parent or trie.root, Size(len(node.tokens), 1)):
                return
            trie.set_span(node, Pretended(len(node.tokens)))
            self.cache.refresh(trie, node)
            self.read += len(node.tokens)

    def _room_below(self, trie: RadixTrie, node: TrieNode, need: Size) -> bool:
        """Make room, but not at the cost of what is gone on from."""
        trie.retain(node)
        fits = self._pool.make_room(need)
        trie.release(node)
        return fits

    def _write(self) -> None:
        trie = self.cache.tries.open(NAMESPACE)
        for node in sorted(trie.persistence.dirty, key=lambda node: node.start):
            trie.persistence.mark_clean(node)
            self._records += 1
            trie.persistence.add_extent(
                node,
                Extent(
                    _record(self._records, node.persisted_end, node.end),
                    node.persisted_end,
                    node.end,
                ),
            )


def _record(number: int, start: int, end: int) -> Record:
    return Record(
        id=number,
        kind=RecordKind.SPAN,
        tenant=NAMESPACE.tenant,
        start=start,
        end=end,
        prefix=b"",
        digest=b"",
        tokens=b"",
        name="",
        nbytes=end - start,
        checksum=b"",
        used=0,
    )


def replay(requests: Sequence[Request], cache: Replay) -> list[int]:
    """Run requests, in the order of time; return the tokens that each was given."""
    hits: list[int] = []
    flying: list[tuple[float, int, Lease, Tokens]] = []
    for number, request in enumerate(requests):
        while flying and flying[0][0] <= request.time:
            *_, lease, prompt = heapq.heappop(flying)
            lease.close(prompt)
        prompt = request.tokens
        lease = cache.begin(prompt)
        hits.append(lease.cached)
        heapq.heappush(flying, (request.until, number, lease, prompt))
    for *_, lease, prompt in flying:
        lease.close(prompt)
    return hits
