"""Watches that room is made within the bounds of tenants."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from umbel.cachestore.node import TrieNode
from umbel.cachestore.pool import TenantBounds
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.trie import RadixTrie


class Holding(NamedTuple):
    """Bytes of a tenant: what is stored, what of it could go, what is in files."""

    held: int
    evictable: bool
    files: int
    forgettable: bool


def bound(cache: PrefixCache, **bounds: TenantBounds) -> None:
    """Bound some tenants, by their names; all others have no bounds."""
    cache.pool.bounds = lambda tenant: bounds.get(tenant, TenantBounds())


def holdings(cache: PrefixCache) -> dict[str, Holding]:
    found = {}
    for tenant in {namespace.tenant for namespace, _ in cache.tries.items()}:
        tries = [trie for name, trie in cache.tries.items() if name.tenant == tenant]
        found[tenant] = Holding(
            sum(trie.spans.size.nbytes + trie.checkpoints.size.nbytes for trie in tries),
            any(map(_evictable, tries)),
            cache.tries.files.by_tenant[tenant],
            any(_free_on_disk(node) for trie in tries for node in trie.nodes()),
        )
    return found


def _evictable(trie: RadixTrie) -> bool:
    return any(
        not (node.ref_count or node.writing)
        and (node.checkpoint is not None or (node.span is not None and _is_end(node)))
        for node in trie.nodes()
    )


def _is_end(node: TrieNode) -> bool:
    if node.persisted_end == node.end:
        return all(child.span is None for child in node.children.values())
    return not node.children


def _free_on_disk(node: TrieNode) -> bool:
    has = bool(node.extents) or node.persisted_checkpoint is not None
    return has and not node.ref_count


@contextmanager
def watched(cache: PrefixCache, limit: int) -> Iterator[None]:
    """Assert that making room down to a limit spares floors while other tenants have more."""
    before = holdings(cache)
    yield
    after = holdings(cache)
    bounds = {tenant: cache.pool.bounds(tenant) for tenant in before}
    wanted = sum(each.floor for each in bounds.values())
    scale = min(1.0, max(0, limit) / wanted) if wanted else 0.0
    floors = {tenant: int(each.floor * scale) for tenant, each in bounds.items()}
    left = {tenant: after.get(tenant, Holding(0, False, 0, False)) for tenant in before}
    lost = {tenant for tenant in before if left[tenant].held < before[tenant].held}
    for tenant in lost:
        if before[tenant].held <= floors[tenant]:
            others = [u for u in before if left[u].held > floors[u] and left[u].evictable]
            assert not others, f"{tenant} lost of its floor, and {others} have more than theirs"
        ceiling = bounds[tenant].ceiling
        if ceiling is None or before[tenant].held <= ceiling:
            over = [
                u
                for u in before
                if (most := bounds[u].ceiling) is not None
                and left[u].held > max(most, floors[u])
                and left[u].evictable
            ]
            assert not over, f"{tenant} lost something, and {over} have more than they may"
