"""Upper bounds of any order of eviction: an endless cache, and Belady's order. Pure.

Both count a prompt that is repeated as a whole in full; the daemon computes its last token.

A block is a run of tokens that the same prompts contain: the edges of the trie of all prompts.
An ancestor's next use is never after its descendant's, so that giving up what is needed the
latest, of equals the deepest, leaves paths whole. What prompts in flight hold stays, takes its
part of the budget, and has no choice in it; what is left are intervals from a release to the
next use, each worth its tokens, of which as many are kept as fit at any time. To drop the one
that ends last is optimal there, whatever the capacity does over time. A run may be kept in part.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from replay_traces import Request

from umbel.cachestore.node import Tokens, TrieNode
from umbel.cachestore.trie import RadixTrie

NEVER = 1 << 62  # the number of the prompt that uses again what is not used again


@dataclass(eq=False)
class Run:
    """Tokens that the same prompts contain, and what a simulation notes of them.

    Attributes:
        length: tokens.
        end: offset of its end.
        uses: numbers of the prompts, ascending.
        held: tokens in the cache, the first ones.
        pins: prompts in flight.
        version: changes when it is used.
    """

    length: int
    end: int
    uses: list[int] = field(default_factory=list)
    held: int = 0
    pins: int = 0
    version: int = 0

    def next_use(self, after: int) -> int:
        """Number of the next prompt that contains it; `NEVER` if none does."""
        at = bisect_right(self.uses, after)
        return self.uses[at] if at < len(self.uses) else NEVER


def runs(prompts: Sequence[Tokens] | Sequence[Request]) -> list[list[Run]]:
    """Divide each prompt into runs."""
    trie = RadixTrie()
    for tokens in map(_tokens, prompts):
        _enter(trie, tokens)
    found: dict[TrieNode, Run] = {}
    paths = []
    for number, tokens in enumerate(map(_tokens, prompts)):
        path = trie.match(tokens).node.path()
        paths.append([found.setdefault(node, Run(len(node.tokens), node.end)) for node in path])
        for run in paths[-1]:
            run.uses.append(number)
    return paths


def _tokens(prompt: Tokens | Request) -> Tokens:
    return prompt.tokens if isinstance(prompt, Request) else prompt


def _enter(trie: RadixTrie, tokens: Tokens) -> None:
    node, known = trie.match(tokens)
    if known < node.end:
        node = trie.split(node, known)
    if known < len(tokens):
        trie.append(node, tokens[known:].copy(), None)


def endless(paths: list[list[Run]]) -> list[int]:
    """Tokens of each prompt that a cache without end has."""
    return [
        tokens_there([run.length if run.uses[0] < number else 0 for run in path], path)
        for number, path in enumerate(paths)
    ]


def tokens_there(held: list[int], path: list[Run]) -> int:
    """How many of a prompt's tokens are there without a gap, given those of its first runs."""
    total = 0
    for tokens, run in zip(held, path, strict=False):
        total += tokens
        if tokens < run.length:
            break
    return total


class Belady:
    """A cache of `budget` tokens that knows the future."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._free: list[tuple[int, int, int, int, Run]] = []
        self._serial = 0

    def begin(self, path: list[Run]) -> int:
        """Serve a prompt; return how many tokens of it were there."""
        hits = tokens_there([run.held for run in path], path)
        for run in path:
            run.pins += 1
            run.version += 1
            self._held += run.length - run.held
            run.held = run.length
        self._evict()
        return hits

    def end(self, path: list[Run], begun: int) -> None:
        """Release a prompt when prompts up to number `begun` have begun."""
        for run in path:
            run.pins -= 1
            if not run.pins:
                self._serial += 1
                key = (-run.next_use(begun), -run.end, self._serial)
                heapq.heappush(self._free, (*key, run.version, run))
        self._evict()

    def _evict(self) -> None:
        while self._held > self._budget and self._free:
            *_, version, run = self._free[0]
            gone = min(run.held, self._held - self._budget) if version == run.version else 0
            run.held -= gone
            self._held -= gone
            if self._held > self._budget or not run.held:
                heapq.heappop(self._free)


def belady(requests: Sequence[Request], paths: list[list[Run]], budget: int) -> list[int]:
    """Tokens of each prompt that Belady's order has in a budget of tokens."""
    for path in paths:
        for run in path:
            run.held = run.pins = 0
    cache = Belady(budget)
    hits: list[int] = []
    flying: list[tuple[float, int]] = []
    for number, request in enumerate(requests):
        while flying and flying[0][0] <= request.time:
            cache.end(paths[heapq.heappop(flying)[1]], number - 1)
        hits.append(cache.begin(paths[number]))
        heapq.heappush(flying, (request.until, number))
    return hits
