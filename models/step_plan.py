"""A step as a value: what it moves, computes and keeps, in plain integers, before it runs.

`plan_step` makes one of what runs and where that lies. `StepPlan.cost` says what it takes. Only
then `ModelRunner.run` executes it, and decides nothing. Nothing here knows MLX, nor does any I/O.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from .kv.buckets import bucket, padded_to, positions_for
from .kv.prefix_groups import PrefixGroup, prefix_groups
from .memory_profile import GROWTH, Held, MemoryProfile

EXACT_ROWS = 8
"""Rows of every call of an exact model: products of other shapes round differently."""

SHARED = 32
"""Tokens of a span that a row does not copy, because another sequence leases it too."""

_SINGLE_STEPS = 8
"""Steps after which a sequence that decodes alone is worth a copy of what it leases."""


# -- what is planned for ---------------------------------------------------------------------


class Span(Protocol):
    """State of consecutive tokens that is read and no longer written."""

    @property
    def length(self) -> int: ...  # noqa: D102  (how many tokens)


class State(Protocol):
    """A running sequence's state; `SequenceCache` is the real one.

    Attributes:
        number: its name in plans.
        offset: tokens that it has seen.
        prefix: spans that it reads, oldest first; those it leases, and then its own.
        packed: how many of them are its own.
        suffix_length: tokens after the prefix.
        slot: its row of the batch; None where it has caches of its own.
        is_contiguous: its own caches hold all its keys in one piece.
        suffix_is_full: its own caches grow with the next token.
        windows_change: layers with a window get other arrays with the next token.
        single_steps: decode steps since it last was in a batch.
    """

    @property
    def number(self) -> int: ...  # noqa: D102  (described above, like those that follow)
    @property
    def offset(self) -> int: ...  # noqa: D102
    @property
    def prefix(self) -> Sequence[Span]: ...  # noqa: D102
    @property
    def packed(self) -> Sequence[Span]: ...  # noqa: D102
    @property
    def suffix_length(self) -> int: ...  # noqa: D102
    @property
    def slot(self) -> int | None: ...  # noqa: D102
    @property
    def is_contiguous(self) -> bool: ...  # noqa: D102
    @property
    def suffix_is_full(self) -> bool: ...  # noqa: D102
    @property
    def windows_change(self) -> bool: ...  # noqa: D102
    @property
    def single_steps(self) -> int: ...  # noqa: D102


class Buffer(Protocol):
    """What the batch's rows hold of layers that keep equally many tokens: a `RingBuffer`.

    Attributes:
        limit: the most tokens of a row.
        positions: tokens that each row has room for now.
        lengths: tokens of each row, by its slot.
    """

    @property
    def limit(self) -> int: ...  # noqa: D102  (described above, like those that follow)
    @property
    def positions(self) -> int: ...  # noqa: D102
    @property
    def lengths(self) -> Sequence[int]: ...  # noqa: D102


class Batch(Protocol):
    """Who is in the batch; `Placement` is the real one.

    Attributes:
        sequences: by their slots.
        rows: how many there are, free ones included.
        spare_steps: steps for which fewer rows were enough.
        suffixes: the rows' tokens of layers that keep all; None if the model has none.
        windows: those of layers with a window, by its length.
        groups: who reads which spans; None where that must be looked at anew.
    """

    @property
    def sequences(self) -> Mapping[int, State]: ...  # noqa: D102  (described above, as those below)
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def spare_steps(self) -> int: ...  # noqa: D102
    @property
    def suffixes(self) -> Buffer | None: ...  # noqa: D102
    @property
    def windows(self) -> Mapping[int, Buffer]: ...  # noqa: D102
    @property
    def groups(self) -> tuple[PrefixGroup, ...] | None: ...  # noqa: D102


class Contiguous(Enum):
    """When a single sequence's keys are put in one piece."""

    NEVER = auto()
    LATER = auto()
    """Once it is likely to stay alone: one fused kernel then reads them."""
    ALWAYS = auto()
    """The model asks for them in one piece: it is spared a copy each step."""


