"""Model state whose content can be read back: it is the tokens that it was computed from."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from umbel.cachestore import check
from umbel.cachestore.checkpoints import FINAL_AFTER, Reason, decode_due, prompt_offsets
from umbel.cachestore.node import TrieNode, as_tokens
from umbel.cachestore.prefix_cache import Lease, PrefixCache
from umbel.cachestore.state import Layout
from umbel.cachestore.trie import RadixTrie
from umbel.cachestore.tries import Namespace

if TYPE_CHECKING:
    from umbel.cachestore.spans import Loan

TokenIds = tuple[int, ...]
Buffer = NDArray[np.int32]

PLENTY = 1 << 40
WINDOW = 16
RECURRENT_BYTES = 40
NAMESPACE = Namespace("tenant")


@dataclass(frozen=True)
class Stack:
    """A kind of model: which layers it has."""

    name: str  # for test ids
    kv: bool  # it has full-attention layers
    window: int = 0  # of its sliding layers
    recurrent: bool = False  # it has recurrent layers

    @property
    def layout(self) -> Layout:
        return Layout(spans=self.kv, checkpoints=bool(self.window) or self.recurrent)


KV = Stack("kv", kv=True)
SLIDING = Stack("kv+rotating", kv=True, window=WINDOW)
HYBRID = Stack("kv+recurrent", kv=True, recurrent=True)
EVERYTHING = Stack("all", kv=True, window=WINDOW, recurrent=True)
RECURRENT = Stack("recurrent", kv=False, recurrent=True)
STACKS = (KV, SLIDING, HYBRID, EVERYTHING, RECURRENT)
EXACT = tuple(stack for stack in STACKS if stack.layout.checkpoints)


_START = attrgetter("_start")  # asked so often that a property's call would be felt


class Registry:
    """Knows all open state."""

    def __init__(self) -> None:
        self.storages: set[FakeStorage] = set()
        self.spans: set[FakeSpan] = set()
        self.checkpoints: set[FakeCheckpoint] = set()
        self.made = self.splits = 0  # spans that there ever were, and their cuts
        self.copied = 0  # tokens, from one storage to another
        self.on_copy: Callable[[], None] = lambda: None  # called while a copy exists twice
        self.buffers: list[tuple[weakref.ref[Buffer], int]] = []  # of closed state too; bytes

    def buffer(self, tokens: Iterable[int], nbytes: int) -> Buffer:
        made = np.array(list(tokens), "<i4")
        self.buffers.append((weakref.ref(made), nbytes))
        return made

    @property
    def held(self) -> int:
        self.buffers = [each for each in self.buffers if each[0]() is not None]
        return sum(nbytes for _, nbytes in self.buffers)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages) + sum(
            checkpoint.nbytes for checkpoint in self.checkpoints
        )


class FakeStorage:
    """Where spans lie: tokens. It is open until it is trimmed without a view."""

    buffers = 2

    def __init__(self, registry: Registry, tokens: TokenIds, each: int) -> None:
        self.registry = registry
        self.tokens = tokens
        self.each = each
        self.loan: Loan | None = None
        self.buffer: Buffer | None = registry.buffer(tokens, each * len(tokens))
        self._views: list[FakeSpan] = []
        registry.storages.add(self)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.each * self.length

    @property
    def views(self) -> "list[FakeSpan]":
        return sorted(self._views, key=_START)

    def add(self, view: "FakeSpan") -> None:
        assert self in self.registry.storages, "a storage was viewed after it was freed"
        self._views.append(view)

    def remove(self, view: "FakeSpan") -> None:
        self._views.remove(view)

    def trim(self) -> None:
        kept: list[list[FakeSpan]] = []
        for view in self.views:
            if kept and kept[-1][-1].stop == view.start:
                kept[-1].append(view)
            else:
                kept.append([view])
        if sum(view.length for view in self._views) == self.length:
            return
        for views in kept:
            start, stop = views[0].start, views[-1].stop
            copy = FakeStorage(self.registry, self.tokens[start:stop], self.each)
            self.registry.copied += stop - start
            self.registry.on_copy()
            for view in views:
                view.move(copy, view.start - start)
        self.registry.storages.remove(self)
        self.buffer = None


class FakeSpan:
    """Keys and values of consecutive tokens, which are those tokens: a view of a storage.

    Any use after it was given away raises.
    """

    def __init__(self, registry: Registry, tokens: Iterable[int], each: int = 4) -> None:
        tokens = tuple(tokens)
        self._view(FakeStorage(registry, tokens, each), 0, len(tokens))

    def _view(self, storage: FakeStorage, start: int, length: int) -> Self:
        self._storage, self._start, self._length = storage, start, length
        storage.add(self)
        storage.registry.made += 1
        storage.registry.spans.add(self)
        return self

    @property
    def storage(self) -> FakeStorage:
        self._check()
        return self._storage

    @property
    def start(self) -> int:
        return self._start

    @property
    def stop(self) -> int:
        return self._start + self._length

    @property
    def tokens(self) -> TokenIds:
        return self.storage.tokens[self.start : self.stop]

    @property
    def length(self) -> int:
        self._check()
        return self._length

    @property
    def nbytes(self) -> int:
        return self.storage.each * self._length

    @property
    def buffers(self) -> int:
        return self.storage.buffers if min(self.storage._views, key=_START) is self else 0

    def adjoins(self, other: "FakeSpan") -> bool:
        return self.storage is other.storage and self.stop == other.start

    def split(self, at: int) -> tuple[Self, Self]:
        assert 0 < at < self.length, f"cut at {at} of {self.length}"
        self._leave().registry.splits += 1
        return self._new(self.start, at), self._new(self.start + at, self._length - at)

    def join(self, following: "Sequence[FakeSpan]") -> None:
        spans = [self, *following]
        left = dict.fromkeys(span.storage for span in spans)
        tokens = sum((span.tokens for span in spans), ())
        registry, start = self.storage.registry, 0
        storage = FakeStorage(registry, tokens, self.storage.each)
        registry.copied += len(tokens)
        registry.on_copy()
        for span in spans:
            span.move(storage, start)
            start += span.length
        for old in left:
            old.trim()

    def merge(self, other: "FakeSpan") -> Self:
        if not self.adjoins(other):
            self.join([other])
        self._leave()
        other._leave()
        return self._new(self.start, self._length + other._length)

    def move(self, storage: FakeStorage, start: int) -> None:
        self.storage.remove(self)
        self._storage, self._start = storage, start
        storage.add(self)

    def close(self, *, trim: bool = True) -> None:
        storage = self._leave()
        if trim:
            storage.trim()

    def _leave(self) -> FakeStorage:
        self._check()
        self._storage.registry.spans.remove(self)
        self._storage.remove(self)
        return self._storage

    def _new(self, start: int, length: int) -> Self:
        return type(self).__new__(type(self))._view(self._storage, start, length)

    def _check(self) -> None:
        assert self in self._storage.registry.spans, "a span was used after it was closed"


class FakeCheckpoint:
    """A whole state, which is all tokens up to its offset; it rewinds within its window."""

    def __init__(
        self, registry: Registry, tokens: Iterable[int], window: int = 0, nbytes: int = 64
    ) -> None:
        self._registry = registry
        self._tokens = tuple(tokens)
        self._window = window
        self._nbytes = nbytes
        self.buffer: Buffer | None = registry.buffer(self._tokens, nbytes)
        registry.checkpoints.add(self)

    @property
    def offset(self) -> int:
        self._check()
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        self._check()
        return self._nbytes

    @property
    def buffers(self) -> int:
        return 3

    def rewinds_to(self, offset: int) -> bool:
        return offset <= self.offset <= self._window

    def restore(self, offset: int) -> TokenIds:
        assert offset == self.offset or self.rewinds_to(offset), (
            f"a checkpoint of {self.offset} cannot restore {offset}"
        )
        return self._tokens[:offset]

    def close(self) -> None:
        self._check()
        self._registry.checkpoints.remove(self)
        self.buffer = None

    def _check(self) -> None:
        assert self in self._registry.checkpoints, "a checkpoint was used after it was closed"


def restored(lease: Lease, layout: Layout) -> TokenIds:
    """Read back what a lease restores; fails where two kinds of state disagree."""
    found: list[TokenIds] = []
    if layout.spans:
        read: list[int] = []
        for span in lease.spans():
            assert isinstance(span, FakeSpan)
            read += span.tokens
        found.append(tuple(read))
    if layout.checkpoints and lease.cached:
        assert isinstance(lease.checkpoint, FakeCheckpoint)
        found.append(lease.checkpoint.restore(lease.cached))
    assert len(set(found)) <= 1, f"layers disagree: {found}"
    return found[0] if found else ()


@dataclass(eq=False)
class FakeSequence:
    """A request as the engine runs it: restore, prefill, decode, close."""

    world: "World"
    namespace: Namespace
    prompt: TokenIds
    boundaries: tuple[tuple[int, Reason], ...] = ()  # offsets that the next turn keeps
    lease: Lease = field(init=False)
    state: list[int] = field(init=False)  # the tokens that its layers have seen

    def __post_init__(self) -> None:
        self.lease = self.world.cache.begin(self.namespace, as_tokens(self.prompt))
        self.world.sequences.append(self)
        self.verify()
        self.state = list(restored(self.lease, self.world.stack.layout))
        self._plan = prompt_offsets(
            len(self.prompt),
            cached=self.cached,
            matched=self.lease.matched,
            boundaries=self.boundaries,
            interval=self.world.interval,
            kept=self.lease.checkpoints_kept,
        )

    @property
    def cached(self) -> int:
        return self.lease.cached

    @property
    def left(self) -> int:
        return self.lease.total - self.lease.cached

    def verify(self) -> None:
        lease = self.lease
        assert lease.total == len(self.prompt)
        assert 0 <= lease.cached < lease.total
        assert lease.cached <= lease.matched <= lease.total
        assert restored(lease, self.world.stack.layout) == self.prompt[: lease.cached]

    def prefill(self, until: int | None = None) -> Self:
        last = len(self.prompt) - 1
        for token in self.prompt[len(self.state) : last if until is None else min(until, last)]:
            self.state.append(token)
            if (reason := self._plan.get(len(self.state))) is not None:
                self.capture(reason)
        return self

    def decode(self, tokens: Sequence[int]) -> Self:
        """Feed the prompt's last token and an answer without its last, as the engine does."""
        assert len(self.state) >= len(self.prompt) - 1
        if len(self.state) < len(self.prompt):
            self._advance(self.prompt[-1])
        for token in tokens:
            self._advance(token)
        return self

    def finish(self) -> None:
        if len(self.state) - (len(self.prompt) - 1) >= FINAL_AFTER:
            self.capture(Reason.FINAL)
        self.close()

    def close(self) -> None:
        span = None
        if self.world.stack.kv and len(self.state) > self.cached:
            span = FakeSpan(self.world.registry, self.state[self.cached :], self.world.each)
        self.world.sequences.remove(self)
        self.lease.close(as_tokens(self.state), span)
        self.world.closed.append((self.namespace, tuple(self.state)))

    def fail(self) -> None:
        self.world.sequences.remove(self)
        self.lease.close()

    def capture(self, reason: Reason) -> None:
        if self.world.stack.layout.checkpoints:
            self.lease.capture(self.world.checkpoint(self.state), reason)

    def _advance(self, token: int) -> None:
        self.state.append(token)
        if decode_due(len(self.state) - (len(self.prompt) - 1)):
            self.capture(Reason.DECODE)


