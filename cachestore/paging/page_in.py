"""Brings what is on disk only back into memory, while the request that needs it waits.

Files are verified on the disk tier's reader; then the engine's thread reads a node at a time,
between its steps. What is damaged is forgotten, with all that goes on from it. What cannot be
read at present stays where it is, and is asked for again after a while. Both are a miss, and
no error: the request computes the tokens itself.
"""

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from ..disk.tier import DiskTier
from ..disk.verifier import Verified
from ..errors import DamagedFileError, UnreadableFileError
from ..extents import Piece
from ..forest import Namespace
from ..ledger import Size
from ..node import Tokens, TrieNode
from ..prefix_cache import Missing, PrefixCache
from ..record import Record
from ..state import Checkpoint, Span
from ..trie import RadixTrie
from .codec import Codec
from .resting import Resting

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


class Patience:
    """How often somebody has state read: it may be paged out again before it is used."""

    _ATTEMPTS = 3

    def __init__(self) -> None:
        self._begun = 0

    @property
    def ended(self) -> bool:
        """Whether to make do with what there is."""
        return self._begun > self._ATTEMPTS

    def waits(self, fetching: Fetching) -> bool:
        """Whether to wait for what was asked for."""
        self._begun += fetching is Fetching.BEGUN
        return fetching is not Fetching.NOTHING and not self.ended


@dataclass(eq=False)
class _Fetch:
    """What is being read: nodes, parents first, and what came of verifying their files.

    Attributes:
        asked: the ids of the files that were asked for; others may have come since.
    """

    trie: RadixTrie
    missing: Missing
    asked: set[int]
    verified: "Future[Verified]"