@dataclass(frozen=True)
class Rules:
    """What is fixed for a loaded model and its budget.

    Attributes:
        exact: every call has `EXACT_ROWS` rows, and each attends by itself.
        batches: sequences decode as rows of one batch; without it one by one.
        contiguous: of single sequences.
        chunked: lengths of those windows that are emptied when a chunk begins.
        gathers: each layer puts all keys of all rows together.
        own: tokens of its prefix's end, at most, that a row copies so as to read them as its own:
            many short spans of single rows cost more to read one by one than the copy takes.
        row_limit: tokens of its own after which a row is packed.
        longest: tokens that may be packed, merged or copied at a time.
        spare_steps: for which the batch may have more rows than it needs.
        overlaps: two steps may be under way at once.
    """

    exact: bool = False
    batches: bool = True
    contiguous: Contiguous = Contiguous.NEVER
    chunked: frozenset[int] = frozenset()
    gathers: bool = False
    own: int = 256
    row_limit: int = 512
    longest: int = 1 << 62
    spare_steps: int = 0
    overlaps: bool = False


# -- moves -----------------------------------------------------------------------------------


class Leave(NamedTuple):
    """A sequence gets caches of its own; its suffix becomes a span.

    Attributes:
        sequence: by its number, here and in all moves.
        slot: that it had.
        offset: tokens that it has seen.
        tokens: of its suffix.
        merges: how often the newest of its own spans is merged with the one before it.
        merged: tokens of what comes of that; 0 without.
    """

    sequence: int
    slot: int
    offset: int
    tokens: int
    merges: int
    merged: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied: a row's tokens are taken out of its buffers, and then packed."""
        copied = profile.sizes.token * (2 * self.tokens + self.merged)
        return copied + profile.captured(self.offset).nbytes


class Pack(NamedTuple):
    """A sequence's suffix becomes a span; see `Leave`, also for the price."""

    sequence: int
    tokens: int
    merges: int
    merged: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied, and not given back before the step is over."""
        return profile.sizes.token * (2 * self.tokens + self.merged)


class MakeContiguous(NamedTuple):
    """A sequence's keys are copied into one piece.

    Attributes:
        tokens: that it has.
    """

    sequence: int
    tokens: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied, and not given back before the step is over; see `StateSizes.growth`."""
        return profile.sizes.suffix(self.tokens) + profile.sizes.one_layer(GROWTH)


class Relocate(NamedTuple):
    """A row moves to another slot, so that the batch can become smaller."""

    source: int
    target: int

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied. The row's buffers are priced where they are resized."""
        return profile.sizes.fixed


