"""Hands state that the disk lacks to the disk tier's writer, oldest first.

So its memory can be given up at once when there is need, and a restart finds it. Of a node that
grew, only the new tokens are written.
"""

import time
from dataclasses import dataclass

import structlog

from ..disk.files import HostTensor, Payload
from ..disk.queue import WriteJob, Written
from ..disk.tier import DiskTier
from ..ledger import Account, Kind, Size
from ..node import Extent, Persistence, Tokens, TrieNode, path_tokens, size_in_memory
from ..prefix_cache import PrefixCache
from ..record import Record, RecordKind, digest, record_digest
from ..spans import Loan, size_of, size_of_storage
from ..state import Checkpoint, Codec, Exported, Span
from ..trie import RadixTrie
from ..tries import Namespace

_AT_ONCE = 4  # nodes handed over between two steps: that takes the engine's time
_COPIED = 256 << 20  # bytes of copies after which no more nodes are: four long ones took 180 ms
_DIRTY_SHARE = 16  # beyond one part in this many of the budget, state is written beside requests
_REST = 5.0  # seconds that nothing is handed over after the disk took nothing, or a write failed

_clock = time.monotonic

log = structlog.get_logger()


@dataclass(eq=False)
class _Job:
    """A write under way: its node, and the tokens that lead to the node's end."""

    namespace: Namespace
    path: Tokens
    node: TrieNode
    paging: Account  # memory that only the writer has: copies, or a checkpoint that was given up
    whole: Checkpoint | None = None  # the checkpoint that is written where it lies
    loan: Loan | None = None  # of the storage that is written where it lies

    def left(self, checkpoint: Checkpoint) -> None:
        """The trie gives a checkpoint up: only the writer has it now."""
        if checkpoint is self.whole:
            self.paging.set(size_of(checkpoint))

    def end(self) -> None:
        """Hold nothing any more."""
        self.paging.close()
        if self.loan is not None:
            self.loan.give_back()

    def record(self, fingerprint: str, kind: RecordKind, start: int) -> Record:
        """Describe the file to write, with the path's tokens from an offset on."""
        tenant = self.namespace.tenant
        end, path = len(self.path), digest(self.path)
        return Record(
            id=0,
            kind=kind,
            tenant=tenant,
            start=start,
            end=end,
            prefix=digest(self.path[:start]),
            digest=record_digest(fingerprint, tenant, kind.value, start, end, path),
            tokens=self.path[start:].tobytes(),
            used=max(self.node.last_used, self.node.checkpoint_used),
        )


