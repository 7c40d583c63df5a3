"""A world with a disk below it: real files, whose content must be the tokens that lead there."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from umbel.cachestore import check
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.disk.files import Payload, write_file
from umbel.cachestore.disk.queue import WriteJob, Written
from umbel.cachestore.disk.tier import DiskTier
from umbel.cachestore.errors import DiskTierError
from umbel.cachestore.ledger import Kind, Size
from umbel.cachestore.node import as_tokens, path_tokens
from umbel.cachestore.paging.page_in import PageInStatus
from umbel.cachestore.paging.pager import Pager, recover_index
from umbel.cachestore.pins import PinnedPath
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.record import Record, RecordKind
from umbel.cachestore.state import Span
from umbel.cachestore.tries import SHARED, Namespace

from .disk_tools import FINGERPRINT, TIMEOUT
from .fakes import (
    NAMESPACE,
    PLENTY,
    Buffer,
    FakeCheckpoint,
    FakeSequence,
    FakeSpan,
    Registry,
    Stack,
    TokenIds,
    World,
)

POISON = "poison"  # in a file's metadata: it cannot be written
TRIES = 3  # as the engine's
ENOUGH = 500  # rounds after which what is to come to an end never will


class Exported(NamedTuple):
    tensors: dict[str, Any]
    metadata: dict[str, str]


class FakeCodec:
    """Writes the tokens that fake state consists of, and reads them back."""

    def __init__(self, registry: Registry, stack: Stack, each: int, *, copies: bool) -> None:
        self.copies = copies  # exports are copies, as on CUDA
        self.exports = self.exported = 0  # calls, and their tokens
        self.loads = 0  # files that were read
        self.poisoned = 0  # exports to come that cannot be written
        self._registry = registry
        self._window = 0 if stack.recurrent else stack.window
        self._each = each

    def export_span(self, span: FakeSpan, start: int, stop: int) -> Exported:
        assert 0 <= start < stop <= span.length
        assert span.storage.buffer is not None
        tokens = span.storage.buffer[span.start + start : span.start + stop]
        return self._export(tokens, span.storage.each * len(tokens), {})

    def export_checkpoint(self, checkpoint: FakeCheckpoint) -> Exported:
        assert checkpoint.buffer is not None
        nbytes = checkpoint.nbytes
        return self._export(checkpoint.buffer[:], nbytes, {"nbytes": str(nbytes)})

    def _export(self, tokens: Buffer, nbytes: int, metadata: dict[str, str]) -> Exported:
        self.exports += 1
        self.exported += len(tokens)
        broken = self.poisoned > 0
        self.poisoned -= broken
        marks = {POISON: "1"} if broken else {}
        if self.copies:
            tokens = self._registry.buffer(tokens.tolist(), nbytes)
        tensors = {"0": ("I32", (len(tokens),), [tokens])}
        return Exported(tensors, metadata | marks)

    def load_span(self, parts: Sequence[tuple[Path, int, int]]) -> FakeSpan:
        read: list[int] = []
        for path, start, stop in parts:
            tokens, _ = self._read(path)
            if not 0 <= start < stop <= len(tokens):
                raise ValueError("the file has no such tokens")
            read += tokens[start:stop].tolist()
        return FakeSpan(self._registry, read, self._each)

    def load_checkpoint(self, path: Path) -> FakeCheckpoint:
        tokens, metadata = self._read(path)
        nbytes = int(metadata["nbytes"])
        return FakeCheckpoint(self._registry, tokens.tolist(), self._window, nbytes)

    def _read(self, path: Path) -> tuple[NDArray[np.int32], dict[str, str]]:
        self.loads += 1
        return read_file(path)


def write_unless_poisoned(
    folder: Path, name: str, payload: Payload, stopped: Callable[[], bool]
) -> tuple[int, bytes]:
    if POISON in payload.metadata:
        raise DiskTierError("poisoned")
    return write_file(folder, name, payload, stopped)


def read_file(path: Path) -> tuple[NDArray[np.int32], dict[str, str]]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return np.frombuffer(data[8 + size :], "<i4"), header.get("__metadata__", {})


class Watched(DiskTier):
    """A tier that knows the contents of its disk."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.alive = {record.id: record for record in self.records}  # acknowledged, not deleted
        self.jobs: list[WriteJob] = []  # that were taken, in order
        self.slow = False  # no results are given

    def write(self, job: WriteJob) -> bool:
        taken = super().write(job)
        if taken:
            self.jobs.append(job)
        return taken

    def completed(self) -> list[Written]:
        if self.slow:
            return []
        results = super().completed()
        self.alive |= {w.record.id: w.record for w in results if w.record is not None}
        return results

    def delete(self, records: Iterable[Record]) -> None:
        records = list(records)
        for record in records:
            del self.alive[record.id]
        super().delete(records)

    def path_of(self, name: str) -> Path:
        return self.folder / name

    def files(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.safetensors")}


class PagedSequence(FakeSequence):
    """A request that also publishes what it has computed so far."""

    def verify(self) -> None:
        lease = self.lease
        if lease.held == lease.cached:
            super().verify()
        elif self.world.stack.kv:
            assert content(lease.spans()) == tuple(self.state[: lease.held])

    def publish(self) -> Self:
        held = self.lease.held
        if len(self.state) > held:
            self.lease.publish(as_tokens(self.state), self.world.span(self.state[held:]))
        return self

    def close(self) -> None:
        held = self.lease.held
        span = self.world.span(self.state[held:]) if len(self.state) > held else None
        self.world.sequences.remove(self)
        self.lease.close(as_tokens(self.state), span)
        self.world.closed.append((self.namespace, tuple(self.state)))


class PagedWorld(World):
    """A world whose cache is paged to real files."""

    def __init__(
        self,
        stack: Stack,
        folder: Path,
        *,
        memory: Size = Size(PLENTY, PLENTY),  # noqa: B008  (frozen)
        disk: int = PLENTY,
        queue: int = PLENTY,
        longest: int = 1 << 62,
        retry_after: float = 0.0,
        copies: bool = False,
        **options: int,
    ) -> None:
        super().__init__(stack, **options)
        self.cache.longest = longest
        self.folder = folder
        self.memory = memory
        self.disk = disk
        self.copies = copies
        self._tier_options = {"queue_bytes": queue, "retry_after": retry_after}
        self.open()

    def open(self) -> None:
        self.cache.pool.resize(self.memory)
        self.tier = Watched(self.folder, fingerprint=FINGERPRINT, **self._tier_options)
        self.codec = FakeCodec(self.registry, self.stack, self.each, copies=self.copies)
        self.pager = Pager(self.cache, self.tier, self.codec, budget=self.disk)

    def begin(
        self,
        prompt: Iterable[int],
        *boundaries: tuple[int, Reason],
        namespace: Namespace = NAMESPACE,
    ) -> PagedSequence:
        return PagedSequence(self, namespace, tuple(prompt), boundaries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_tier()

    def step(self) -> None:
        assert self.tier.flush(TIMEOUT)
        self.pager.step()
        self.check_disk()

    def write_all(self) -> None:
        for _ in range(ENOUGH):
            taken = len(self.tier.jobs)
            if not self.pager.write_all():
                break
            self.check_disk()
            assert self.tier.flush(TIMEOUT)
            if self.copies and len(self.tier.jobs) == taken and not self.cache.tries.writing:
                break  # there is no room for a copy
        else:
            raise AssertionError("it is written for ever")
        self.check()

    def fetch(self, prompt: Iterable[int], namespace: Namespace = NAMESPACE) -> int:
        tokens, begun = as_tokens(list(prompt)), 0
        for _ in range(ENOUGH):
            wanted = self.pager.page_in.request(namespace, tokens)
            if wanted is PageInStatus.NOTHING:
                return begun
            begun += wanted is PageInStatus.BEGUN
            if begun > TRIES and self.memory.nbytes < PLENTY:
                return begun  # there is no room for it
            self.step()
            self.check()
        raise AssertionError("it is read for ever")

    def page_out(self) -> None:
        self.write_all()
        self.cache.evict(0)
        self.check()

    def close_tier(self) -> None:
        self.tier.close(TIMEOUT)

    def restart(self) -> None:
        assert not self.sequences
        self.close_tier()
        self.cache.pins.close()
        self.cache.clear()
        assert not self.registry.nbytes
        longest = self.cache.longest
        self.cache = PrefixCache(
            self.stack.layout, budget=self.cache.budget, checkpoints_kept=4, longest=longest
        )
        self.open()
        self.check()

    def check(self) -> None:
        """Assert what holds without a disk, and that files are what they are taken for."""
        found = check.problems(self.cache)
        if found:
            raise AssertionError(found)
        super().check()
        ledger = self.cache.ledger
        stored = ledger.held(Kind.KV) + ledger.held(Kind.CHECKPOINT)
        assert stored.nbytes == self.registry.nbytes
        # State that only the writer holds is counted too.
        assert self.registry.held <= (stored + ledger.held(Kind.PAGING)).nbytes
        for trie in self.cache.tries:
            for node in trie.nodes():
                path = path_tokens(node)
                for extent in node.extents:
                    own = np.frombuffer(extent.record.tokens, "<i4")
                    at = extent.record.start
                    part = own[extent.start - at : extent.stop - at]
                    assert part.tolist() == path[extent.start : extent.stop].tolist()
                if node.persisted_checkpoint is not None:
                    record = node.persisted_checkpoint
                    assert record.end == node.end
                    assert path[record.start :].tobytes() == record.tokens

    def check_disk(self) -> None:
        """Assert that the disk has what the cache refers to, and nothing else that stays."""
        assert set(self.cache.tries.files.counts) == set(self.tier.alive)
        records = sorted(self.tier.alive.values(), key=lambda record: record.start)
        anew = PrefixCache(self.stack.layout, budget=PLENTY)
        for prompt in shared_prompts(self.cache):
            anew.pins.put(SHARED, prompt.digest.hex(), prompt.tokens, None)
        orphans = recover_index(anew, records, FINGERPRINT)
        # A tenant's path below a shared prompt and without it is one path after a restart.
        assert not orphans or shared_prompts(self.cache), "a child without its parents"
        assert self.cache.tries.files.nbytes == sum(record.nbytes for record in records)

    def finish(self) -> None:
        self.step()
        self.check_disk()
        self.cache.pins.close()
        self.cache.clear()
        self.check()
        self.cache.pool.forget_persisted(0)
        self.step()
        self.step()
        super().finish()
        assert self.tier.flush(TIMEOUT)
        assert self.tier.files() == set()
        assert self.cache.ledger.total == Size()
        self.close_tier()


def shared_prompts(cache: PrefixCache) -> list[PinnedPath]:
    return [*cache.pins.paths(SHARED), *cache.pins._retracted]


def written(world: PagedWorld, kind: RecordKind = RecordKind.SPAN) -> list[tuple[int, int]]:
    """From where to where each file of a kind goes, in the order they were handed over."""
    records = [job.record for job in world.tier.jobs]
    return [(record.start, record.end) for record in records if record.kind is kind]


class OnDisk(NamedTuple):
    """A path that the disk has the state of, and whether it has the whole state at its end."""

    namespace: Namespace
    tokens: TokenIds
    whole: bool


def on_disk(cache: PrefixCache) -> set[OnDisk]:
    found = set()
    for namespace, trie in cache.tries.items():
        for node in trie.nodes():
            path = tuple(path_tokens(node).tolist())
            if node.extents:
                found.add(OnDisk(namespace, path[: node.persisted_end], whole=False))
            if node.persisted_checkpoint is not None:
                found.add(OnDisk(namespace, path, whole=True))
    return found


def has_on_disk(cache: PrefixCache, wanted: OnDisk) -> bool:
    namespace, tokens = wanted.namespace, as_tokens(wanted.tokens)
    shared = cache.pins.declared(namespace, tokens)
    base = b"" if shared is None else shared.digest
    for name in (namespace, namespace._replace(base=base)):
        trie = cache.tries.get(name)
        if trie is None:
            continue
        node, known = trie.match(tokens)
        whole = known == node.end and node.persisted_checkpoint is not None
        if known == len(tokens) and (whole if wanted.whole else known <= node.persisted_end):
            return True
    return False


def damage(path: Path, how: str) -> None:
    """Flip a byte of a file, cut it short or remove it."""
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def content(spans: Iterable[Span]) -> TokenIds:
    read: TokenIds = ()
    for span in spans:
        assert isinstance(span, FakeSpan)
        read += span.tokens
    return read
