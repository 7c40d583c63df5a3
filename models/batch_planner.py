"""Plans a call for the rows of the batch: who enters and leaves, in which shapes. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .kv.buckets import positions_for, rows_for
from .kv.prefix_groups import PrefixGroup, prefix_groups
from .moves import Enter, Leave, Move, Pack, Relocate, Resize
from .planned_for import Batch, Buffer, Rules, Span, State
from .step_plan import Call, Kind

SHARED = 32
"""Longest shared span, in tokens, that a row copies: a longer one is read where the trie has it."""

_ALWAYS = 256
"""Tokens up to which spans are always merged: reading one more span costs more than the copy."""


class _PlannedSpan(NamedTuple):
    """A span that this step will create."""

    length: int


def leave(state: State, slot: int, rules: Rules) -> Leave:
    """Plan that a sequence leaves its slot."""
    packed = pack(state, rules)
    return Leave(state.number, slot, state.offset, packed.tokens, packed.merges, packed.merged)


def pack(state: State, rules: Rules) -> Pack:
    """Plan that a suffix is packed and merged with the newest of the sequence's own spans.

    A span is merged if it is at most twice as long as all that follows it. So sizes grow
    geometrically: a token is copied O(log n) times, and a prefix stays a few spans.
    """
    tokens = total = state.suffix_length
    merges = merged = 0
    for number, span in enumerate(reversed(state.packed) if tokens else (), 1):
        below, total = total, total + span.length
        if total > rules.longest:
            break
        if span.length <= 2 * below or total <= _ALWAYS:
            merges, merged = number, total
    return Pack(state.number, tokens, merges, merged)


class BatchPlanner:
    """Plans one call for the rows of the batch.

    Args:
        decode: the sequences in the batch afterwards.
        batch: as it is before.
        rules: of the model.
        coming: number of sequences that will soon enter.
    """

    def __init__(
        self, decode: Sequence[State], batch: Batch, rules: Rules, coming: int = 0
    ) -> None:
        self._decode = decode
        self._coming = coming
        self._batch = batch
        self._rules = rules
        self._moves: list[Move] = []
        stay = {state.number for state in decode}
        gone = [(s, state) for s, state in batch.sequences.items() if state.number not in stay]
        self._moves += [leave(state, slot, rules) for slot, state in gone]
        self._slots = {s: state for s, state in batch.sequences.items() if state.number in stay}
        self._new = [state for state in decode if state.slot is None]
        self._prefixes: dict[int, list[Span | _PlannedSpan]] = {}  # after this step
        self._stays = len(self._new) < len(decode)  # a row does: its buffers are kept
        self._used = batch.rows  # slots below it were in use before
        self._own = dict(self._lengths_now())
        self._windows = {
            limit: {slot: buffer.lengths[slot] for slot in self._slots}
            for limit, buffer in batch.windows.items()
        }

    def call(self, *, may_copy: bool) -> Call:
        """Plan the call.

        Args:
            may_copy: rows may be copied so that there are fewer.
        """
        needed = rows_for(len(self._decode), self._rules.row_multiple)
        soon = rows_for(len(self._decode) + self._coming, self._rules.row_multiple)
        has_room = self._stays and needed <= self._batch.rows
        rows = self._batch.rows if has_room else max(soon, self._batch.rows)
        if may_copy and soon < self._batch.rows:
            self._relocate(soon)
            rows = soon
        packs = self._pack_full_rows()
        enters = self._enter()
        positions, windows = self._resize(rows)
        self._moves += enters + packs
        groups, regroups = self._groups()
        shared, padded = self._put_together(groups) if self._rules.gathers else (0, 0)
        slots = {state.number: slot for slot, state in self._slots.items()}
        return Call(
            Kind.BATCH,
            tuple(state.number for state in self._decode),
            tuple(self._moves),
            rows,
            max(state.offset for state in self._decode),
            slots=tuple(slots[state.number] for state in self._decode),
            positions=positions,
            windows=windows,
            groups=groups,
            regroups=regroups,
            shared=shared,
            padded=padded,
        )

    def _lengths_now(self) -> Iterable[tuple[int, int]]:
        """Number of own tokens of each row, by slot."""
        lengths = () if self._batch.suffixes is None else self._batch.suffixes.lengths
        return ((slot, lengths[slot] if lengths else 0) for slot in self._slots)

    def _relocate(self, rows: int) -> None:
        for source in sorted(slot for slot in self._slots if slot >= rows):
            target = next(slot for slot in range(rows) if slot not in self._slots)
            self._moves.append(Relocate(source, target))
            self._slots[target] = self._slots.pop(source)
            for lengths in (self._own, *self._windows.values()):
                lengths[target] = lengths.pop(source)
        self._used = min(self._used, rows)

    def _pack_full_rows(self) -> list[Move]:
        """Pack suffixes that reached `row_limit` into spans."""
        full = [s for s in self._slots if self._own[s] >= self._rules.row_limit]
        for slot in full:
            self._own[slot] = 0
        return [self._packed(self._slots[slot]) for slot in full]

    def _packed(self, state: State) -> Pack:
        move = pack(state, self._rules)
        prefix = self._prefix(state)
        del prefix[len(prefix) - move.merges :]
        prefix.append(_PlannedSpan(move.merged or move.tokens))
        return move

    def _prefix(self, state: State) -> list[Span | _PlannedSpan]:
        if state.number not in self._prefixes:
            self._prefixes[state.number] = list(state.prefix)
        return self._prefixes[state.number]

    def _enter(self) -> list[Move]:
        """Give each new sequence a slot, and choose the spans that it copies into its row."""
        moves: list[Move] = []
        everyone = self._decode if self._new else ()
        leased = Counter(id(span) for state in everyone for span in self._prefix(state))
        for state in self._new:
            slot = next(slot for slot in range(len(self._slots) + 1) if slot not in self._slots)
            tokens, spans = state.suffix_length, 0
            if tokens > self._rules.own:
                moves.append(self._packed(state))
                tokens = 0
            elif self._batch.suffixes is not None:
                for span in reversed(self._prefix(state)):
                    shared = leased[id(span)] > 1 and span.length > SHARED
                    if shared or tokens + span.length > self._rules.own:
                        break
                    tokens, spans = tokens + span.length, spans + 1
            reused = slot < self._used
            moves.append(Enter(state.number, slot, state.offset, spans, tokens, reused))
            self._slots[slot], self._own[slot] = state, tokens
            for limit, lengths in self._windows.items():
                lengths[slot] = self._in_window(state.offset, limit)
        return moves

    def _in_window(self, offset: int, limit: int) -> int:
        if limit in self._rules.chunked and offset:
            return (offset - 1) % limit + 1
        return min(offset, limit)

    def _resize(self, rows: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Plan room for a token more in every row."""
        suffixes, before = self._batch.suffixes, self._batch.rows
        positions = 0 if suffixes is None else self._room(suffixes, self._own.values())
        windows = tuple(
            (limit, self._room(buffer, self._windows[limit].values()))
            for limit, buffer in self._batch.windows.items()
        )
        was = tuple((limit, buffer.positions) for limit, buffer in self._batch.windows.items())
        had = 0 if suffixes is None else suffixes.positions
        if not self._stays or (rows, positions, windows) != (before, had, was):
            self._moves.append(Resize(rows, positions, windows, renewed=not self._stays))
        return positions, windows

    def _room(self, buffer: Buffer, lengths: Iterable[int]) -> int:
        """Positions that a buffer needs for a token more in each row.

        A buffer does not shrink while a row stays. Without any row it is made anew.
        """
        needed = min(positions_for(max(lengths, default=0) + 1), buffer.limit)
        return max(buffer.positions, needed) if self._stays else needed

    def _groups(self) -> tuple[tuple[PrefixGroup, ...], bool]:
        if not self._moves and self._batch.groups is not None:
            return self._batch.groups, False
        return prefix_groups({slot: self._read_by(slot) for slot in self._slots}), True

    def _read_by(self, slot: int) -> Sequence[object]:
        """The part of a row's prefix that is not in the row itself."""
        state = self._slots[slot]
        prefix, left, count = self._prefix(state), state.offset - self._own[slot], 0
        while left > 0 and count < len(prefix):
            left -= prefix[count].length
            count += 1
        return prefix[:count]

    def _put_together(self, groups: Iterable[PrefixGroup]) -> tuple[int, int]:
        """Tokens of prefixes that are gathered for each row: shared ones, and padded own ones."""
        shared, alone = 0, Counter[int]()
        for slots, start, stop in groups:
            prefix = self._prefix(self._slots[slots[0]])
            tokens = sum(span.length for span in prefix[start:stop])
            if len(slots) > 1:
                shared += tokens
            else:
                alone[slots[0]] += tokens
        longest = max(alone.values(), default=0)
        return shared, positions_for(longest) if longest else 0
