"""Leases on what rows have copied are given back while memory is short, and taken back later."""

import pytest

from umbel.cachestore.check import problems
from umbel.models.kv import spans
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.scheduler.sequence import Sequence, SequenceStatus

from ..placement_check import problems as problems_of_state
from .bench import Ask, Bench, words

LONGEST = 64
"""Tokens of a copy, at most, here."""


class Short(Bench):
    """A bench on which memory can be short.

    Attributes:
        kv: gives sequences what the cache has for them.
    """

    def __init__(self, name: str, longest: int = LONGEST) -> None:
        super().__init__(name, prefill_chunk=LONGEST)
        self.kv = self.engine._kv_cache
        self.kv._longest = self.cache.longest = longest

    def send(self, prompt: list[int], tokens: int) -> Sequence:
        """Queue a request."""
        sequence = Sequence(self._request(Ask(prompt, tokens)))
        self._queue.put(sequence)
        return sequence

    def until(self, *sequences: Sequence, tokens: int) -> None:
        """Do steps until each of these has so many tokens of its answer."""
        while any(len(sequence.output) < tokens for sequence in sequences):
            self.step()

    def end(self, *sequences: Sequence) -> None:
        """Do steps until these have ended."""
        while any(sequence.status is not SequenceStatus.FINISHED for sequence in sequences):
            self.step()

    def step(self) -> None:
        """Do a step, after which each token is in one place."""
        self.engine.step()
        assert problems(self.cache) == []
        assert problems_of_state(self.runner.placement, self.kv.caches.values()) == []

    def check(self, sequence: Sequence) -> None:
        """Hold an answer to mlx-lm's own."""
        cold = self.cold(list(sequence.request.prompt), sequence.output)
        assert sequence.output == cold.tokens


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "deepseek_v3", "llama_kv8"])
def test_what_cannot_be_stored_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose path was evicted, and cannot be stored again, answers as alone."""
    bench = Short(name, 16)
    first, other = bench.send(words(150, "s"), 80), bench.send(words(60, "t"), 30)
    bench.until(first, other, tokens=3)
    monkeypatch.setattr(bench.kv, "_may_store", lambda _: False)
    assert bench.kv.give_copies_back()
    assert first.lease is not None
    assert first.lease.held == 0 < first.lease.reached
    bench.cache.evict(int(bench.cache.tries.size.nbytes * 0.7))
    bench.end(other)
    parts = bench.send([*words(150, "s")[:40], *words(20, "u")], 3)  # splits what is leased
    bench.end(first, parts)
    if name != "llama_kv8":
        bench.check(first)
        bench.check(parts)


def test_what_was_given_back_is_not_copied_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where another request had waited for it."""
    bench = Short("llama")
    base = words(200, "s")
    first = bench.send([*base, *words(100, "x")], 60)
    bench.step()
    other, third = bench.send([*base, *words(20, "t")], 10), bench.send(words(90, "v"), 60)
    bench.end(other)
    bench.until(first, third, tokens=12)
    copied = list[int]()
    store = bench.runner.placement.suffix_span

    def counted(cache: SequenceCache, tokens: int | None = None) -> spans.PackedSpan | None:
        copied.append(cache.number)
        return store(cache, tokens)

    monkeypatch.setattr(bench.runner.placement, "suffix_span", counted)
    assert bench.kv.give_copies_back()
    bench.cache.evict(0)
    for _ in range(5):
        bench.step()
        assert not first.is_awaited
    assert copied == []
    bench.end(first, third)
    bench.check(first)


def test_pieces_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """State evicted under a row is stored in pieces, so that no later copy is longer."""
    bench = Short("llama")
    first, other = bench.send(words(500, "s"), 40), bench.send(words(90, "v"), 60)
    bench.until(first, other, tokens=5)
    assert bench.kv.give_copies_back()
    bench.cache.evict(0)
    bench.end(first)
    (trie,) = bench.cache.tries
    lengths = [node.span.storage.length for node in trie.nodes() if node.span is not None]
    assert sum(lengths) >= 500
    assert max(lengths) <= LONGEST
    copies, copy = list[int](), spans.copied

    def counted(storage: spans.Storage, start: int, stop: int) -> spans.Storage:
        copies.append(stop - start)
        return copy(storage, start, stop)

    monkeypatch.setattr(spans, "copied", counted)
    bench.cache.evict(bench.cache.tries.size.nbytes * 6 // 10)
    assert max(copies, default=0) <= LONGEST
    bench.end(other)
    bench.check(first)
