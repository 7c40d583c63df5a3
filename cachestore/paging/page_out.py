"""Hands what a trie has and the disk lacks to the disk tier's writer, oldest first.

So its memory can be given up at once when there is need, and a restart finds it. Only what is
new is written: a node that grew is written from where the disk's copy of it ends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import structlog

from ..disk.files import HostTensor, Payload
from ..disk.tier import DiskTier
from ..disk.writer import WriteJob, Written
from ..extents import Extent
from ..ledger import Account, Kind, Size
from ..node import Tokens, TrieNode, path_tokens, size_in_memory
from ..persistence import Persistence
from ..prefix_cache import PrefixCache
from ..record import Record, RecordKind, hasher, record_digest
from ..spans import Loan, lend, size_of, size_of_storage
from ..state import Checkpoint, Span
from ..trie import RadixTrie
from ..tries import Namespace
from .codec import Codec, Exported

_AT_ONCE = 4  # nodes handed over between two steps: that takes the engine's time
_COPIED = 256 << 20  # bytes of copies after which no more nodes are: four long ones took 180 ms
_DIRTY_SHARE = 16  # beyond one part in this many of the budget, state is written beside requests
_REST = 5.0  # seconds that nothing is handed over after the disk took nothing, or a write failed

_clock = time.monotonic

log = structlog.get_logger()


@dataclass(eq=False)
class _Job:
    """A write under way: its node, and the tokens that lead to the node's end.

    Attributes:
        paging: what only the writer has in memory: copies, or a checkpoint that was given up.
        whole: the checkpoint that is written where it lies, if it is one.
        loan: of the storage that is written where it lies, if it is a span.
    """

    namespace: Namespace
    path: Tokens
    node: TrieNode
    paging: Account
    whole: Checkpoint | None = None
    loan: Loan | None = None

    def left(self, checkpoint: Checkpoint) -> None:
        """The trie gives a checkpoint up: what is written where it lies is only here then."""
        if checkpoint is self.whole:
            self.paging.set(size_of(checkpoint))

    def end(self) -> None:
        """Hold nothing any more."""
        self.paging.close()
        if self.loan is not None:
            self.loan.give_back()


class PageOut:
    """The way out. Belongs to the MLX thread.

    Args:
        cache: whose tries.
        tier: the disk.
        codec: knows what state is made of.
        make_room: makes room in memory for copies; says whether there is.

    Attributes:
        failures: states that the disk did not take.
    """

    def __init__(
        self, cache: PrefixCache, tier: DiskTier, codec: Codec, make_room: Callable[[Size], bool]
    ) -> None:
        self.failures = 0
        self._cache = cache
        self._tier = tier
        self._codec = codec
        self._make_room = make_room
        self._jobs: dict[_Job, None] = {}
        self._copied = 0  # bytes, since the last step
        self._full = False  # until what was taken is written
        self._rests_until = 0.0
        # Size of the tries, number of dirty nodes and the budget at the last count of dirty bytes.
        self._counted: tuple[Size, int, int] | None = None
        self._was_over_limit = False

    @property
    def pending(self) -> bool:
        """True if a write is under way, or could begin at present."""
        dirty = any(trie.persistence.dirty for trie in self._cache.tries)
        return bool(self._jobs) or (dirty and not self._rests)

    @property
    def writing(self) -> bool:
        """True if a write is under way."""
        return bool(self._jobs)

    @property
    def _rests(self) -> bool:
        return _clock() < self._rests_until

    @property
    def unwritten(self) -> bool:
        """True if state is dirty, would be taken by the tier, and no write is under way."""
        return self.pending and not self._jobs

    def step(self, *, busy: bool = False) -> None:
        """Take in finished writes, and hand over the next nodes.

        Args:
            busy: sequences run. Nodes are handed over only if more than a sixteenth of the memory
                budget is dirty: that much is lost if the process is killed.
        """
        for written in self._tier.completed():
            self._take(written)
        self._full = self._full and bool(self._jobs)
        if not (self._full or self._rests) and (not busy or self._over_limit):
            self._hand_over()

    @property
    def _over_limit(self) -> bool:
        """True if more than a sixteenth of the budget is dirty. Counted only after a change."""
        tries, budget = self._cache.tries, self._cache.pool.budget.nbytes
        counted = tries.size, sum(len(trie.persistence.dirty) for trie in tries), budget
        if counted != self._counted:
            dirty = (node for trie in tries for node in trie.persistence.dirty)
            nbytes = sum(size_in_memory(node).nbytes for node in dirty)
            self._counted, self._was_over_limit = counted, nbytes * _DIRTY_SHARE > budget
        return self._was_over_limit

    def give_up(self) -> None:
        """Hold nothing for the disk any more: it is the cache's alone, to be evicted like any."""
        for job in self._jobs:
            job.end()
            Persistence.forget_writers(job.node)  # which may be in no trie any more
        self._jobs = {}
        for trie in self._cache.tries:
            for node in trie.nodes():
                trie.persistence.forget_writers(node)

    def _hand_over(self) -> None:
        left, self._copied = _AT_ONCE, 0
        for namespace, trie in self._cache.tries.items():
            dirty = trie.persistence.dirty
            for node in [node for node in dirty if not node.writers]:
                if node not in dirty:
                    continue  # it was forgotten: another one's copy needed room
                if not left or self._copied >= _COPIED:
                    return
                taken = self._write(namespace, trie, node)
                if taken is False:
                    self._full = bool(self._jobs)
                    self._rests_until = 0.0 if self._full else _clock() + _REST
                    return
                left -= taken is True

    def _write(self, namespace: Namespace, trie: RadixTrie, node: TrieNode) -> bool | None:
        """Hand over a node's state; False when no more is taken at present, None without any."""
        if not _reachable(node):
            if node.parent not in trie.persistence.dirty:
                trie.persistence.mark_clean(node)
        elif node.span is not None and node.persisted_end < node.end:
            job = self._begin(namespace, node, node.end)
            return self._unless_it_fails(trie, job, partial(self._write_span, job, node.span))
        elif node.checkpoint is not None and node.persisted_checkpoint is None:
            job = self._begin(namespace, node, node.start)
            write = partial(self._write_checkpoint, job, node.checkpoint)
            return self._unless_it_fails(trie, job, write)
        else:
            trie.persistence.mark_clean(node)
        return None

    def _unless_it_fails(
        self, trie: RadixTrie, job: _Job, write: Callable[[], bool]
    ) -> bool | None:
        """Hand a state over; one for which that fails stays in memory only, and others do not."""
        try:
            return write()
        except Exception as error:  # noqa: BLE001  (native code may raise anything)
            log.warning("state cannot be written", tokens=job.node.end, error=str(error))
            self.failures += 1
            self._drop(job)
            trie.persistence.mark_clean(job.node)
            return None

    def _write_span(self, job: _Job, span: Span) -> bool:
        node, start = job.node, job.node.persisted_end
        if self._codec.copies:
            nbytes = span.nbytes // span.length * (node.end - start)
            if not self._count_copy(job, Size(nbytes, span.storage.buffers)):
                return False
        elif not self._may_lend(span):
            return self._drop(job)
        else:
            job.loan = lend(span, self._cache.ledger)
        first, end = start - node.start, len(node.tokens)
        exported = self._codec.export_span(span, first, end)
        return self._submit(job, RecordKind.SPAN, start, exported)

    def _write_checkpoint(self, job: _Job, checkpoint: Checkpoint) -> bool:
        node = job.node
        if not self._codec.copies:
            job.whole = checkpoint
        elif not self._count_copy(job, size_of(checkpoint)):
            return False
        exported = self._codec.export_checkpoint(checkpoint)
        # Where no spans are kept, nothing else on disk tells which tokens lead there.
        start = node.end if self._cache.layout.spans else 0
        return self._submit(job, RecordKind.CHECKPOINT, start, exported)

    def _begin(self, namespace: Namespace, node: TrieNode, until: int) -> _Job:
        """Begin to write a node's state: from now on, making room does not take it away."""
        paging = self._cache.ledger.account(Kind.PAGING)
        job = _Job(namespace, path_tokens(node), node, paging)
        Persistence.begin_write(node, job, until)
        return job

    def _count_copy(self, job: _Job, size: Size) -> bool:
        """Make room for a copy and count it; where there is none, the job is dropped."""
        if not self._make_room(size):
            return self._drop(job)
        job.paging.set(size)
        self._copied += size.nbytes
        return True

    def _may_lend(self, span: Span) -> bool:
        """Return True if little enough is lent: lent state frees nothing when the trie drops it."""
        loans = {job.loan: job.loan.size.nbytes for job in self._jobs if job.loan is not None}
        if not loans or span.storage.loan is not None:
            return True
        return sum(loans.values()) + size_of_storage(span).nbytes <= self._tier.queue_bytes

    @staticmethod
    def _drop(job: _Job) -> Literal[False]:
        """Do not write after all."""
        Persistence.end_write(job.node, job)
        job.end()
        return False

    def _submit(self, job: _Job, kind: RecordKind, start: int, exported: Exported) -> bool:
        if not self._tier.write(_write_job(job, kind, start, exported)):
            return self._drop(job)
        self._jobs[job] = None
        return True

    def _take(self, written: Written) -> None:
        job = written.token
        assert isinstance(job, _Job)  # noqa: S101  (the tier returns what it was given)
        del self._jobs[job]
        job.end()
        trie, record = self._cache.tries.get(job.namespace), written.record
        parts = [] if trie is None else trie.match(job.path).node.path()
        for node in (*parts, job.node):
            Persistence.end_write(node, job)
        if parts:
            _end_below(parts[-1], job)
        if record is None:
            self._failed(job, parts, trie)
            return
        self._cache.tries.files.hold([record])  # until it is known who uses it
        if trie is not None:
            _attach(trie, job.path, record)
            for node in parts:
                if node.persisted:
                    trie.persistence.mark_clean(node)
        self._cache.tries.files.drop([record])

    def _failed(self, job: _Job, parts: list[TrieNode], trie: RadixTrie | None) -> None:
        """Try again later, after all others: a write that always fails must hold up none."""
        self.failures += 1
        self._rests_until = _clock() + _REST
        for node in parts:
            if trie is not None and node.end > job.node.start:
                trie.persistence.postpone(node)


