"""Where a prompt resumes: how much of it can be restored, and with which state. Pure.

All layers are restored at one offset, or none:

- a stack of token-addressable layers only resumes at any offset; a match that ends inside an
  edge splits it there;
- a stack with sliding or recurrent layers resumes at the deepest checkpoint at or before the
  match, or at the match itself where a later checkpoint rewinds to it;
- state on disk only is not restored: the pager brings it back before a request begins;
- at least one token of the prompt is always left to compute.
"""

from collections.abc import Container
from itertools import takewhile
from typing import NamedTuple

from .ledger import Size
from .node import Tokens, TrieNode, size_in_memory
from .record import Record
from .state import Layout
from .trie import RadixTrie

_REWIND_SEARCH = 32  # nodes below a match that are looked at for a checkpoint that rewinds


class Missing(NamedTuple):
    """State on disk only: its nodes, parents first; `holder` has the checkpoint to restore."""

    trie: RadixTrie
    nodes: list[TrieNode]
    holder: TrieNode | None

    def records(self, node: TrieNode) -> list[Record]:
        """The files that one of the nodes is read from."""
        records = [extent.record for extent in node.extents] if node.span is None else []
        record = node.persisted_checkpoint
        if node is self.holder and node.checkpoint is None and record is not None:
            records.append(record)
        return records


class Known(NamedTuple):
    """Tokens of a prompt in memory, those a request would restore, and their unleased size."""

    tokens: int
    cached: int
    idle: Size


class ResumePoint(NamedTuple):
    """The place at which a prompt resumes."""

    matched: int  # tokens of the prompt that the trie recognises
    node: TrieNode  # the deepest that it matches
    offset: int  # on the path of `node` or at its end
    holder: TrieNode | None  # node whose checkpoint is restored


class Restoration:
    """Rules of one model; requests resume at multiples of `grid` tokens only."""

    def __init__(self, layout: Layout, grid: int) -> None:
        self._layout = layout
        self._grid = grid

    def resume_point(self, trie: RadixTrie, prompt: Tokens) -> ResumePoint:
        """Find where a prompt resumes with the state in memory."""
        node, matched = trie.match(prompt)
        limit = self._limit(self._in_memory(node, matched), len(prompt))
        if not self._layout.checkpoints:
            return ResumePoint(matched, node, limit, None)
        holder = _holder(node, limit)
        offset = trie.root.end if holder is None else min(holder.end, limit)
        return ResumePoint(matched, node, offset, holder)

    def known(self, trie: RadixTrie, tokens: Tokens) -> Known:
        """Describe how much of a prompt is in memory."""
        point = self.resume_point(trie, tokens)
        in_memory = self._in_memory(point.node, point.matched)
        return Known(in_memory, point.offset, _idle(point))

    def missing(self, trie: RadixTrie, prompt: Tokens, unreadable: Container[int]) -> Missing:
        """State to read before a prompt can be restored; files in `unreadable` count as lost."""

        def is_readable(node: TrieNode) -> bool:
            return node.span is not None or all(p.record.id not in unreadable for p in node.extents)

        def has_whole(node: TrieNode) -> bool:
            record = node.persisted_checkpoint
            return node.checkpoint is not None or (
                record is not None and record.id not in unreadable
            )

        node, matched = trie.match(prompt)
        limit = self._limit(matched, len(prompt))
        path, holder = list(takewhile(is_readable, node.path())), None
        if self._layout.checkpoints:
            holder = next((n for n in reversed(path) if n.end <= limit and has_whole(n)), None)
            path = path[: path.index(holder) + 1] if holder is not None else []
        nodes = [n for n in path if n.paged_out and n.start < limit]
        if holder is not None and holder.checkpoint is None and holder not in nodes:
            nodes.append(holder)
        return Missing(trie, nodes, holder)

    def _limit(self, matched: int, length: int) -> int:
        return max(0, min(matched, length - 1)) // self._grid * self._grid

    def _in_memory(self, node: TrieNode, matched: int) -> int:
        if not self._layout.spans:
            return matched
        return min([matched, *(n.start for n in node.path() if n.span is None)])


def _holder(node: TrieNode, limit: int) -> TrieNode | None:
    """Find the checkpoint that restores the deepest offset up to `limit`, by rewinding too."""
    if not limit:
        return None
    before = (n for n in reversed(node.path()) if n.checkpoint is not None and n.end <= limit)
    best = next(before, None)
    pending, seen = [node], 0
    while pending and seen < _REWIND_SEARCH and (best is None or best.end < limit):
        candidate = pending.pop()
        seen += 1
        checkpoint = candidate.checkpoint
        if candidate.end > limit and checkpoint is not None and checkpoint.rewinds_to(limit):
            return candidate
        pending.extend(candidate.children.values())
    return best


def _idle(point: ResumePoint) -> Size:
    """Size that a lease from this point would be the first to hold."""
    idle = Size()
    node, holder = point.node, point.holder
    end = point.offset if holder is None else max(point.offset, holder.end)
    deepest = node if holder is None or node.end > holder.end else holder
    for held in deepest.path():
        if held.ref_count or held.start >= end:
            continue
        size = size_in_memory(held)
        if held.end > end:  # it is cut there
            size = Size(size.nbytes * (end - held.start) // len(held.tokens), size.buffers)
        idle += size
    return idle