class Fetcher:
    """The way in. Belongs to the MLX thread.

    Args:
        cache: whose tries.
        tier: the disk.
        codec: knows what state is made of.
        make_room: makes room in memory for what is read; says whether there is.

    Attributes:
        page_ins: states that were read.
    """

    def __init__(
        self, cache: PrefixCache, tier: DiskTier, codec: Codec, make_room: Callable[[Size], bool]
    ) -> None:
        self.page_ins = 0
        self._cache = cache
        self._tier = tier
        self._codec = codec
        self._make_room = make_room
        self._fetches: list[_Fetch] = []
        self._unreadable = Resting()
        # Of what was read last; all of a model's states are packed alike.
        self._span_buffers = self._checkpoint_buffers = 1

    @property
    def ready(self) -> bool:
        """Whether something is verified and waits to be read."""
        return any(fetch.verified.done() for fetch in self._fetches)

    def want(self, namespace: Namespace, tokens: Tokens) -> Fetching:
        """Have what is on disk of a prompt read."""
        trie = self._cache.trie(namespace)
        if trie is None:
            return Fetching.NOTHING
        missing = self._cache.missing(trie, tokens, self._unreadable)
        if not missing.nodes:
            return Fetching.NOTHING
        if any(node in fetch.missing.nodes for fetch in self._fetches for node in missing.nodes):
            return Fetching.UNDER_WAY
        records = {r.id: r for node in missing.nodes for r in missing.records(node)}
        verified = self._tier.verify(list(records.values()))
        self._fetches.append(_Fetch(trie, missing, set(records), verified))
        return Fetching.BEGUN

    def give_up(self) -> None:
        """Wait for nothing any more."""
        self._fetches = []

    def step(self) -> None:
        """Read one node whose files were verified."""
        fetch = next((fetch for fetch in self._fetches if fetch.verified.done()), None)
        if fetch is None:
            return
        if fetch.verified.exception() is not None or not self._advance(fetch):
            self._fetches.remove(fetch)

    def _advance(self, fetch: _Fetch) -> bool:
        """Read a fetch's next node; False when there is no other, or no use in it."""
        node = fetch.missing.nodes.pop(0)
        if not _attached(fetch.trie, node):
            return False
        if any(record.id not in fetch.asked for record in fetch.missing.records(node)):
            return False  # it was paged out, or cut, meanwhile
        verified = fetch.verified.result()
        read = self._read_span(fetch.trie, node, verified)
        if read and node is fetch.missing.holder:
            read = self._read_checkpoint(fetch.trie, node, verified)
        if read:
            self._cache.refresh(node)
        return read and bool(fetch.missing.nodes)

    def _read_span(self, trie: RadixTrie, node: TrieNode, verified: Verified) -> bool:
        """Have a node's span in memory; whether it is."""
        if node.span is not None or not node.stored:
            return True
        nbytes = sum(map(_nbytes, node.stored))
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.span is None:
            return False  # it was paged out again meanwhile
        if not self._room_below(parent, Size(nbytes, self._span_buffers)):
            return False
        records = [piece.record for piece in node.stored]
        try:
            _check(verified, records)
            span = self._load(node)
        except (FileNotFoundError, ValueError, DamagedFileError) as error:
            trie.forget(node)
            self._lost(node, error)
            return False
        except (OSError, MemoryError, UnreadableFileError) as error:
            self._missed(records, error)
            return False
        trie.set_span(node, span)
        self._span_buffers = span.buffers
        self.page_ins += 1
        return True

    def _load(self, node: TrieNode) -> Span:
        files = [(p, p.start - p.record.start, p.stop - p.record.start) for p in node.stored]
        parts = [(self._tier.path(piece.record), start, stop) for piece, start, stop in files]
        span: Span = self._codec.load_span(parts)
        if span.length != len(node.tokens):
            span.close()
            raise ValueError("the files hold fewer tokens than the index says")
        return span

    def _read_checkpoint(self, trie: RadixTrie, node: TrieNode, verified: Verified) -> bool:
        """Have a node's checkpoint in memory; whether it is."""
        record = node.stored_checkpoint
        if node.checkpoint is not None or record is None:
            return node.checkpoint is not None
        if not self._room_below(node, Size(record.nbytes, self._checkpoint_buffers)):
            return False
        try:
            _check(verified, [record])
            checkpoint: Checkpoint = self._codec.load_checkpoint(self._tier.path(record))
            if checkpoint.offset != node.end:
                checkpoint.close()
                raise ValueError("the file holds another offset's state")  # noqa: TRY301
        except (FileNotFoundError, ValueError, DamagedFileError) as error:
            trie.drop_stored_checkpoint(node)
            trie.prune(node)
            self._lost(node, error)
            return False
        except (OSError, MemoryError, UnreadableFileError) as error:
            self._missed([record], error)
            return False
        trie.set_checkpoint(node, checkpoint)
        self._checkpoint_buffers = checkpoint.buffers
        self.page_ins += 1
        return True

    def _room_below(self, node: TrieNode | None, need: Size) -> bool:
        """Make room, but not at the cost of what is gone on from."""
        path = [] if node is None else node.path()
        for held in path:
            held.pins += 1
        try:
            return self._make_room(need)
        finally:
            for held in path:
                held.pins -= 1

    def _missed(self, records: list[Record], error: Exception) -> None:
        """Leave alone for a while what cannot be read at present."""
        self._unreadable.add(record.id for record in records)
        if not isinstance(error, UnreadableFileError):  # of that the tier knows
            self._tier.cannot_read(str(error))

    def _lost(self, node: TrieNode, error: Exception) -> None:
        self._cache.drop_empty_tries()
        # Who found a file damaged has warned, and named it.
        level = logging.INFO if isinstance(error, DamagedFileError) else logging.WARNING
        log.log(level, "state on disk is lost", tokens=node.end, error=str(error))


def _check(verified: Verified, records: list[Record]) -> None:
    if any(record in verified.damaged for record in records):
        raise DamagedFileError("a file of it is damaged")
    if any(record in verified.unreadable for record in records):
        raise UnreadableFileError("a file of it cannot be read at present")


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
