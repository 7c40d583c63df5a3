"""The nodes of the cache as their tenant sees them: what they hold, where, of whom, since when."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from ...cachestore.node import TrieNode
from ...cachestore.pins import Pins
from ...cachestore.prefix_cache import PrefixCache
from ...cachestore.trie import RadixTrie
from ...cachestore.tries import SHARED
from ..models.memory_budget import clock_of_uses
from ..quoting import printable

Tier = Literal["memory", "disk"]

_FIRST_TOKENS = 32
_FIRST_CHARACTERS = 64
_MOST_CONVERSATIONS = 3
_AT_ONCE = 256  # nodes that are looked at in one piece
# Before state carried the time of its last use, recency counted uses from 1.
_EARLIEST = 10**12


class NodeDescription(msgspec.Struct):
    """One node of the trie.

    Attributes:
        tenant: whose it is.
        shared: whether all tenants' requests can begin with it.
        depth: nodes above it.
        start: offset of its first token.
        end: offset after its last token.
        text: its first words, without special tokens; what does not print is escaped.
        conversations: of late that go through it: the newest of them, and no more than three.
        others: how many more conversations do.
        tiers: where its state lies.
        bytes: of its tokens' state in memory.
        checkpoint_bytes: of the whole state at its end; 0 without one in memory.
        pins: open leases on it.
        age: seconds since its last use; None where that is not known.
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


class Seen(NamedTuple):
    """A node as the MLX thread saw it, and its first tokens, which are no text yet."""

    description: NodeDescription
    tokens: list[int]


def look(cache: PrefixCache, tenant: str | None) -> Iterator[list[Seen]]:
    """Look at nodes, a trie's together and parents first. Belongs to the MLX thread.

    The cache may change between two pieces of them.

    Args:
        cache: where.
        tenant: whose, but for those that are shared; None for everybody's.
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
            piece = nodes[first : first + _AT_ONCE]
            yield [_see(whose, node, through.get(node, []), now) for node in piece]


def described(seen: list[Seen], read: Callable[[int], bytes]) -> list[NodeDescription]:
    """Add the text.

    Args:
        seen: from `look`.
        read: says what a token writes; nothing, for special ones.
    """
    for description, tokens in seen:
        description.text = first_words(b"".join(map(read, tokens)))
    return [description for description, _ in seen]


def first_words(written: bytes) -> str:
    """Cut a text down to one short line that a terminal can show."""
    text = " ".join(written.decode(errors="ignore").split())
    return printable(text)[:_FIRST_CHARACTERS]


def _conversations(trie: RadixTrie, pins: Pins, tenant: str) -> dict[TrieNode, list[str]]:
    """Say which conversations go through which nodes, the newest first."""
    through: dict[TrieNode, list[str]] = {}
    for name, tokens in reversed(pins.conversations(tenant)):
        for node in trie.match(tokens).node.path():
            through.setdefault(node, []).append(name)
    return through


def _see(tenant: str, node: TrieNode, conversations: list[str], now: int) -> Seen:
    last_used = max(node.last_used, node.checkpoint_used)
    description = NodeDescription(
        tenant=tenant,
        shared=tenant == SHARED,
        depth=len(node.path()) - 1,
        start=node.start,
        end=node.end,
        text="",
        conversations=conversations[:_MOST_CONVERSATIONS],
        others=len(conversations[_MOST_CONVERSATIONS:]),
        tiers=_tiers(node),
        bytes=0 if node.span is None else node.span.nbytes,
        checkpoint_bytes=0 if node.checkpoint is None else node.checkpoint.nbytes,
        pins=node.ref_count,
        age=max(0.0, (now - last_used) / 1000) if last_used >= _EARLIEST else None,
        last_used=last_used,
        children=len(node.children),
    )
    return Seen(description, node.tokens[:_FIRST_TOKENS].tolist())


def _tiers(node: TrieNode) -> list[Tier]:
    tiers: list[Tier] = []
    if node.span is not None or node.checkpoint is not None:
        tiers.append("memory")
    if node.extents or node.persisted_checkpoint is not None:
        tiers.append("disk")
    return tiers
