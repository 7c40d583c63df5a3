"""Brings state that is on disk only back into memory, while the request that needs it waits.

The disk tier verifies the files on a thread of its own; then the MLX thread reads a node at a time,
between its steps. Damaged state is forgotten, with all that goes on from it. A file that cannot be
read at present stays, and is tried again after a while. Both are a miss, and no error.
"""

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import structlog

from ..compaction import compact
from ..disk.tier import DiskTier, Verified
from ..errors import DamagedFileError, UnreadableFileError
from ..ledger import Size
from ..node import Extent, Tokens, TrieNode
from ..prefix_cache import PrefixCache
from ..record import Record
from ..restoration import Missing
from ..state import Checkpoint, Codec, Span
from ..trie import RadixTrie
from ..tries import Namespace

if TYPE_CHECKING:
    from concurrent.futures import Future

_UNREADABLE_FOR = 5.0  # seconds: a request that comes sooner computes the tokens itself
_MOST_READS = 3  # for one reader: its state may be paged out again before it is used

_clock = time.monotonic

log = structlog.get_logger()
T = TypeVar("T")


class PageInStatus(enum.Enum):
    """The answer to a request for state that is on disk."""

    NOTHING = enum.auto()  # all state that there is, is in memory
    ON_DISK = enum.auto()  # some state is on disk only, and is not being read
    BEGUN = enum.auto()  # it is read from now on
    UNDER_WAY = enum.auto()  # it is being read


@dataclass(eq=False)
class _Request:
    """Nodes that are being read, parents first, and the result of verifying their files."""

    missing: Missing
    asked: set[int]  # ids of the files that were asked for; others may have come since
    verified: "Future[Verified]"


