"""What the next step computes: a pure function of the running sequences."""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from .fairness.entry import Priority
from .sequence import Sequence

_TWO = 2
_TOGETHER = 512
"""Tokens of a call of several prompts, padding included: each brings work after the call, too."""
_LESS_URGENT = 4096
"""Tokens by which a prompt that nobody sits before counts as longer than it is."""
_FULL = 0.75
"""Of a call's tokens that must not be padding, where it is not known yet how long calls take."""


class PrefillChunk(NamedTuple):
    """A piece of a prompt.

    Attributes:
        sequence: whose prompt advances.
        end: the offset up to which it does, exclusive.
    """

    sequence: Sequence
    end: int

    @property
    def tokens(self) -> int:
        """How many tokens that are."""
        return self.end - self.sequence.num_computed_tokens


@dataclass(frozen=True)
class Batch:
    """One step's work: a decode for each of `decode`, and chunks of prompts in one call.

    Attributes:
        prefill: the chunks, the most urgent first.
        decode: the sequences that get a token each.
    """

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Sequence, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.prefill and not self.decode


Joins = Callable[[Items[int], int], bool]
"""Whether a chunk of so many tokens is best computed in one call with others of these lengths."""


class ChunkSize(NamedTuple):
    """How long chunks are, in tokens.

    Attributes:
        most: of a call, padding included.
        last: of a chunk that completes its prompt, where that is more: a short rest would take a
            call of its own.
        grid: chunks end on its multiples, so that the same prompt is computed in the same chunks,
            whatever was cached.
    """

    most: int
    last: int = 0
    grid: int = 1

    def halved(self) -> "ChunkSize":
        """Half of it."""
        return ChunkSize(self.most // 2, 0, self.grid)


def plan(running: Items[Sequence], size: ChunkSize, joins: Joins | None = None) -> Batch:
    """Choose the next step's work.

    Prefill chunks also end on the sequence's chunk boundaries and where another request parts
    from it that waits, and the last one before the last prompt token.

    Args:
        running: all that run, oldest first.
        size: of chunks.
        joins: where several prompts may advance in one call, which do: see `StallBound.joins`.
            They are rows as long as the longest.
    """
    prompts = _by_urgency(running)
    chosen = [PrefillChunk(s, _end(s, size)) for s in prompts[:1]]
    if chosen and joins is not None and not chosen[0].sequence.is_alone:
        lengths = [chosen[0].tokens]
        for sequence in prompts[1:]:
            chunk = PrefillChunk(sequence, _end(sequence, size))
            fits = (len(chosen) + 1) * max(*lengths, chunk.tokens) <= min(size.most, _TOGETHER)
            if fits and not sequence.is_alone and joins(lengths, chunk.tokens):
                chosen.append(chunk)
                lengths.append(chunk.tokens)
    decode = tuple(s for s in running if not s.num_left_to_prefill and s.wants_more)
    return Batch(tuple(chosen), decode)


def _end(sequence: Sequence, size: ChunkSize) -> int:
    start, last = sequence.num_computed_tokens, len(sequence.tokens) - 1
    stops = {*sequence.chunk_boundaries, sequence.num_awaited, last}
    if size.grid > 1:
        stops.add((start // size.grid + 1) * size.grid)
    end = min(offset for offset in stops if offset > start)
    most = max(size.most, size.last) if end == last else size.most
    return end if end - start <= most else start + size.most


def _by_urgency(running: Items[Sequence]) -> list[Sequence]:
    """Put prompts in order: the most urgent of each tenant by its precedence, then the others.

    Of a tenant's, and where tenants are alike, the shortest remaining work goes first, with ageing:
    a prompt counts as shorter by every token by which it was passed over by its tenant's that came
    later; see `age`. One with n tokens left is therefore passed over for n tokens at most by those.
    One of a batch counts as `_LESS_URGENT` tokens longer.
    Where another request waits for its beginning, what is left is what that one waits for.
    """
    by_tenant: dict[str, list[Sequence]] = {}
    prompts = (s for s in running if s.num_left_to_prefill)
    for sequence in sorted(prompts, key=_remaining):
        by_tenant.setdefault(sequence.request.tenant, []).append(sequence)
    first = sorted((own[0] for own in by_tenant.values()), key=lambda s: s.precedence)
    return [*first, *(s for own in by_tenant.values() for s in own[1:])]


def _remaining(sequence: Sequence) -> int:
    more = _LESS_URGENT if sequence.request.priority is Priority.BATCH else 0
    return sequence.num_left_to_share + more - sequence.num_passed_over


def age(running: Items[Sequence], chosen: Mapping[Sequence, int]) -> None:
    """Count for prompts by how many tokens a call passed them over for later ones of their tenant.

    Args:
        running: all that run, oldest first, as they were when the call was planned.
        chosen: those that advance, and by how many tokens.
    """
    later = Counter[str]()
    for sequence in reversed(running):
        if sequence in chosen:
            later[sequence.request.tenant] += chosen[sequence]
        elif sequence.num_left_to_prefill:
            sequence.num_passed_over += later[sequence.request.tenant]


class StallBound:
    """Sizes prefill chunks so that sequences that decode do not wait for long.

    A chunk takes a time of its own, to read the weights, and more for each token; both are
    fitted to the chunks that ran, newer ones counting more. A chunk's own time is why halving
    one does not halve its time, and why short chunks are a bad bargain. A call of several rows
    takes more for each row, which some layers compute by itself. Each row then enters the batch of
    those who decode, which keeps them waiting, too: its state is written there.

    Args:
        seconds: the longest that one chunk may take.
    """

    _LEAST = 16  # smaller chunks cost more in overhead than they save in waiting
    _UNTRIED = 64  # tokens, before the first measurement
    _SURE = 0.8  # of the bound: chunks take longer than estimated about as often as shorter
    _DOUBT = 0.98  # what a row's time still counts after a call of one: some time it is tried anew
    _FORGET = 0.8  # what a measurement still counts when the next one comes
    _RECENT = 7  # decodes whose median counts: one that compiles a kernel takes seconds, once

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, t, n * n, n * t
        self._row: float | None = None  # seconds of each row more; None before any was measured
        self._decodes = deque[float](maxlen=self._RECENT)  # seconds of those that nobody entered
        self._entries = deque[float](maxlen=self._RECENT)  # seconds more for each who did

    def observe(self, tokens: int, seconds: float, rows: int = 1) -> None:
        """Learn from a call how long calls take.

        Args:
            tokens: that were computed, padding included.
            seconds: that it took.
            rows: of the call.
        """
        if rows > 1 and self.expected(tokens) is not None:
            self._observe_rows(tokens, seconds, rows)
            return
        if self._row is not None:
            self._row *= self._DOUBT
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(  # type: ignore[assignment]
            self._FORGET * old + more for old, more in zip(self._sums, new, strict=True)
        )

    def observe_decode(self, seconds: float, entered: int) -> None:
        """Learn from a decode what it takes more for each who entered its batch.

        Args:
            seconds: that it took; where the device computes on meanwhile, that its launch took.
            entered: sequences whose first decode it was.
        """
        if not entered:
            self._decodes.append(seconds)
        elif self._decodes:
            more = seconds - statistics.median(self._decodes)
            self._entries.append(max(0.0, more) / entered)

    def expected(self, tokens: int) -> float | None:
        """Estimate how many seconds a chunk takes; None before any was measured."""
        count, n, t, nn, nt = self._sums
        if not count:
            return None
        spread = count * nn - n * n
        each = (count * nt - n * t) / spread if spread > 1e-9 * nn else t / n
        each = min(max(each, 0.0), t / n)  # neither part of the time is negative
        return (t - each * n) / count + each * tokens

    def joins(self, others: Items[int], tokens: int, *, bounded: bool) -> bool:
        """Whether a chunk is best computed in one call with others.

        That is where it takes no longer than a call of its own: rows are as long as the longest,
        so that a long one makes the others longer.

        Args:
            others: tokens of these.
            tokens: of the chunk.
            bounded: others decode, and must not wait for longer than the bound, also while
                those that are computed here enter their batch.
        """
        longest, rows = max(*others, tokens), len(others) + 1
        row = self._row or 0.0
        together = (self.expected(rows * longest) or 0.0) + (rows - 1) * row
        # As long as nobody has entered a batch, that takes about as long as a row does here.
        entry = statistics.median(self._entries) if self._entries else row
        most = self._most_beside(self.expected(self._LEAST))
        if bounded and together + (rows - 1) * entry > most:
            return False
        alone = self.expected(tokens)
        if self._row is None or alone is None:
            # Two that are nearly as long tell how long such calls take.
            return rows == _TWO and rows * longest * _FULL <= sum(others) + tokens
        before = self.expected(len(others) * max(others)) or 0.0
        return together <= before + (rows - 2) * row + alone

    def _observe_rows(self, tokens: int, seconds: float, rows: int) -> None:
        row = max(0.0, seconds - (self.expected(tokens) or 0.0)) / (rows - 1)
        before = row if self._row is None else self._row
        self._row = self._FORGET * before + (1 - self._FORGET) * row

    @property
    def _most(self) -> float:
        return self._SURE * self._seconds

    def _most_beside(self, least: float | None) -> float:
        """How long a call may take beside streams, if the shortest takes so long.

        Where no call fits, short ones save the streams little and cost prompts much.
        """
        return self._most if least is None or least <= self._most else 2 * least

    def chunk_size(self, limit: int) -> ChunkSize:
        """Find the longest chunk, up to `limit`, that takes no longer than it may.

        A chunk that is cut is a multiple of the shortest one: lengths that come again are
        planned, and compiled for, once. The last one of a prompt may use up the bound.
        """
        least, whole = self.expected(self._LEAST), self.expected(limit)
        if least is None or whole is None:
            return ChunkSize(min(limit, self._UNTRIED))
        most = self._most_beside(least)
        if whole <= most:
            return ChunkSize(limit)
        each = (whole - least) / (limit - self._LEAST)
        cut = self._LEAST + int((most - least) / each) // self._LEAST * self._LEAST
        last = self._LEAST + int((most / self._SURE - least) / each)
        return ChunkSize(min(cut, limit), min(last, limit))
