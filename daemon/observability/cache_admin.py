"""Views of the cache, and pins: for `umbel cache` and `/cache`.

The cache belongs to the MLX thread, which answers between two steps.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ...cachestore.check import examine
from ...cachestore.errors import PinError
from ...cachestore.node import TrieNode, as_tokens
from ...cachestore.pins import PinDescription, Pins
from ...cachestore.prefix_cache import PrefixCache
from ...cachestore.trie import RadixTrie
from ...cachestore.tries import SHARED, CacheStatistics
from ...scheduler.errors import UnavailableError
from ...scheduler.limits import RETRY_AFTER
from ...scheduler.thread import MLXThread
from ..http.bodies import CheckedBody
from ..http.failures import APIError
from ..models.memory_budget import clock_of_uses
from ..quoting import printable

T = TypeVar("T")
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Tier = Literal["memory", "disk"]

_TIMEOUT = 60.0  # seconds; a long step may be under way
_FIRST_TOKENS = 32
_FIRST_CHARACTERS = 64
_MOST_CONVERSATIONS = 3
_AT_ONCE = 256  # nodes that are described between two steps
_EARLIEST = 10**12  # recency on disk below it has no time: older files counted uses from 1


class PinRequest(CheckedBody, forbid_unknown_fields=True):
    """The body of `POST /cache/pins`: a system prompt under a name, or a conversation.

    Attributes:
        name: of the pin; a conversation has its own.
        system: text of the system prompt.
        conversation: as the caller's requests named it.
        shared: all tenants' requests may begin with the system prompt's state.
    """

    name: Name | None = None
    system: str | None = None
    conversation: Name | None = None
    shared: bool = False

    def refuse_unsupported(self) -> None:
        """Refuse a body that is not one of the two.

        Raises:
            APIError: it is both or none, or lacks a name, or shares a conversation.
        """
        if (self.system is None) == (self.conversation is None):
            raise APIError(400, "send either a system prompt or a conversation to pin")
        if self.system is not None and not (self.name and self.system):
            raise APIError(400, "a system prompt is pinned under a name", param="name")
        if self.shared and self.conversation is not None:
            raise APIError(400, "a system prompt can be shared, no conversation", param="shared")


class NodeDescription(msgspec.Struct):
    """One node of the trie, as its tenant sees it.

    Attributes:
        tenant: its owner.
        shared: all tenants' requests can begin with it.
        depth: nodes above it.
        start: offset of its first token.
        end: offset after its last token.
        text: its first words, without special tokens, escaped where they do not print.
        conversations: the newest conversations through it, three at most.
        others: number of its other conversations.
        tiers: places of its state.
        bytes: of its tokens' state in memory.
        checkpoint_bytes: of the whole state at its end; 0 without one in memory.
        pins: open leases on it.
        age: seconds since its last use; None if that is not known.
        last_used: recency; larger is later.
        children: edges that go on from it.
    """

    tenant: str
    shared: bool
    depth: int
    start: int
    end: int
    text: str
    conversations: list[str]
    others: int
    tiers: list[Tier]
    bytes: int
    checkpoint_bytes: int
    pins: int
    age: float | None
    last_used: int
    children: int


class CacheAdmin:
    """Asks the MLX thread between two steps; long answers come in pieces.

    Args:
        thread: that owns the cache.
        cache: of one model.
        read: returns the text of a token, in bytes; empty for special ones.
    """

    def __init__(self, thread: MLXThread, cache: PrefixCache, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._thread = thread
        self._cache = cache

    async def statistics(self, tenant: str | None) -> CacheStatistics:
        """Describe a tenant's state, or all for None. Pins are not counted as leases."""
        found, pins = await self._ask(
            lambda: (self._cache.tries.statistics(tenant), len(self._cache.pins.leases(tenant)))
        )
        return replace(found, leases=found.leases - pins)

    async def nodes(self, tenant: str | None) -> list[NodeDescription]:
        """Describe the nodes of a tenant and the shared ones, or all for None."""
        found = await self._collect(_look(self._cache, tenant))
        return await asyncio.to_thread(self._with_text, found)

    def _with_text(self, found: list[tuple[NodeDescription, list[int]]]) -> list[NodeDescription]:
        for description, tokens in found:
            written = b"".join(map(self._read, tokens)).decode(errors="ignore")
            description.text = printable(" ".join(written.split()))[:_FIRST_CHARACTERS]
        return [description for description, _ in found]

    async def verify(self) -> list[str]:
        """Check the invariants; describe violations."""
        return await self._collect(examine(self._cache))

    async def clear(self, tenant: str) -> int:
        """Forget a tenant's state unless it runs or is pinned; returns the number of tokens."""
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

        def pin() -> PinDescription:
            tokens = dict(self._cache.pins.conversations(tenant)).get(name)
            if tokens is None:
                raise PinError(f"no conversation {name!r} of yours has been here lately")
            return self._cache.pins.pin(tenant, name, tokens, operator=operator)

        return await self._ask(pin)

    async def unpin(self, tenant: str, name: str) -> bool:
        """Release a pin; False if there is none of that name."""
        return await self._ask(lambda: self._cache.pins.unpin(tenant, name))

    async def _collect(self, pieces: Iterator[list[T]]) -> list[T]:
        """Collect all pieces; the engine does a step between two of them."""
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