class Resize(NamedTuple):
    """The batch has other shapes.

    Attributes:
        rows: free ones included.
        positions: of the suffixes.
        windows: positions of each window, by its length.
        renewed: nothing of what was there is kept.
    """

    rows: int
    positions: int
    windows: tuple[tuple[int, int], ...]
    renewed: bool = False

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is copied. The buffers are priced with the call that they are for."""
        del profile
        return 0


class Enter(NamedTuple):
    """A sequence gets a row of the batch.

    Attributes:
        slot: of the row.
        offset: tokens that it has seen.
        spans: how many at its prefix's end are copied into the row.
        tokens: that the row then has of its own.
        reused: somebody else had the slot before.
    """

    sequence: int
    slot: int
    offset: int
    spans: int
    tokens: int
    reused: bool

    def nbytes(self, profile: MemoryProfile) -> int:
        """What is put together before it is written into the row."""
        return profile.sizes.token * self.tokens + profile.sizes.in_windows(self.offset)


Move = Leave | Pack | MakeContiguous | Relocate | Resize | Enter


# -- plans -----------------------------------------------------------------------------------


class Kind(Enum):
    """How a call runs its sequences."""

    SINGLE = auto()
    """One, in caches of its own."""
    BATCH = auto()
    """Several, as rows of the batch."""
    EXACT = auto()
    """Several, each attending by itself, among `EXACT_ROWS` rows."""


@dataclass(frozen=True)
class Call:
    """One call of the model.

    Attributes:
        kind: how it runs.
        sequences: numbers of those that get a token, in the order of their tokens.
        moves: what comes before, in order.
        rows: that are computed, free ones included.
        context: the most tokens that a row looks at.
        growing: sequences whose own caches grow.
        changing: tokens seen by those whose windows get other arrays.
        slots: of `sequences`, in a batch.
        positions: of the rows' suffixes, in a batch.
        windows: positions of each window there, by its length.
        groups: who reads which spans there.
        regroups: whether these differ from those of the step before.
        spare_steps: for which fewer rows were enough, this one included.
        shared: tokens of prefixes of several rows that each layer puts together for each row,
            where the model attends by itself.
        padded: tokens of a row's own prefix that it puts together there, padding included.
    """

    kind: Kind
    sequences: tuple[int, ...]
    moves: tuple[Move, ...]
    rows: int
    context: int
    growing: int = 0
    changing: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    positions: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    groups: tuple[PrefixGroup, ...] = ()
    regroups: bool = False
    spare_steps: int = 0
    shared: int = 0
    padded: int = 0

    @property
    def gathered(self) -> int:
        """Tokens that each layer puts together for each row; 0 where they are read as they lie."""
        prefixes = self.shared + self.padded
        return prefixes + self.positions if prefixes else 0

    def nbytes(self, profile: MemoryProfile) -> int:
        """What it takes at its peak, besides what it computes with and drops."""
        sizes = profile.sizes
        taken = sum(move.nbytes(profile) for move in self.moves)
        taken += sizes.growth * self.growing
        taken += sum(sizes.non_trimmable(offset + 1) for offset in self.changing)
        taken += profile.gathered(self.rows)  # recurrent layers replace their states
        if self.kind is Kind.EXACT:
            # Rows are put together in each layer, and given back to each sequence.
            taken += profile.gathered(self.rows) + len(self.sequences) * sizes.fixed
        if any(isinstance(move, Resize) for move in self.moves):
            taken += self.rows * self._row(profile)
        if self.gathered:
            taken += profile.put_together(self.rows, self.gathered, self.padded)
        return taken

    def _row(self, profile: MemoryProfile) -> int:
        """Bytes of one row's buffers."""
        room = dict(self.windows)
        windows = sum(ring.token * room[ring.window] for ring in profile.sizes.rings)
        return profile.sizes.token * self.positions + windows + profile.sizes.fixed


@dataclass(frozen=True)
class DecodePlan:
    """One token for each of some sequences.

    Attributes:
        calls: of the model, in order; each sequence is in one of them.
        overlaps: the step before may still be under way.
    """

    calls: tuple[Call, ...]
    overlaps: bool

    def cost(self, profile: MemoryProfile) -> Held:
        """What it takes at its peak."""
        rows = sum(call.rows for call in self.calls)
        context = max(max(call.context, call.gathered) for call in self.calls)
        taken = sum(call.nbytes(profile) for call in self.calls)
        # Where the device computes on while the host goes on, two steps are under way.
        taken += profile.compute(rows, context) * (2 if self.overlaps else 1)
        return Held(taken, 2 * profile.sizes.arrays)


class PrefillPlan(NamedTuple):
    """A piece of a prompt.

    Attributes:
        sequence: by its number.
        offset: tokens that it has seen.
        tokens: of the piece.
        suffix: tokens that it has of its own before.
    """

    sequence: int
    offset: int
    tokens: int
    suffix: int

    def cost(self, profile: MemoryProfile) -> Held:
        """What it takes at its peak."""
        return profile.chunk(self.tokens, self.offset, self.suffix)


