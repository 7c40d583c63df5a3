"""Looks into the cache on behalf of `umbel cache`; the cache itself belongs to the MLX thread."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from ...cachestore.check import examine
from ...cachestore.errors import PinError
from ...cachestore.node import as_tokens
from ...cachestore.pins import PinDescription
from ...cachestore.prefix_cache import PrefixCache
from ...cachestore.tries import CacheStatistics
from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER
from ...scheduler.thread import MLXThread
from .cache_nodes import NodeDescription, described, look

T = TypeVar("T")

_TIMEOUT = 60.0  # a step may be under way, and a long one


class CacheAdmin:
    """Asks the MLX thread between two steps, and waits for no longer than it must.

    Args:
        thread: that owns the cache.
        cache: what is looked into.
        read: says what a token writes; nothing, for special ones.
    """

    def __init__(
        self,
        thread: MLXThread,
        cache: PrefixCache,
        read: Callable[[int], bytes],
    ) -> None:
        self._read = read
        self._thread = thread
        self._cache = cache

    async def statistics(self, tenant: str | None) -> CacheStatistics:
        """Describe the shape of what a tenant has, or all for None. Pins are no leases here."""
        found, pins = await self._ask(
            lambda: (self._cache.tries.statistics(tenant), len(self._cache.pins.leases(tenant)))
        )
        return replace(found, leases=found.leases - pins)

    async def nodes(self, tenant: str | None) -> list[NodeDescription]:
        """Describe the nodes of a tenant and the shared ones, or all for None.

        Their tokens become text off the MLX thread.
        """
        found = await self._collect(look(self._cache, tenant))
        return await asyncio.to_thread(described, found, self._read)

    async def verify(self) -> list[str]:
        """Check the invariants; describe what is broken."""
        return await self._collect(examine(self._cache))

    async def clear(self, tenant: str) -> int:
        """Forget what a tenant has, but for what runs or is pinned; returns the tokens."""
        return await self._ask(lambda: self._cache.clear(lambda whose: whose.tenant == tenant))

    async def pins(self, tenant: str) -> list[PinDescription]:
        """List a tenant's pins."""
        return await self._ask(lambda: self._cache.pins.listed(tenant))

    async def pin(
        self, tenant: str, name: str, prompt: list[int], *, operator: bool
    ) -> PinDescription:
        """Keep a prompt's state; see `Pins.pin`.

        Raises:
            PinError: it is not in memory, or too much.
        """
        tokens = as_tokens(prompt)
        return await self._ask(
            lambda: self._cache.pins.pin(tenant, name, tokens, operator=operator)
        )

    async def pin_conversation(self, tenant: str, name: str, *, operator: bool) -> PinDescription:
        """Keep a conversation's state; see `Pins.pin`.

        Raises:
            PinError: it is not known, not in memory, or too much.
        """
        return await self._ask(lambda: self._pin_conversation(tenant, name, operator=operator))

    async def unpin(self, tenant: str, name: str) -> bool:
        """Let go of a pin; False if there is none of that name."""
        return await self._ask(lambda: self._cache.pins.unpin(tenant, name))

    def _pin_conversation(self, tenant: str, name: str, *, operator: bool) -> PinDescription:
        tokens = dict(self._cache.pins.conversations(tenant)).get(name)
        if tokens is None:
            raise PinError(f"no conversation {name!r} of yours has been here lately")
        return self._cache.pins.pin(tenant, name, tokens, operator=operator)

    async def _collect(self, pieces: Iterator[list[T]]) -> list[T]:
        """Have all of it done; the engine does a step between two pieces."""
        found = list[T]()
        while (piece := await self._ask(lambda: next(pieces, None))) is not None:
            found += piece
        return found

    async def _ask(self, fn: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(_TIMEOUT):
                return await asyncio.wrap_future(self._thread.submit(fn))
        except TimeoutError as error:
            message = "the engine is in a long step; try again later"
            raise UnavailableError(message, retry_after=RETRY_AFTER) from error