def _look(
    cache: PrefixCache, tenant: str | None
) -> Iterator[list[tuple[NodeDescription, list[int]]]]:
    """Describe nodes in pieces, with their first tokens. Belongs to the MLX thread.

    A trie's nodes come together, parents first. The cache may change between two pieces.

    Args:
        cache: of one model.
        tenant: its nodes, and the shared ones; None for all.
    """
    now = clock_of_uses()
    for namespace, trie in cache.tries.items():
        whose, nodes = namespace.tenant, list[TrieNode]()
        through: dict[TrieNode, list[str]] = {}
        if tenant in (None, whose):
            through, nodes = _conversations(trie, cache.pins, whose), list(trie.nodes())
        elif whose == SHARED:  # only pins hold any of it for long
            nodes = [node for node in trie.nodes() if node.ref_count]
        for first in range(0, len(nodes), _AT_ONCE):
            yield [
                (
                    _described(whose, node, through.get(node, []), now),
                    node.tokens[:_FIRST_TOKENS].tolist(),
                )
                for node in nodes[first : first + _AT_ONCE]
            ]


def _conversations(trie: RadixTrie, pins: Pins, tenant: str) -> dict[TrieNode, list[str]]:
    """List the conversations through each node, the newest first."""
    through: dict[TrieNode, list[str]] = {}
    for name, tokens in reversed(pins.conversations(tenant)):
        for node in trie.match(tokens).node.path():
            through.setdefault(node, []).append(name)
    return through


def _described(tenant: str, node: TrieNode, conversations: list[str], now: int) -> NodeDescription:
    last_used = max(node.last_used, node.checkpoint_used)
    tiers: list[Tier] = []
    if node.span is not None or node.checkpoint is not None:
        tiers.append("memory")
    if node.extents or node.persisted_checkpoint is not None:
        tiers.append("disk")
    return NodeDescription(
        tenant=tenant,
        shared=tenant == SHARED,
        depth=len(node.path()) - 1,
        start=node.start,
        end=node.end,
        text="",
        conversations=conversations[:_MOST_CONVERSATIONS],
        others=len(conversations[_MOST_CONVERSATIONS:]),
        tiers=tiers,
        bytes=0 if node.span is None else node.span.nbytes,
        checkpoint_bytes=0 if node.checkpoint is None else node.checkpoint.nbytes,
        pins=node.ref_count,
        age=max(0.0, (now - last_used) / 1000) if last_used >= _EARLIEST else None,
        last_used=last_used,
        children=len(node.children),
    )