@dataclass(frozen=True)
class StepPlan:
    """What one step does: tokens for those who decode, and a piece of one prompt."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None

    def cost(self, profile: MemoryProfile) -> Held:
        """What it takes at its peak, over what is held before it."""
        parts = [part.cost(profile) for part in (self.decode, self.prefill) if part is not None]
        return Held(sum(part.nbytes for part in parts), sum(part.buffers for part in parts))


# -- planning --------------------------------------------------------------------------------


def plan_step(
    decode: Sequence[State],
    prefill: tuple[State, int] | None,
    batch: Batch,
    rules: Rules,
    *,
    may_copy: bool = True,
) -> StepPlan:
    """Plan a step.

    Args:
        decode: sequences that get a token each, in the order of these tokens.
        prefill: a sequence whose prompt advances, and by how many tokens.
        batch: who is in it, and how large it is.
        rules: of the model.
        may_copy: state may be copied to be faster, or to be smaller later: a single sequence's
            out of the batch or into one piece, and that of all rows into fewer.
    """
    piece = None
    if prefill is not None:
        state, tokens = prefill
        piece = PrefillPlan(state.number, state.offset, tokens, state.suffix_length)
    return StepPlan(plan_decode(decode, batch, rules, may_copy=may_copy) if decode else None, piece)


def plan_decode(
    decode: Sequence[State], batch: Batch, rules: Rules, *, may_copy: bool = True
) -> DecodePlan:
    """Plan a token for each of some sequences, at least one; see `plan_step`."""
    if rules.exact and rules.batches:
        parts = [decode[at : at + EXACT_ROWS] for at in range(0, len(decode), EXACT_ROWS)]
        calls = [_exact(part) for part in parts]
    elif rules.batches and (len(decode) > 1 or (decode[0].slot is not None and not may_copy)):
        calls = [_BatchPlanner(decode, batch, rules).call(may_shrink=may_copy)]
    else:
        calls = [_single(state, rules, may_copy=may_copy) for state in decode]
    return DecodePlan(tuple(calls), rules.overlaps)


def _exact(decode: Sequence[State]) -> Call:
    return Call(
        Kind.EXACT,
        tuple(state.number for state in decode),
        tuple(
            MakeContiguous(state.number, state.offset)
            for state in decode
            if not state.is_contiguous
        ),
        EXACT_ROWS,
        max(state.offset for state in decode),
        growing=sum(state.suffix_is_full and state.is_contiguous for state in decode),
        changing=tuple(state.offset for state in decode if state.windows_change),
    )


def _single(state: State, rules: Rules, *, may_copy: bool) -> Call:
    moves: list[Move] = []
    if state.slot is not None:
        moves.append(leave(state, state.slot, rules))
    elif state.suffix_length >= rules.longest:
        moves.append(pack(state, rules))  # packing it must fit at any time
    always = rules.contiguous is Contiguous.ALWAYS
    later = rules.contiguous is Contiguous.LATER
    due = always or (later and (state.single_steps + 1) % _SINGLE_STEPS == 0)
    begins = bool(moves)
    copies = due and may_copy and (begins or not state.is_contiguous)
    if copies:
        moves.append(MakeContiguous(state.number, state.offset))
    return Call(
        Kind.SINGLE,
        (state.number,),
        tuple(moves),
        1,
        state.offset,
        growing=int(not copies and (begins or state.suffix_is_full)),
        changing=(state.offset,) if begins or state.windows_change else (),
    )


class _Packed(NamedTuple):
    """A span that there will be."""

    length: int


def leave(state: State, slot: int, rules: Rules) -> Leave:
    """Have a sequence leave its slot of the batch."""
    packed = pack(state, rules)
    return Leave(state.number, slot, state.offset, packed.tokens, packed.merges, packed.merged)


def pack(state: State, rules: Rules) -> Pack:
    """Pack a suffix, and merge small neighbours.

    Sizes grow geometrically, so a token is copied O(log n) times, and a prefix stays a few spans.
    """
    tokens = last = state.suffix_length
    merges = 0
    if tokens:
        for before in reversed([span.length for span in state.packed]):
            if before > 2 * last or before + last > rules.longest:
                break
            last += before
            merges += 1
    return Pack(state.number, tokens, merges, last if merges else 0)


class _BatchPlanner:
    """Plans one call for rows of the batch: who leaves, who enters, in which shapes.

    Args:
        decode: who is in the batch afterwards.
        batch: as it is.
        rules: of the model.
    """

    def __init__(self, decode: Sequence[State], batch: Batch, rules: Rules) -> None:
        self._decode = decode
        self._batch = batch
        self._rules = rules
        self._moves: list[Move] = []
        stay = {state.number for state in decode}
        gone = [(s, state) for s, state in batch.sequences.items() if state.number not in stay]
        self._moves += [leave(state, slot, rules) for slot, state in gone]
        self._slots = {s: state for s, state in batch.sequences.items() if state.number in stay}
        self._new = [state for state in decode if state.slot is None]
        self._prefixes: dict[int, list[Span]] = {}  # as they will be, where somebody asked
        self._used = batch.rows  # slots below it have had somebody
        self._own = dict(self._lengths_now())
        self._windows = {
            limit: {slot: buffer.lengths[slot] for slot in self._slots}
            for limit, buffer in batch.windows.items()
        }

    def call(self, *, may_shrink: bool) -> Call:
        """Plan it.

        Args:
            may_shrink: rows may be copied so that there are fewer.
        """
        needed = bucket(len(self._decode))
        spare = self._batch.spare_steps + 1 if needed < self._batch.rows else 0
        rows = max(needed, self._batch.rows)
        if may_shrink and spare > self._rules.spare_steps:
            self._relocate(needed)
            rows, spare = needed, 0
        packs = self._full()
        enters = self._enter()
        positions, windows = self._resize(rows)
        self._moves += enters + packs
        groups, regroups = self._groups(changed=bool(self._moves))
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
            spare_steps=spare,
            shared=shared,
            padded=padded,
        )

    def _lengths_now(self) -> Iterable[tuple[int, int]]:
        """What each row has of its own."""
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

    def _full(self) -> list[Move]:
        """Pack what rows have of their own where it has become long."""
        full = [s for s in self._slots if self._own[s] >= self._rules.row_limit]
        for slot in full:
            self._own[slot] = 0
        return [self._packed(self._slots[slot]) for slot in full]

    def _packed(self, state: State) -> Pack:
        move = pack(state, self._rules)
        prefix = self._prefix(state)
        del prefix[len(prefix) - move.merges :]
        prefix.append(_Packed(move.merged or move.tokens))
        return move

    def _prefix(self, state: State) -> list[Span]:
        if state.number not in self._prefixes:
            self._prefixes[state.number] = list(state.prefix)
        return self._prefixes[state.number]

    def _enter(self) -> list[Move]:
        """Give those who are new a slot each, and say what they copy into it."""
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
        """Have room for a token more in every row."""
        suffixes, before = self._batch.suffixes, self._batch.rows
        stay = len(self._new) < len(self._decode)
        positions = 0 if suffixes is None else _room(suffixes, self._own.values(), keep=stay)
        windows = tuple(
            (limit, _room(buffer, self._windows[limit].values(), keep=stay))
            for limit, buffer in self._batch.windows.items()
        )
        was = tuple((limit, buffer.positions) for limit, buffer in self._batch.windows.items())
        had = 0 if suffixes is None else suffixes.positions
        if not stay or (rows, positions, windows) != (before, had, was):
            self._moves.append(Resize(rows, positions, windows, renewed=not stay))
        return positions, windows

    def _groups(self, *, changed: bool) -> tuple[tuple[PrefixGroup, ...], bool]:
        if not changed and self._batch.groups is not None:
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
        """How many tokens of prefixes each row gets: those that several read, and its own."""
        shared, alone = 0, Counter[int]()
        for slots, start, stop in groups:
            prefix = self._prefix(self._slots[slots[0]])
            tokens = sum(span.length for span in prefix[start:stop])
            if len(slots) > 1:
                shared += tokens
            else:
                alone[slots[0]] += tokens
        return shared, padded_to(max(alone.values(), default=0))


def _room(buffer: Buffer, lengths: Iterable[int], *, keep: bool) -> int:
    """How many positions a buffer needs for a token more in each row.

    It does not shrink under those who stay; what is wide for rows that left is narrow again for
    the next ones.
    """
    needed = min(positions_for(max(lengths, default=0) + 1), buffer.limit)
    return max(buffer.positions, needed) if keep else needed