class PageIn:
    """The way in. A reader is an object that waits for a prompt's state, and asks repeatedly."""

    def __init__(self, cache: PrefixCache, tier: DiskTier, codec: Codec) -> None:
        self.page_ins = 0  # states read
        self.asked_bytes = 0  # of files whose verification was asked for
        self._cache = cache
        self._tier = tier
        self._codec = codec
        self._requests: list[_Request] = []
        self._reads: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # by reader
        self._unreadable: dict[int, float] = {}  # files, and until when they are left alone
        # Of the state read last; all of a model's states are packed alike.
        self._span_buffers = self._checkpoint_buffers = 1

    @property
    def ready(self) -> bool:
        """True if something is verified and waits to be read."""
        return any(request.verified.done() for request in self._requests)

    def awaits(self, reader: object, namespace: Namespace, tokens: Tokens) -> bool:
        """Return True if a reader shall wait for a prompt's state. Nothing is read for it yet."""
        status = self._find(namespace, tokens)[0]
        may_read = self._reads.get(reader, 0) < _MOST_READS
        return status is PageInStatus.UNDER_WAY or (status is PageInStatus.ON_DISK and may_read)

    def wait_for(self, reader: object, namespace: Namespace, tokens: Tokens) -> bool:
        """Start to read a prompt's state on disk; return True if its reader waits for that."""
        if not self.awaits(reader, namespace, tokens):
            return False
        if self.request(namespace, tokens) is PageInStatus.BEGUN:
            self._reads[reader] = self._reads.get(reader, 0) + 1
        return True

    def request(self, namespace: Namespace, tokens: Tokens) -> PageInStatus:
        """Start to read a prompt's state on disk, unless it is being read."""
        status, missing = self._find(namespace, tokens)
        if status is not PageInStatus.ON_DISK or missing is None:
            return status
        records = {r.id: r for node in missing.nodes for r in missing.records(node)}
        verified = self._tier.verify(list(records.values()))
        self.asked_bytes += sum(record.nbytes for record in records.values())
        self._requests.append(_Request(missing, set(records), verified))
        return PageInStatus.BEGUN

    def _find(self, namespace: Namespace, tokens: Tokens) -> tuple[PageInStatus, Missing | None]:
        if self._cache.pins.is_awaited(namespace, tokens):
            return PageInStatus.UNDER_WAY, None
        trie, now = self._cache.trie_of(namespace, tokens), _clock()
        if trie is None:
            return PageInStatus.NOTHING, None
        self._unreadable = {file: end for file, end in self._unreadable.items() if end > now}
        missing = self._cache.restoration.missing(trie, tokens, self._unreadable)
        if not missing.nodes:
            return PageInStatus.NOTHING, None
        reading = (node for request in self._requests for node in request.missing.nodes)
        under_way = not set(missing.nodes).isdisjoint(reading)
        return PageInStatus.UNDER_WAY if under_way else PageInStatus.ON_DISK, missing

    def give_up(self) -> None:
        """Wait for nothing any more."""
        self._requests = []

    def step(self) -> None:
        """Read one node whose files were verified."""
        request = next((request for request in self._requests if request.verified.done()), None)
        if request is None:
            return
        if request.verified.exception() is not None or not self._advance(request):
            self._requests.remove(request)

    def _advance(self, request: _Request) -> bool:
        """Read a request's next node; False when there is no other, or no use in it."""
        trie, nodes, holder = request.missing
        node, asked = nodes.pop(0), request.asked
        cut = any(record.id not in asked for record in request.missing.records(node))
        if cut or not _is_attached(trie, node):
            return False  # it was forgotten, paged out, or cut, meanwhile
        verified = request.verified.result()
        read = self._read_span(trie, node, verified)
        if read and node is holder:
            read = self._read_checkpoint(trie, node, verified)
        if read:
            self._cache.refresh(trie, node)
            if not nodes:
                compact(trie, node, self._cache.longest)  # before a request leases the path
        return read and bool(nodes)

    def _read_span(self, trie: RadixTrie, node: TrieNode, verified: Verified) -> bool:
        """Read a node's span if it is not in memory; return True if it is now."""
        if node.span is not None or not node.extents:
            return True
        above = node.parent or trie.root
        if above is not trie.root and above.span is None:
            return False  # it was paged out again meanwhile
        parts = [
            (self._tier.path(p.record), p.start - p.record.start, p.stop - p.record.start)
            for p in node.extents
        ]

        def load() -> Span:
            span: Span = self._codec.load_span(parts)
            if span.length != len(node.tokens):
                span.close()
                raise ValueError("the files hold fewer tokens than the index says")
            return span

        need = Size(sum(map(_nbytes, node.extents)), self._span_buffers)
        records = [extent.record for extent in node.extents]
        if not self._room_below(trie, above, need):
            return False
        span = self._load(node, records, verified, load, lambda: trie.forget(node))
        if span is None:
            return False
        trie.set_span(node, span)
        self._span_buffers = span.buffers
        return True

    def _read_checkpoint(self, trie: RadixTrie, node: TrieNode, verified: Verified) -> bool:
        """Read a node's checkpoint if it is not in memory; return True if it is now."""
        record = node.persisted_checkpoint
        if node.checkpoint is not None or record is None:
            return node.checkpoint is not None

        def load() -> Checkpoint:
            checkpoint: Checkpoint = self._codec.load_checkpoint(self._tier.path(record))
            if checkpoint.offset != node.end:
                checkpoint.close()
                raise ValueError("the file holds another offset's state")
            return checkpoint

        def forget() -> None:
            trie.persistence.drop_checkpoint(node)
            trie.prune(node)

        if not self._room_below(trie, node, Size(record.nbytes, self._checkpoint_buffers)):
            return False
        checkpoint = self._load(node, [record], verified, load, forget)
        if checkpoint is None:
            return False
        trie.set_checkpoint(node, checkpoint)
        self._checkpoint_buffers = checkpoint.buffers
        return True

    def _load(
        self,
        node: TrieNode,
        records: list[Record],
        verified: Verified,
        load: Callable[[], T],
        forget: Callable[[], None],
    ) -> T | None:
        """Read state, and forget it if it is damaged; None if it cannot be read."""
        try:
            _check(verified, records)
            state = load()
        except Exception as error:  # noqa: BLE001  (native code may raise anything)
            if not self._is_readable_later(records, error):
                forget()
                self._cache.tries.drop_empty()
                # The verifier has warned of a damaged file, and named it.
                level = logging.INFO if isinstance(error, DamagedFileError) else logging.WARNING
                log.log(level, "state on disk is lost", tokens=node.end, error=str(error))
            return None
        self.page_ins += 1
        return state

    def _room_below(self, trie: RadixTrie, node: TrieNode, need: Size) -> bool:
        """Make room, but not at the cost of the path that the state belongs below."""
        trie.retain(node)
        try:
            return self._cache.pool.make_room(need)
        finally:
            trie.release(node)

    def _is_readable_later(self, records: list[Record], error: Exception) -> bool:
        """Return True if the file is there, and leave it alone for now."""
        if isinstance(error, FileNotFoundError):
            return False
        if not isinstance(error, OSError | MemoryError | UnreadableFileError):
            return False
        until = _clock() + _UNREADABLE_FOR
        self._unreadable |= dict.fromkeys((record.id for record in records), until)
        if not isinstance(error, UnreadableFileError):  # the tier has counted that one
            self._tier.cannot_read(str(error))
        return True


def _check(verified: Verified, records: list[Record]) -> None:
    if any(record in verified.damaged for record in records):
        raise DamagedFileError("a file of it is damaged")
    if any(record in verified.unreadable for record in records):
        raise UnreadableFileError("a file of it cannot be read at present")


def _is_attached(trie: RadixTrie, node: TrieNode) -> bool:
    """Return True if a node is still part of its trie."""
    while node.parent is not None:
        if node.parent.children.get(int(node.tokens[0])) is not node:
            return False
        node = node.parent
    return node is trie.root


def _nbytes(extent: Extent) -> int:
    """Bytes of an extent in memory, by those of its file."""
    record = extent.record
    return record.nbytes * (extent.stop - extent.start) // (record.end - record.start)