def _end_below(node: TrieNode, job: _Job) -> None:
    """End a write where what was written was joined with what follows, and cut from it again."""
    pending = [node]
    while pending:
        below = [child for child in pending.pop().children.values() if job in child.writers]
        for child in below:
            Persistence.end_write(child, job)
        pending += below


def _write_job(job: _Job, kind: RecordKind, start: int, exported: Exported) -> WriteJob:
    """Describe for the disk tier what to write, from an offset of the path on."""
    tenant, fingerprint = job.namespace[:2]
    end, tokens = len(job.path), job.path[start:].tobytes()
    hashed = hasher()
    hashed.update(job.path[:start].tobytes())
    prefix = hashed.digest()
    hashed.update(tokens)
    path = hashed.digest()
    tensors = {name: HostTensor(*tensor) for name, tensor in exported.tensors.items()}
    return WriteJob(
        token=job,
        kind=kind,
        tenant=tenant,
        start=start,
        end=end,
        prefix=prefix,
        digest=record_digest(fingerprint, tenant, kind.value, start, end, path),
        tokens=tokens,
        used=max(job.node.last_used, job.node.checkpoint_used),
        payload=Payload(tensors, exported.metadata),
    )


def _reachable(node: TrieNode) -> bool:
    """Return True if the disk has, or is about to have, all that comes before a node."""
    parent = node.parent
    if parent is None or parent.parent is None or (parent.span is None and not parent.extents):
        return True
    return parent.persisted_soon


def _attach(trie: RadixTrie, path: Tokens, record: Record) -> None:
    """Note which state a new file has, as far as the trie still has it.

    Args:
        trie: whose state was written. It may have changed meanwhile.
        path: tokens that lead to its end, from the trie's root on.
        record: of the file.
    """
    if record.kind is RecordKind.SPAN:
        _attach_span(trie, path, record)
    else:
        _attach_checkpoint(trie, path, record)


def _attach_span(trie: RadixTrie, path: Tokens, record: Record) -> None:
    """Note in the nodes that a file has their tokens; they may have been cut or joined."""
    deepest, known = trie.match(path)
    if known < len(path):
        return  # the rest was forgotten, and shall not come back with the file
    for node in deepest.path():
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.persisted_end < parent.end:
            return
        start, stop = node.persisted_end, min(node.end, known)
        if record.start <= start < stop:
            trie.persistence.add_extent(node, Extent(record, start, stop))


def _attach_checkpoint(trie: RadixTrie, path: Tokens, record: Record) -> None:
    node, known = trie.match(path)
    ends = known == len(path) == node.end
    if ends and node.persisted_checkpoint is None and node.tokens_persisted:
        trie.persistence.set_checkpoint(node, record)
