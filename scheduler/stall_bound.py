"""How long prefill chunks may be beside sequences that decode, by how long such calls take."""

import math
import statistics
from collections import deque
from collections.abc import Sequence as Items
from itertools import combinations, product

from .policy import ChunkSize

_TWO = 2
_FULL = 0.75
"""Of a call's tokens that must not be padding, where it is not known yet how long calls take."""


class StallBound:
    """Sizes prefill chunks so that sequences that decode do not wait for long.

    A chunk takes a time of its own, to read the weights, and more for each token; both are
    fitted to the chunks that ran, newer ones counting more. A chunk's own time is why halving
    one does not halve its time, and why short chunks are a bad bargain. A call of several rows
    takes more: for all of them, and for each row, which some layers compute by itself. A number of
    rows that was not met yet takes several times as long, once. So whether several rows pay is
    judged by nearly the least that a row took lately, and whether streams can wait for them by what
    rows mostly took. If the last call of several took longer than that, the next one is expected
    to, as much, up to twice as long: what makes one longer is often there for the next, too. With
    each call of one that counts for less. Each row then enters the batch of those who decode, which
    keeps them waiting, too: its state is written there.

    A call behind a decode in which somebody ended takes longer on some machines, and much longer on
    slow ones: the device packs what they leave, and the front end has their answers and next
    questions to see to. So such a call is expected to take as many times as long as usual as the
    worst of the last few of these did.

    A chunk that takes much longer or shorter than estimated says that the machine is slower or
    faster than it was, for heat or for other programs. What was measured before is then scaled
    towards that, both parts alike. The fit alone would take the difference for a token's time, or
    for a chunk's own, and soon cut chunks to the shortest, or not at all.

    Args:
        seconds: the longest that one chunk may take.
    """

    _LEAST = 16  # smaller chunks cost more in overhead than they save in waiting
    _UNTRIED = 64  # tokens, before the first measurement
    _SURE = 0.8  # of the bound: chunks take longer than estimated about as often as shorter
    _LAST = 0.9  # of it, for a chunk that completes its prompt
    _LATE = 0.25  # of the bound
    _DOUBT = 0.98  # what a row's time still counts after a call of one: some time it is tried anew
    _UNSURE = 0.7  # the same while it was measured less than twice
    _FORGET = 0.8  # what a measurement still counts when the next one comes
    _NOISE = 1.25  # times longer or shorter than estimated, at which the machine is as it was
    _CHANGE = 2.0  # times that one measurement may say at most: kernels are compiled, too
    _KNOWN = 4.0  # weights of measurements from which on the ratio of both parts is known
    _MANY = 3  # calls of several, besides one
    _BEHIND = 5  # calls behind some who ended, whose worst is expected
    _RECENT = 7  # decodes whose median counts: one that compiles a kernel takes seconds, once

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, t, n * n, n * t
        # Rows of calls of several, and seconds more than one of one row takes for as many tokens.
        self._rows = deque[tuple[int, float]](maxlen=self._RECENT)
        self._trust = 1.0  # in them
        self._excess = 1.0  # of the last call of several, over what such calls mostly take
        # Times as long as usual that calls took behind a decode in which somebody ended; a little
        # longer before five were seen.
        self._behind = deque[float]([self._NOISE], maxlen=self._BEHIND)
        # Rows and seconds of those that nobody entered, and whether somebody ended in them.
        self._decodes = deque[tuple[int, float, bool]](maxlen=2 * self._RECENT)
        # How many entered others, and seconds more.
        self._entries = deque[tuple[int, float]](maxlen=self._RECENT)
        # How many did, rows and seconds of decodes that cannot be compared yet.
        self._unknown = deque[tuple[int, int, float]](maxlen=self._RECENT)

    def observe(self, tokens: int, seconds: float, rows: int = 1, *, behind: bool = False) -> None:
        """Learn from a call how long calls take.

        Args:
            tokens: that were computed, rows as long as the longest.
            seconds: that it took.
            rows: of the call.
            behind: somebody ended in the decode before it.
        """
        # Before rows were measured, or calls of one twice, what is usual is too little.
        is_known = bool(self._rows) if rows > 1 else self._sums[0] > 1.0
        if behind and is_known and (usual := self._usual(rows, tokens)):
            self._behind.append(min(seconds / usual, self._CHANGE))
        if rows > 1:
            # Before any call of one, what its rows took cannot be told from the call's own time.
            if self.expected(tokens) is not None:
                self._observe_rows(tokens, seconds, rows)
            return
        self._trust *= self._DOUBT if len(self._rows) > 1 else self._UNSURE
        self._excess = math.sqrt(self._excess)  # else nobody might be tried beside others again
        self._follow(tokens, seconds)
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        self._sums = tuple(  # type: ignore[assignment]
            self._FORGET * old + more for old, more in zip(self._sums, new, strict=True)
        )

    def observe_decode(
        self, seconds: float, entered: int, rows: int, *, ended: bool = False
    ) -> None:
        """Learn from a decode what it takes more for each who entered its batch.

        Who enters comes for one who left, and another comes meanwhile: that is a part of it. That
        more rows decode is none: they are compared with half to twice as many.

        Args:
            seconds: from the begin of its step until its tokens were there; where the device
                computes on meanwhile, until those of the one before were, and it was launched.
            entered: sequences whose first decode it was.
            rows: of the batch, theirs included.
            ended: somebody did: to keep what it leaves is a part of the time.
        """
        if entered:
            self._unknown.append((entered, rows, seconds))
        else:
            self._decodes.append((rows, seconds, ended))
        for entry in tuple(self._unknown):
            count, size, taken = entry
            usual = self._usual_decode(size)
            if usual is not None:
                self._entries.append((count, max(0.0, taken - usual)))
                self._unknown.remove(entry)

    def _usual_decode(self, rows: int, *, or_more: bool = False) -> float | None:
        """Seconds of decodes of about so many rows that nobody entered; None before there were.

        Where there were none, those tell in which somebody ended.

        Args:
            rows: of the decode.
            or_more: before these, those of more rows tell, which take no less.
        """
        limits = [4.0 * rows, math.inf] if or_more else [4.0 * rows]
        for ends, limit in product((False, True), limits):
            alike = [t for n, t, ended in self._decodes if ended == ends and rows <= 2 * n <= limit]
            if alike:
                return statistics.median(alike)
        return None

    @property
    def _row(self) -> float | None:
        """Seconds of each row more, at best; None before any was measured."""
        if not self._rows:
            return None
        least, *others = sorted(seconds / (rows - 1) for rows, seconds in self._rows)
        # The very least of many may be noise, as may all but the least of a few.
        return self._trust * (others[0] if len(others) >= self._MANY else least)

    def _usual_rows(self, rows: int) -> float:
        """Seconds that so many rows mostly take more than one; 0 before any were measured.

        Part of it may be the same for two and for many, as where a layer attends to prompts by
        other operations than to one. That shows where calls had different numbers of rows (the
        median of the slopes between them: Theil-Sen). Of one number it is taken to be the rows'.
        What was measured once is doubted.
        """
        if not self._rows or rows == 1:
            return 0.0
        alone = statistics.median(seconds / (count - 1) for count, seconds in self._rows)
        slopes = [
            (more - seconds) / (larger - count)
            for (count, seconds), (larger, more) in combinations(self._rows, 2)
            if larger != count
        ]
        each = min(max(statistics.median(slopes), 0.0), alone) if slopes else alone
        same = statistics.median(seconds - each * (count - 1) for count, seconds in self._rows)
        trust = self._trust if len(self._rows) == 1 else 1.0
        return max(0.0, same + each * (rows - 1)) * trust

    def _entering(self, rows: int) -> float:
        """Estimate how many seconds it takes that so many enter a batch.

        Much of it is the same for one and for many: those tell that were half to twice as many.
        Where there are none, each takes its part.
        """
        entries = self._entries
        if not entries:  # it takes about as long as a row does in a call
            return self._usual_rows(rows + 1)
        near = [seconds for entered, seconds in entries if rows <= 2 * entered <= 4 * rows]
        each = [seconds * rows / entered for entered, seconds in entries]
        return statistics.median(near or each)

    def expected(self, tokens: int) -> float | None:
        """Estimate how many seconds a chunk takes; None before any was measured."""
        count, n, t, nn, nt = self._sums
        if not count:
            return None
        spread = count * nn - n * n
        each = (count * nt - n * t) / spread if spread > 1e-9 * nn else t / n
        each = min(max(each, 0.0), t / n)  # neither part of the time is negative
        return (t - each * n) / count + each * tokens

    def _usual(self, rows: int, tokens: int) -> float:
        """Seconds that a call of so many rows mostly takes, with padding so many tokens."""
        return (self.expected(tokens) or 0.0) + self._usual_rows(rows)

    def _now(self, rows: int, tokens: int, *, ended: bool = False) -> float:
        """Seconds that it takes if it takes as much more than usual as the last one.

        Behind a decode in which somebody ended, as much as the worst of these at least.
        """
        usual = self._usual(rows, tokens)
        return usual * (max(self._excess, *self._behind) if ended else self._excess)

    def joins(self, others: Items[int], tokens: int, *, bounded: bool) -> bool:
        """Whether a chunk is best computed in one call with others.

        That is where it takes no longer than a call of its own: rows are as long as the longest,
        so that a long one makes the others longer. Before it is known what rows take, those join
        that leave a quarter of the call for padding at most; beside streams, two.

        Args:
            others: tokens of these.
            tokens: of the chunk.
            bounded: others decode, and must not wait for longer than the bound, also while
                those that are computed here enter their batch.
        """
        longest, rows = max(*others, tokens), len(others) + 1
        most, entering = self._most_beside(), self._entering(rows)
        if bounded and self._now(rows, rows * longest) + entering > most:
            return False
        row, alone = self._row, self.expected(tokens)
        if row is None or alone is None:
            # Those that are nearly as long tell how long such calls take; beside streams two do.
            tried = rows == _TWO or not bounded
            return tried and rows * longest * _FULL <= sum(others) + tokens
        padded = self.expected(rows * longest) or 0.0
        before = self.expected(len(others) * max(others)) or 0.0
        return padded + row <= before + alone  # the others' rows are in both

    def fitting(self, chunks: Items[int], spent: float, rows: int, *, ended: bool) -> int:
        """Find how many chunks of one call fit behind a decode that may have taken long.

        What was foretold of it was too short where the device met new kinds of work: graphs and
        kernels are made then. One chunk is computed in any case.

        Args:
            chunks: tokens of each, in their order.
            spent: seconds since the step began.
            rows: that decoded; what these usually take, if that is known, does not count.
            ended: somebody did in it.
        """
        over = max(0.0, spent - (self._usual_decode(rows, or_more=True) or 0.0))
        most = self._most_beside()
        count = len(chunks)
        while count > 1:
            if over + self._now(count, count * max(chunks[:count]), ended=ended) <= most:
                break
            count -= 1
        return count

    def should_wait(self, tokens: int, spent: float, rows: int, *, ended: bool) -> bool:
        """Whether a call waits for the next step, since its step's decode took too long.

        It does where the decode took longer than usual by a quarter of the bound, and either
        somebody ended in it, or not even the first prompt fits behind it. Where no such decode is
        known, those count in which somebody entered; where there are none of these either, all of
        the time counts as late.

        Args:
            tokens: of the first prompt.
            spent: seconds since the step began.
            rows: that decoded.
            ended: somebody did in it.
        """
        usual = self._usual_decode(rows, or_more=True)
        entries = [seconds for _, _, seconds in self._unknown]
        over = spent - (statistics.median(entries or [0.0]) if usual is None else usual)
        most = self._most_beside()
        if over <= self._LATE * max(self._seconds, most / self._SURE):
            return False
        return (ended and usual is not None) or over + self._now(1, tokens, ended=ended) > most

    def _follow(self, tokens: int, seconds: float) -> bool:
        """Scale what was measured half the way to a machine of another speed, if it is known."""
        expected = self.expected(tokens)
        if self._sums[0] < self._KNOWN or not expected:
            return False
        if 1 / self._NOISE <= seconds / expected <= self._NOISE:
            return False
        ratio = math.sqrt(min(max(seconds / expected, 1 / self._CHANGE), self._CHANGE))
        count, n, t, nn, nt = self._sums
        self._sums = count, n, t * ratio, nn, nt * ratio
        return True

    def _observe_rows(self, tokens: int, seconds: float, rows: int) -> None:
        if self._rows:
            ratio = seconds / max(self._usual(rows, tokens), 1e-9)
            self._excess = min(max(ratio, 1.0), self._CHANGE)
        if seconds < (self.expected(tokens) or 0.0):  # rows only take more: the machine is faster
            self._follow(tokens, seconds)
        self._rows.append((rows, max(0.0, seconds - (self.expected(tokens) or 0.0))))
        self._trust = 1.0

    def _most_beside(self) -> float:
        """How long a call may take beside streams.

        Where not even the shortest fits, short ones save the streams little and cost prompts much.
        """
        most = self._SURE * self._seconds
        least = self.expected(self._LEAST) or 0.0
        return most if least <= most else 2 * least

    def chunk_size(self, limit: int) -> ChunkSize:
        """Find the longest chunk, up to `limit`, that takes no longer than it may.

        A chunk that is cut is a multiple of the shortest one: lengths that come again are
        planned, and compiled for, once. The last one of a prompt may take a little longer, and all
        of the bound where the shortest takes half of that: two calls would keep streams waiting for
        longer than one.

        Args:
            limit: tokens.
        """
        least, whole = self.expected(self._LEAST), self.expected(limit)
        if least is None or whole is None:
            return ChunkSize(min(limit, self._UNTRIED))
        most = self._most_beside()
        if whole <= most:
            return ChunkSize(limit)
        each = (whole - least) / (limit - self._LEAST)
        cut = self._LEAST + int((most - least) / each) // self._LEAST * self._LEAST
        more = most * self._LAST / self._SURE
        last = self._LEAST + int((max(more, min(2 * least, self._seconds)) - least) / each)
        return ChunkSize(min(cut, limit), min(last, limit))