class World:
    """A cache, its sequences, and all state; a token's span takes `each` bytes."""

    def __init__(
        self,
        stack: Stack,
        budget: int = PLENTY,
        kept: int = 4,
        interval: int = 1 << 20,
        each: int = 4,
    ) -> None:
        self.stack = stack
        self.interval = interval
        self.each = each
        self.registry = Registry()
        self.cache = PrefixCache(stack.layout, budget=budget, checkpoints_kept=kept)
        self.sequences: list[FakeSequence] = []
        self.closed: list[tuple[Namespace, TokenIds]] = []

    def checkpoint(self, tokens: Sequence[int]) -> FakeCheckpoint:
        stack = self.stack
        size = 4 * min(stack.window, len(tokens)) + RECURRENT_BYTES * stack.recurrent
        window = 0 if stack.recurrent else stack.window
        return FakeCheckpoint(self.registry, tokens, window, size)

    def span(self, tokens: Iterable[int]) -> FakeSpan | None:
        return FakeSpan(self.registry, tokens, self.each) if self.stack.kv else None

    def begin(
        self,
        prompt: Iterable[int],
        *boundaries: tuple[int, Reason],
        namespace: Namespace = NAMESPACE,
    ) -> FakeSequence:
        return FakeSequence(self, namespace, tuple(prompt), boundaries)

    def serve(
        self,
        prompt: Iterable[int],
        answer: Sequence[int] = (),
        *boundaries: tuple[int, Reason],
        namespace: Namespace = NAMESPACE,
    ) -> int:
        """Run a request to its end; return how many tokens were restored for it."""
        sequence = self.begin(prompt, *boundaries, namespace=namespace)
        sequence.prefill().decode(answer).finish()
        self.check()
        return sequence.cached

    def probe(self, prompt: Iterable[int], namespace: Namespace = NAMESPACE) -> tuple[int, int]:
        """Return what is matched and cached of a prompt, and leave nothing behind."""
        sequence = self.begin(prompt, namespace=namespace)
        sequence.fail()
        self.check()
        return sequence.lease.matched, sequence.cached

    @property
    def trie(self) -> RadixTrie:
        trie = self.cache.tries.get(NAMESPACE)
        assert trie is not None
        return trie

    def node(self, end: int) -> TrieNode:
        (found,) = (node for node in self.trie.nodes() if node.end == end)
        return found

    def ends(self) -> list[int]:
        return sorted(node.end for node in self.trie.nodes())

    def checkpoints(self) -> list[int]:
        return sorted(node.end for node in self.trie.nodes() if node.checkpoint is not None)

    def check(self) -> None:
        """Assert all invariants, the content of all open leases, and the byte counts."""
        assert check.problems(self.cache) == []
        for sequence in self.sequences:
            sequence.verify()
        self.check_content()
        captured = sum(
            item.checkpoint.nbytes for lease in self.cache.leases for item in lease.captured
        )
        assert self.registry.nbytes == self.cache.tries.size.nbytes + captured

    def check_content(self) -> None:
        for trie in self.cache.tries:
            paths: dict[TrieNode | None, TokenIds] = {trie.root: tuple(trie.root.tokens.tolist())}
            for node in trie.nodes():
                edge = tuple(node.tokens.tolist())
                paths[node] = paths[node.parent] + edge
                if node.span is not None:
                    assert isinstance(node.span, FakeSpan)
                    assert node.span.tokens == edge
                if node.checkpoint is not None:
                    assert isinstance(node.checkpoint, FakeCheckpoint)
                    assert node.checkpoint.restore(node.end) == paths[node]

    def finish(self) -> None:
        """Assert that every lease was closed and that a cleared cache holds nothing."""
        assert self.cache.leases == set(), "a lease was never closed"
        self.check()
        self.cache.clear()
        assert len(self.cache.tries) == 0, "a cleared cache holds tries"
        assert not self.registry.spans, "a span was never closed"
        assert not self.registry.checkpoints, "a checkpoint was never closed"


def conversation(seed: int, length: int) -> TokenIds:
    """Return tokens of which no two seeds share one."""
    return tuple(seed * 10_000 + number for number in range(length))
