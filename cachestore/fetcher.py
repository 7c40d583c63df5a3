"""Brings what is on disk only back into memory, while the request that needs it waits.

Files are verified on the disk tier's reader; then the engine's thread reads a node at a time,
between its steps. What the disk does not give back is forgotten, with all that goes on from
it: a miss, and no error.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from .codec import Codec
from .disk import DiskTier, Record
from .ledger import Size
from .pieces import Piece
from .prefix_cache import Missing, Namespace, PrefixCache
from .trie import RadixTrie, Tokens, TrieNode

if TYPE_CHECKING:
    from concurrent.futures import Future

log = structlog.get_logger()


class Fetching(enum.Enum):
    """What comes of asking for state that is on disk."""

    NOTHING = enum.auto()
    """There is none that is not in memory."""
    BEGUN = enum.auto()
    """It is read from now on."""
    UNDER_WAY = enum.auto()
    """It is being read."""


@dataclass(eq=False)
class _Fetch:
    """What is being read: nodes, parents first, and which of their files are damaged."""

    trie: RadixTrie
    missing: Missing
    damaged: "Future[list[Record]]"


class Fetcher:
    """The way in. Belongs to the MLX thread.

    Args:
        cache: whose tries.
        tier: the disk.
        codec: knows what state is made of.
        make_room: makes room in memory for what is read; says whether there is.

    Attributes:
        page_ins: states that were read.
        misses: states that the disk did not give back.
    """

    def __init__(
        self, cache: PrefixCache, tier: DiskTier, codec: Codec, make_room: Callable[[Size], bool]
    ) -> None:
        self.page_ins = self.misses = 0
        self._cache = cache
        self._tier = tier
        self._codec = codec
        self._make_room = make_room
        self._fetches: list[_Fetch] = []

    @property
    def ready(self) -> bool:
        """Whether something is verified and waits to be read."""
        return any(fetch.damaged.done() for fetch in self._fetches)

    def want(self, namespace: Namespace, tokens: Tokens) -> Fetching:
        """Have what is on disk of a prompt read."""
        trie = self._cache.trie(namespace)
        if trie is None:
            return Fetching.NOTHING
        missing = self._cache.missing(trie, tokens)
        if not missing.nodes:
            return Fetching.NOTHING
        if any(node in fetch.missing.nodes for fetch in self._fetches for node in missing.nodes):
            return Fetching.UNDER_WAY
        records = {r.id: r for node in missing.nodes for r in missing.records(node)}
        self._fetches.append(_Fetch(trie, missing, self._tier.verify(list(records.values()))))
        return Fetching.BEGUN

    def step(self) -> None:
        """Read one node whose files were verified."""
        fetch = next((fetch for fetch in self._fetches if fetch.damaged.done()), None)
        if fetch is None:
            return
        if fetch.damaged.exception() is not None or not self._advance(fetch):
            self._fetches.remove(fetch)

    def _advance(self, fetch: _Fetch) -> bool:
        """Read a fetch's next node; False when there is no other, or no use in it."""
        node = fetch.missing.nodes.pop(0)
        if not _attached(fetch.trie, node):
            return False
        damaged = {record.id for record in fetch.damaged.result()}
        try:
            if any(record.id in damaged for record in fetch.missing.records(node)):
                raise ValueError("the file is damaged")  # noqa: TRY301  (handled as its reading)
            whole = node is fetch.missing.holder
            read = self._read_span(fetch.trie, node) and (
                not whole or self._read_checkpoint(fetch.trie, node)
            )
        except (OSError, ValueError) as error:
            log.warning("state on disk is lost", tokens=node.end, error=str(error))
            self._forget(fetch.trie, node)
            return False
        self._cache.refresh(node)
        return read and bool(fetch.missing.nodes)

    def _read_span(self, trie: RadixTrie, node: TrieNode) -> bool:
        if node.span is not None or not node.stored:
            return True
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.span is None:
            return False  # it was paged out again meanwhile
        if not self._make_room(Size(sum(map(_nbytes, node.stored)), len(node.stored))):
            return False
        files = [(p, p.start - p.record.start, p.stop - p.record.start) for p in node.stored]
        parts = [(self._tier.path(piece.record), start, stop) for piece, start, stop in files]
        trie.set_span(node, self._codec.load_span(parts))
        self.page_ins += 1
        return True

    def _read_checkpoint(self, trie: RadixTrie, node: TrieNode) -> bool:
        record = node.stored_checkpoint
        if node.checkpoint is not None or record is None:
            return True
        if not self._make_room(Size(record.nbytes, 1)):
            return False
        trie.set_checkpoint(node, self._codec.load_checkpoint(self._tier.path(record)))
        self.page_ins += 1
        return True

    def _forget(self, trie: RadixTrie, node: TrieNode) -> None:
        self.misses += 1
        if node.span is None and self._cache.layout.spans:
            trie.forget(node)
        else:
            trie.drop_stored_checkpoint(node)
            trie.prune(node)


def _attached(trie: RadixTrie, node: TrieNode) -> bool:
    """Whether a node is part of its trie still."""
    while node.parent is not None:
        if node.parent.children.get(int(node.tokens[0])) is not node:
            return False
        node = node.parent
    return node is trie.root


def _nbytes(piece: Piece) -> int:
    """What a piece takes in memory, by what its file takes on disk."""
    record = piece.record
    return record.nbytes * (piece.stop - piece.start) // (record.end - record.start)
