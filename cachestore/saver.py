"""Hands what a trie has and the disk lacks to the disk tier's writer, oldest first.

So its memory can be given up at once when there is need, and a restart finds it. Only what is
new is written: a node that grew is written from where the disk's copy of it ends.
"""

from dataclasses import dataclass

from .codec import Codec, Exported
from .disk import DiskTier, HostTensor, Payload, Record, RecordKind, WriteJob, Written
from .ledger import Kind, Size
from .pieces import Piece
from .prefix_cache import Namespace, PrefixCache
from .recall import digest
from .state import Checkpoint, Span
from .trie import RadixTrie, Tokens, TrieNode, path_tokens, size_of

_AT_ONCE = 4  # nodes handed over between two steps: exporting takes the engine's time


@dataclass(eq=False)
class _Job:
    """What is being written: whose state, and which tokens lead to its end.

    Attributes:
        copied: what is written is a copy, in memory for the writer only.
    """

    namespace: Namespace
    path: Tokens
    node: TrieNode
    state: Span | Checkpoint
    size: Size
    copied: bool


class Saver:
    """The way out. Belongs to the MLX thread.

    Args:
        cache: whose tries.
        tier: the disk.
        codec: knows what state is made of.

    Attributes:
        failures: states that the disk did not take.
    """

    def __init__(self, cache: PrefixCache, tier: DiskTier, codec: Codec) -> None:
        self.failures = 0
        self._cache = cache
        self._tier = tier
        self._codec = codec
        self._paging = cache.ledger.account(Kind.PAGING)
        self._jobs: dict[_Job, None] = {}

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return bool(self._jobs)

    @property
    def unsaved(self) -> bool:
        """Whether there is something that could be written."""
        return any(trie.unsaved for _, trie in self._cache.tries())

    def step(self) -> None:
        """Take in what was written, and hand over what is next."""
        for written in self._tier.completed():
            self._take(written)
        self._hand_over()
        self._paging.set(self._only_here())

    def _hand_over(self) -> None:
        left = _AT_ONCE
        for namespace, trie in self._cache.tries():
            for node in [node for node in trie.unsaved if not node.busy]:
                if not left or not self._save(namespace, trie, node):
                    return
                left -= 1

    def _save(self, namespace: Namespace, trie: RadixTrie, node: TrieNode) -> bool:
        """Hand over a node's state; False when no more is taken at present."""
        if not _reachable(node):
            del trie.unsaved[node]
        elif node.span is not None and node.stored_to < node.end:
            return self._save_span(namespace, node, node.span)
        elif node.checkpoint is not None and node.stored_checkpoint is None:
            return self._save_checkpoint(namespace, node, node.checkpoint)
        else:
            del trie.unsaved[node]
        return True

    def _save_span(self, namespace: Namespace, node: TrieNode, span: Span) -> bool:
        first = node.stored_to - node.start
        exported = self._codec.export_span(span, first, len(node.tokens))
        job = _Job(namespace, path_tokens(node), node, span, size_of(span), copied=first > 0)
        return self._write(job, RecordKind.SPAN, node.stored_to, exported)

    def _save_checkpoint(
        self, namespace: Namespace, node: TrieNode, checkpoint: Checkpoint
    ) -> bool:
        exported = self._codec.export_checkpoint(checkpoint)
        size = size_of(checkpoint)
        job = _Job(namespace, path_tokens(node), node, checkpoint, size, copied=False)
        # Where no spans are kept, nothing else on disk tells which tokens lead there.
        start = node.end if self._cache.layout.spans else 0
        return self._write(job, RecordKind.CHECKPOINT, start, exported)

    def _write(self, job: _Job, kind: RecordKind, start: int, exported: Exported) -> bool:
        tensors = {name: HostTensor(*tensor) for name, tensor in exported.tensors.items()}
        taken = self._tier.write(
            WriteJob(
                token=job,
                kind=kind,
                tenant=job.namespace.tenant,
                start=start,
                end=len(job.path),
                prefix=digest(job.path[:start]),
                tokens=job.path[start:].tobytes(),
                used=max(job.node.last_used, job.node.checkpoint_used),
                payload=Payload(tensors, exported.metadata),
            )
        )
        if taken:
            self._jobs[job] = None
            job.node.busy = True
        return taken

    def _take(self, written: Written) -> None:
        job = written.token
        assert isinstance(job, _Job)  # noqa: S101  (the tier returns what it was given)
        del self._jobs[job]
        job.node.busy = False
        trie, record = self._cache.trie(job.namespace), written.record
        if record is None:
            self.failures += 1
            if trie is not None:
                trie.unsaved.pop(job.node, None)
            return
        self._cache.files.hold([record])  # until it is known who uses it
        if trie is not None:
            attach = _attach_span if record.kind is RecordKind.SPAN else _attach_checkpoint
            attach(trie, job.path, record)
        self._cache.files.drop([record])

    def _only_here(self) -> Size:
        """What is in memory for the writer only: evicting it from a trie frees nothing."""
        held = Size()
        for job in self._jobs:
            if job.copied or not job.state.buffers:
                held += job.size
        return held


def _reachable(node: TrieNode) -> bool:
    """Whether the disk has, or is about to have, all that comes before a node."""
    parent = node.parent
    if parent is None or parent.parent is None or (parent.span is None and not parent.stored):
        return True
    return parent.busy or parent.stored_to == parent.end


def _attach_span(trie: RadixTrie, path: Tokens, record: Record) -> None:
    """Note in the nodes that a file has their tokens; they may have been cut or joined."""
    for node in trie.match(path).node.path():
        parent = node.parent
        if parent is not None and parent.parent is not None and parent.stored_to < parent.end:
            return
        start, stop = node.stored_to, min(node.end, record.end)
        if record.start <= start < stop:
            trie.set_stored(node, Piece(record, start, stop))


def _attach_checkpoint(trie: RadixTrie, path: Tokens, record: Record) -> None:
    node, known = trie.match(path)
    if known == len(path) == node.end and node.stored_checkpoint is None and _on_disk(node):
        trie.set_stored_checkpoint(node, record)


def _on_disk(node: TrieNode) -> bool:
    """Whether a node's tokens are on disk, if their state is kept at all."""
    return node.span is None or node.stored_to == node.end
