"""Looks into the cache on behalf of `umbel cache`; the cache itself belongs to the MLX thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ..cachestore.check import problems
from ..cachestore.prefix_cache import CacheStatistics, PrefixCache
from ..scheduler.errors import UnavailableError
from ..scheduler.queue import RETRY_AFTER
from ..scheduler.thread import MLXThread

T = TypeVar("T")

_TIMEOUT = 60.0  # a step may be under way, and a long one


class NodeDescription(msgspec.Struct):
    """One node of the trie.

    Attributes:
        depth: nodes above it.
        start: offset of its first token.
        end: offset after its last token.
        bytes: of its tokens' state.
        checkpoint_bytes: of the whole state at its end; 0 without one.
        pins: open leases on it.
        last_used: recency; larger is later.
        children: edges that go on from it.
    """

    depth: int
    start: int
    end: int
    bytes: int
    checkpoint_bytes: int
    pins: int
    last_used: int
    children: int


class CacheDesk:
    """Asks the MLX thread between two steps, and waits for no longer than it must."""

    def __init__(self, thread: MLXThread, cache: PrefixCache) -> None:
        self._thread = thread
        self._cache = cache

    async def statistics(self) -> CacheStatistics:
        """Describe the cache's shape."""
        return await self._ask(self._cache.statistics)

    async def nodes(self, tenant: str) -> list[NodeDescription]:
        """Describe the nodes of one tenant."""
        return await self._ask(lambda: self._describe(tenant))

    async def verify(self) -> list[str]:
        """Check the invariants; describe what is broken."""
        return await self._ask(lambda: problems(self._cache))

    async def _ask(self, fn: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await asyncio.wrap_future(self._thread.submit(fn))
        except TimeoutError as error:
            message = "the engine is in a long step; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error

    def _describe(self, tenant: str) -> list[NodeDescription]:
        return [
            NodeDescription(
                depth=len(node.path()) - 1,
                start=node.start,
                end=node.end,
                bytes=0 if node.span is None else node.span.nbytes,
                checkpoint_bytes=0 if node.checkpoint is None else node.checkpoint.nbytes,
                pins=node.pins,
                last_used=node.last_used,
                children=len(node.children),
            )
            for namespace, trie in self._cache.tries()
            if namespace.tenant == tenant
            for node in trie.nodes()
        ]
