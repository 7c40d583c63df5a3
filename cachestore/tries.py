"""Tries of one model, one for each namespace, and their statistics."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .ledger import Ledger, Size
from .node import FileUse, Tokens
from .state import Layout
from .trie import RadixTrie

SHARED = "(shared)"
"""The tenant of prompts that are declared shared. No caller has this name."""


class Namespace(NamedTuple):
    """Requests that may share state: of one tenant, after one shared prompt."""

    tenant: str
    base: bytes = b""  # digest of the shared prompt's tokens; empty without one


@dataclass(frozen=True)
class CacheStatistics:
    """Totals over some tries."""

    namespaces: int = 0
    nodes: int = 0
    tokens: int = 0
    checkpoints: int = 0
    leases: int = 0
    span_bytes: int = 0
    checkpoint_bytes: int = 0
    stored_tokens: int = 0  # on disk, and perhaps in memory too
    held_bytes: int = 0  # in memory, and held by requests and pins
    evictions: int = 0  # states that were forgotten
    page_outs: int = 0  # states that were left to the disk


class Tries:
    """All tries of one loaded model. Belongs to the MLX thread. Iterating yields the tries."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self.layout = layout
        self.files = FileUse()
        self.evictions = self.page_outs = 0
        self._tries: dict[Namespace, RadixTrie] = {}
        self._dropped_splits = 0  # of tries that are gone
        self._ledger = Ledger(ledger)

    def open(self, namespace: Namespace, base: Tokens | None = None) -> RadixTrie:
        """The trie of a namespace, made if there is none, below the tokens `base`."""
        if namespace not in self._tries:
            self._tries[namespace] = RadixTrie(self._ledger, self.files, base)
        return self._tries[namespace]

    def get(self, namespace: Namespace) -> RadixTrie | None:
        """The trie of a namespace, if there is one."""
        return self._tries.get(namespace)

    def items(self) -> Iterator[tuple[Namespace, RadixTrie]]:
        """All tries with their namespaces, as they were when this began."""
        yield from list(self._tries.items())

    def __iter__(self) -> Iterator[RadixTrie]:
        yield from list(self._tries.values())

    def __len__(self) -> int:
        return len(self._tries)

    def drop_empty(self) -> None:
        """Forget namespaces without state or leases."""
        for namespace, trie in self.items():
            if not (trie.root.children or trie.root.ref_count):
                del self._tries[namespace]
                self._dropped_splits += trie.splits

    @property
    def size(self) -> Size:
        """Memory that all tries hold."""
        return self._ledger.total

    @property
    def unheld(self) -> int:
        """Bytes of it that no lease retains."""
        return self.size.nbytes - sum(trie.totals.held_bytes for trie in self)

    @property
    def splits(self) -> int:
        """A counter that changes when a leased span may have been cut."""
        return self._dropped_splits + sum(trie.splits for trie in self)

    @property
    def writing(self) -> bool:
        """True if some state is being written to disk, and stays until it is."""
        return any(node.writing for trie in self for node in trie.nodes())

    def statistics(self, tenant: str | None = None) -> CacheStatistics:
        """Describe the tries of a tenant, or of all for None."""
        tries = [trie for name, trie in self.items() if tenant in (None, name.tenant)]
        totals = [trie.totals for trie in tries]
        return CacheStatistics(
            namespaces=len(tries),
            nodes=sum(each.nodes for each in totals),
            tokens=sum(each.known_tokens for each in totals),
            checkpoints=sum(each.whole_states for each in totals),
            leases=sum(trie.root.ref_count for trie in tries),
            span_bytes=sum(trie.spans.size.nbytes for trie in tries),
            checkpoint_bytes=sum(trie.checkpoints.size.nbytes for trie in tries),
            stored_tokens=sum(each.stored_tokens for each in totals),
            held_bytes=sum(each.held_bytes for each in totals),
            evictions=self.evictions,
            page_outs=self.page_outs,
        )
