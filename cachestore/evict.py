"""Chooses the least recently used state, and pages it out or forgets it.

Of state used equally long ago the deepest goes first. State that a lease retains or that is being
written to disk is never evicted. Beyond that:

- a span goes from the deep end of a leaf, and after the checkpoint that stands there, which is
  worth nothing without it;
- a checkpoint where paths part, or the first one on its path, ages with all that is below it: a
  new conversation would resume there.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from .ledger import NOTHING, Size
from .node import TrieNode, size_in_memory
from .spans import size_of
from .trie import RadixTrie
from .tries import Tries

_PAYS_FOR = 64  # nodes visited by a pass for each node evicted, at most: this bounds the passes


# Of memory or of the disk: a tenant's floor and ceiling in bytes.
Share = tuple[int, int | None]


def stages(shares: Mapping[str, Share], room: int) -> list[dict[str, int]]:
    """Bytes that tenants keep in each stage of eviction; a tenant that is not named loses nothing.

    First go tenants above their ceiling, then state above the floors, then the floors. Floors that
    exceed `room` together are scaled down to it.
    """
    wanted = sum(floor for floor, _ in shares.values())
    scale = min(1.0, max(0, room) / wanted) if wanted else 0.0
    floors = {tenant: int(floor * scale) for tenant, (floor, _) in shares.items()}
    limits = {tenant: most for tenant, (_, most) in shares.items() if most is not None}
    most = {tenant: max(limit, floors[tenant]) for tenant, limit in limits.items()}
    last = [dict.fromkeys(floors, 0)] if any(floors.values()) else []
    return [*([most] if most else []), floors, *last]


class Victim(NamedTuple):
    """State that may go, in order of `used` (recency) and height (negated end)."""

    used: int
    height: int
    serial: int
    trie: RadixTrie
    node: TrieNode
    checkpoint: bool


_serial = count()


def _victim(trie: RadixTrie, node: TrieNode, used: int, *, checkpoint: bool = False) -> Victim:
    return Victim(used, -node.end, next(_serial), trie, node, checkpoint)


def victims(
    tries: Iterable[RadixTrie],
    excess: Callable[[RadixTrie], int] = lambda _: 1,
    *,
    persisted: bool = False,
) -> Iterator[Victim]:
    """Yield evictable state, least valuable first, in one pass over the tries.

    The caller evicts a victim, a span wholly or in part, before it asks for the next one; nothing
    else may change the tries meanwhile. Tries without `excess` bytes are skipped. State that is
    `persisted` costs a read if it is lost, and not a prefill.
    """

    def exposed_by(gone: Victim) -> Victim | None:
        node = gone.node
        if node.span is None and node.parent is not None:
            node = node.parent  # it was perhaps the last child in memory
        is_end = _exposed(node, persisted=persisted)
        return _victim(gone.trie, node, node.last_used) if is_end else None

    found = list[Victim]()
    for trie in tries:
        nodes = list(trie.nodes())
        found += [
            _victim(trie, node, used, checkpoint=True)
            for node, used in _checkpoints(nodes)
            if not persisted or node.persisted_checkpoint is not None
        ]
        ends = (node for node in nodes if _exposed(node, persisted=persisted))
        found += [_victim(trie, node, node.last_used) for node in ends]
    return _in_order(found, excess, exposed_by)


def persisted_victims(
    tries: Iterable[RadixTrie], excess: Callable[[RadixTrie], int]
) -> Iterator[Victim]:
    """Yield nodes whose files may go, ends of paths and oldest first; used as `victims` is."""

    def files_of(trie: RadixTrie, node: TrieNode) -> Victim:
        return _victim(trie, node, max(node.last_used, node.checkpoint_used))

    def exposed_by(gone: Victim) -> Victim | None:
        parent = gone.node.parent
        if parent is None or parent.parent is None or not _last_on_disk(parent):
            return None
        return files_of(gone.trie, parent)

    found = [files_of(trie, n) for trie in tries for n in trie.nodes() if _last_on_disk(n)]
    return _in_order(found, excess, exposed_by)


def _in_order(
    heap: list[Victim],
    excess: Callable[[RadixTrie], int],
    exposed_by: Callable[[Victim], Victim | None],
) -> Iterator[Victim]:
    """Yield the least valuable victim, then add the one that its end has exposed."""
    heapq.heapify(heap)
    while heap:
        victim = heapq.heappop(heap)
        if excess(victim.trie) > 0:
            yield victim
            if (exposed := exposed_by(victim)) is not None:
                heapq.heappush(heap, exposed)


def _last_on_disk(node: TrieNode) -> bool:
    if node.ref_count or not _has_files(node):
        return False
    return not any(_has_files(child) for child in node.children.values())


def _has_files(node: TrieNode) -> bool:
    return bool(node.extents) or node.persisted_checkpoint is not None


def shortened(node: TrieNode, over: int) -> int:
    """Offset at which a leaf must end to free `over` bytes, and little more."""
    if node.span is None or node.span.nbytes <= over:
        return node.start
    tokens = -(-over * len(node.tokens) // node.span.nbytes)
    return node.end - max(1, tokens)


def _exposed(node: TrieNode, *, persisted: bool) -> bool:
    """True if a span is the last of its path in memory, so that it can be cut."""
    if node.ref_count or node.span is None or node.writing or node.checkpoint is not None:
        return False
    if node.persisted_end == node.end:
        return all(child.span is None for child in node.children.values())
    return not persisted and not node.children


def _checkpoints(nodes: list[TrieNode]) -> Iterator[tuple[TrieNode, int]]:
    """Evictable checkpoints and their recency; `nodes` has parents before children."""
    newest: dict[TrieNode, int] = {}
    for node in reversed(nodes):
        below = [newest[child] for child in node.children.values()]
        newest[node] = max(node.last_used, node.checkpoint_used, *below)
    below_one: set[TrieNode | None] = set()
    for node in nodes:
        first = node.parent not in below_one
        if not first or node.checkpoint is not None:
            below_one.add(node)
        if node.checkpoint is not None and not (node.ref_count or node.writing):
            shared = first or len(node.children) > 1
            yield node, newest[node] if shared else node.checkpoint_used


def evict_excess(
    models: list[Tries],
    limit: Size,
    excess: Callable[[RadixTrie], int],
    *,
    persisted: bool,
    sparing: bool,
) -> None:
    """Evict to the limit, from tries whose tenant has `excess` bytes.

    Unless `sparing`, a few nodes more go than necessary: to find them takes a walk over all.
    """
    if stored(models).within(limit):
        return
    model_of = {trie: tries for tries in models for trie in tries if excess(trie) > 0}
    due = 0 if sparing else sum(trie.totals.nodes for trie in model_of) // _PAYS_FOR
    for victim in victims(model_of, excess, persisted=persisted):
        over = stored(models) - limit
        if due <= 0 and over.within(NOTHING):
            return
        due -= 1
        node, trie = victim.node, victim.trie
        if victim.checkpoint:
            on_disk = node.persisted_checkpoint is not None
            trie.drop_checkpoint(node)
            trie.prune(node)
        elif on_disk := node.persisted_end == node.end:
            trie.page_out(node)
        else:
            most = excess(trie)
            nbytes = most if over.within(NOTHING) else min(over.nbytes, most)
            end = node.start if over.buffers > 0 else shortened(node, nbytes)
            # Tokens on disk are paged out together, and only if the others are not enough.
            trie.shorten(node, max(end, node.persisted_end))
        model_of[trie].page_outs += on_disk
        model_of[trie].evictions += not on_disk


def forget_files(trie: RadixTrie, node: TrieNode, *, has_spans: bool) -> None:
    """Forget a node's files, and the node itself if it is on disk only."""
    in_memory = node.span is not None or node.checkpoint is not None or node.ref_count
    if in_memory or (node.children and not has_spans):
        trie.persistence.drop_extents(node, node.start)
        trie.persistence.drop_checkpoint(node)
        trie.persistence.mark_clean(node)
        trie.prune(node)
    else:
        trie.forget(node)


def evictable(trie: RadixTrie) -> Iterator[Size]:
    """Yield the evictable size of each node, after those below it."""
    path = [(trie.root, iter(trie.root.children.values()))]
    stay: set[TrieNode | None] = set()  # nodes whose spans stay, as something below them does
    while path:
        node, children = path[-1]
        if (child := next(children, None)) is not None:
            path.append((child, iter(child.children.values())))
            continue
        path.pop()
        if node.ref_count or node.writing:
            stay |= {node, node.parent}
        elif node not in stay:
            yield size_in_memory(node)
        else:
            stay.add(node.parent)
            yield size_of(node.checkpoint)


def stored(models: Iterable[Tries]) -> Size:
    """State that the tries of some models hold in memory."""
    return sum((tries.size for tries in models), NOTHING)


def rewrite_longer_files(trie: RadixTrie) -> None:
    """Give up files that hold more than is left; a restart would find all of it."""
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