class PageOut:
    """The way out. `failures` counts the states that the disk did not take."""

    def __init__(self, cache: PrefixCache, tier: DiskTier, codec: Codec) -> None:
        self.failures = 0
        self._cache = cache
        self._tier = tier
        self._codec = codec
        self._jobs: dict[_Job, None] = {}
        self._copied = 0  # bytes, since the last step
        self._full = False  # until what was taken is written
        self._rests_until = 0.0
        # Size of the tries, number of dirty nodes and the budget at the last count of dirty bytes.
        self._counted: tuple[Size, int, int] | None = None
        self._was_over_limit = False

    @property
    def writing(self) -> bool:
        """True if a write is under way."""
        return bool(self._jobs)

    @property
    def unwritten(self) -> bool:
        """True if state is dirty, would be taken by the tier, and no write is under way."""
        dirty = any(trie.persistence.dirty for trie in self._cache.tries)
        return dirty and not self._jobs and not self._rests

    @property
    def _rests(self) -> bool:
        return _clock() < self._rests_until

    def step(self, *, busy: bool = False) -> None:
        """Take in finished writes, and hand over the next nodes.

        While sequences run (`busy`), only if more than a sixteenth of the memory budget is dirty:
        that much is lost if the process is killed.
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
            Persistence.end_write(job.node, job)  # which may be in no trie any more
        for node in (node for trie in self._cache.tries for node in trie.nodes()):
            for writer in list(node.writers):
                Persistence.end_write(node, writer)
        self._jobs = {}

    def _hand_over(self) -> None:
        left, self._copied = _AT_ONCE, 0
        for namespace, trie in self._cache.tries.items():
            dirty = trie.persistence.dirty
            for node in [node for node in dirty if not node.writers]:
                if node not in dirty:
                    continue  # it was forgotten: another one's copy needed room
                if not left or self._copied >= _COPIED:
                    return
                taken = self._write(namespace, trie, node) if _is_due(trie, node) else None
                if taken is False:
                    self._full = bool(self._jobs)
                    self._rests_until = 0.0 if self._full else _clock() + _REST
                    return
                left -= taken is True

    def _write(self, namespace: Namespace, trie: RadixTrie, node: TrieNode) -> bool | None:
        """Hand over a node's state; False if no more is taken at present, None if that fails."""
        paging = self._cache.ledger.account(Kind.PAGING)
        job = _Job(namespace, path_tokens(node), node, paging)
        kind, start = RecordKind.SPAN, node.persisted_end
        if node.span is None or start == node.end:
            # Where no spans are kept, nothing else on disk tells which tokens lead there.
            kind, start = RecordKind.CHECKPOINT, node.end if self._cache.layout.spans else 0
        # From now on, making room does not take it away.
        until = node.end if kind is RecordKind.SPAN else node.start
        Persistence.begin_write(node, job, until)
        taken: bool | None = False
        try:
            if (exported := self._export(job, kind)) is not None:
                tensors = {name: HostTensor(*tensor) for name, tensor in exported[0].items()}
                payload = Payload(tensors, exported[1])
                record = job.record(self._tier.fingerprint, kind, start)
                taken = self._tier.write(WriteJob(job, record, payload))
        except Exception as error:  # noqa: BLE001  (native code may raise anything)
            log.warning("state cannot be written", tokens=node.end, error=str(error))
            self.failures += 1
            trie.persistence.mark_clean(node)
            taken = None
        if taken:
            self._jobs[job] = None
        else:
            Persistence.end_write(node, job)
            job.end()
        return taken

    def _export(self, job: _Job, kind: RecordKind) -> Exported | None:
        """Hand state over by the codec; None where there is no room for its copy, or loan."""
        node = job.node
        span = node.span if kind is RecordKind.SPAN else None
        start, end = node.persisted_end - node.start, len(node.tokens)
        if self._codec.copies:
            size = size_of(node.checkpoint)
            if span is not None:
                nbytes = span.nbytes // span.length * (end - start)
                size = Size(nbytes, span.storage.buffers)
            if not self._cache.pool.make_room(size):
                return None
            job.paging.set(size)
            self._copied += size.nbytes
        elif span is None:
            job.whole = node.checkpoint
        elif self._may_lend(span):
            job.loan = Loan.of(span, self._cache.ledger)
        else:
            return None
        if span is None:
            return self._codec.export_checkpoint(node.checkpoint)
        return self._codec.export_span(span, start, end)

    def _may_lend(self, span: Span) -> bool:
        """Return True if little enough is lent: lent state frees nothing when the trie drops it."""
        loans = {job.loan: job.loan.size.nbytes for job in self._jobs if job.loan is not None}
        if not loans or span.storage.loan is not None:
            return True
        return sum(loans.values()) + size_of_storage(span).nbytes <= self._tier.queue_bytes

    def _take(self, written: Written) -> None:
        job = written.token
        assert isinstance(job, _Job)  # noqa: S101  (the tier returns what it was given)
        del self._jobs[job]
        job.end()
        trie, record = self._cache.tries.get(job.namespace), written.record
        path = [] if trie is None else trie.match(job.path).node.path()
        # The written node may have been joined with the next one, and cut again.
        pending = [job.node, *path]
        while pending:
            node = pending.pop()
            Persistence.end_write(node, job)
            pending += (child for child in node.children.values() if job in child.writers)
        if record is None:  # it is tried again after all others: it must hold up none
            self.failures += 1
            self._rests_until = _clock() + _REST
        else:
            self._cache.tries.files.hold([record])  # until it is known which nodes use it
            if trie is not None:
                _attach(trie, job.path, record)
            self._cache.tries.files.drop([record])
        for node in path:
            if trie is not None and record is None and node.end > job.node.start:
                trie.persistence.postpone(node)
            elif trie is not None and record is not None and node.persisted:
                trie.persistence.mark_clean(node)


def _is_due(trie: RadixTrie, node: TrieNode) -> bool:
    """Return True if a dirty node can be written now; mark it clean if it never will be."""
    above = node.parent or trie.root
    # The disk has, or is about to have, all that comes before the node.
    first = above is trie.root or (above.span is None and not above.extents)
    reachable = first or above.persisted_soon
    due = reachable and not node.persisted
    if not due and (reachable or above not in trie.persistence.dirty):
        trie.persistence.mark_clean(node)
    return due


def _attach(trie: RadixTrie, path: Tokens, record: Record) -> None:
    """Note that a new file has the state of a path's end, as far as the trie still has it."""
    deepest, known = trie.match(path)
    if known < len(path):
        return  # the rest was forgotten, and shall not come back with the file
    if record.kind is RecordKind.CHECKPOINT:
        ends = known == deepest.end and deepest.tokens_persisted
        if ends and deepest.persisted_checkpoint is None:
            trie.persistence.set_checkpoint(deepest, record)
        return
    for node in deepest.path():
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.persisted_end < parent.end:
            return
        start, stop = node.persisted_end, min(node.end, known)
        if record.start <= start < stop:
            trie.persistence.add_extent(node, Extent(record, start, stop))
