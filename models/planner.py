"""Plans steps: a pure function of the sequences, the places of their state, and a model's rules.

A sequence (`SequenceCache`) is read by `number`, `offset`, `leased`, `suffix_length`, `slot`,
`is_contiguous`, `suffix_is_full` and `windows_change`; the batch (`Placement`) by `sequences`,
`rows`, `own`, `windows` and `groups`. Nothing here imports MLX.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .backends import Limits
from .batch_planner import BatchPlanner, leave
from .memory_profile import PlannedChunk, StateSizes
from .step_plan import (
    EXACT_ROWS,
    Call,
    DecodePlan,
    Kind,
    MakeContiguous,
    Move,
    PrefillPlan,
    StepPlan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .kv.placement import Placement
    from .kv.sequence_cache import SequenceCache
    from .load.probe import Probed

_LEAST_CLASS = 64  # tokens; in shorter rows overhead takes all the time
_ROWS_SHARE = 4  # the rows' own tokens take at most one part in this many


@dataclass(frozen=True)
class Rules:
    """Rules that are fixed for a loaded model and its budget.

    Attributes:
        exact: every call has `EXACT_ROWS` rows, and each attends separately.
        batches: sequences decode as rows of one batch, not one by one.
        contiguous: a single sequence's keys are copied into one piece before its first step: the
            model asks for them so, and would copy them in each step.
        chunked: lengths of those windows that are emptied when a chunk begins.
        gathers: each layer puts all keys of all rows together: there is one class.
        least_class: the most own tokens of a row in the class of the shortest ones.
        row_multiple: of rows; see `rows_for`.
        overlaps: two steps may be under way at once.
    """

    exact: bool = False
    batches: bool = True
    contiguous: bool = False
    chunked: frozenset[int] = frozenset()
    gathers: bool = False
    least_class: int = 1024
    row_multiple: int = 1
    overlaps: bool = False

    def within(self, budget: int, sizes: StateSizes, *, max_batch: int) -> "Rules":
        """Limit the rows of short sequences to a budget.

        Args:
            budget: bytes of all state.
            sizes: of state.
            max_batch: the most sequences that run at once.
        """
        limit = self.least_class
        while limit > _LEAST_CLASS and limit * sizes.token * max_batch * _ROWS_SHARE > budget:
            limit //= 2
        return replace(self, least_class=limit)


def rules_of(limits: Limits, probed: "Probed", *, exact: bool) -> Rules:
    """Rules that the model and the device determine, before the budget is known.

    Args:
        limits: of the device.
        probed: how its sequences decode together. A model that decodes one by one reads keys in
            one piece, however they are cut.
        exact: see `ModelRunner`.
    """
    return Rules(
        exact=exact,
        batches=probed.one_by_one is None,
        contiguous=limits.contiguous or not probed.reads_parts,
        gathers=probed.mask_axes > 0,
        row_multiple=limits.row_multiple,
        overlaps=limits.overlaps,
    )


def plan_step(
    decode: "Sequence[SequenceCache]",
    prefill: "tuple[SequenceCache, int] | None",
    batch: "Placement",
    rules: Rules,
    *,
    logits: int = 0,
    coming: int = 0,
    may_copy: bool = True,
) -> StepPlan:
    """Plan a step.

    Args:
        decode: sequences that get a token each, in the order of these tokens.
        prefill: the sequence whose prompt advances, and by how many tokens; or None.
        batch: with its sequences and buffers.
        rules: of the model.
        logits: tokens of that prompt whose logits are computed.
        coming: number of sequences that will soon decode beside these: a batch that is made or
            grows has rows for them, and one that stays keeps them.
        may_copy: state may be copied to be faster, or to be smaller later: a single sequence's
            out of the batch or into one piece, and that of all rows into fewer.
    """
    prompt = None
    if prefill is not None:
        state, tokens = prefill
        chunk = PlannedChunk(tokens, state.offset, state.suffix_length)
        prompt = PrefillPlan(state.number, chunk, logits)
    return StepPlan(
        plan_decode(decode, batch, rules, coming=coming, may_copy=may_copy) if decode else None,
        prompt,
    )


def plan_decode(
    decode: "Sequence[SequenceCache]",
    batch: "Placement",
    rules: Rules,
    *,
    coming: int = 0,
    may_copy: bool = True,
) -> DecodePlan:
    """Plan a token for each of some sequences, at least one; see `plan_step`."""
    if rules.exact and rules.batches:
        parts = [decode[at : at + EXACT_ROWS] for at in range(0, len(decode), EXACT_ROWS)]
        calls = [_exact(part) for part in parts]
    elif rules.batches and (len(decode) > 1 or _stays(decode[0], coming, may_copy=may_copy)):
        calls = [BatchPlanner(decode, batch, rules, coming=coming, may_copy=may_copy).call()]
    else:
        calls = [_single(state, rules, may_copy=may_copy) for state in decode]
    return DecodePlan(tuple(calls), rules.overlaps)


def _stays(state: "SequenceCache", coming: int, *, may_copy: bool) -> bool:
    """True if a single sequence keeps its row: others come, or its state may not move.

    A single sequence enters the batch only when a second one decodes; only then are shared prefixes
    known.
    """
    return state.slot is not None and (coming > 0 or not may_copy)


def _exact(decode: "Sequence[SequenceCache]") -> Call:
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


def _single(state: "SequenceCache", rules: Rules, *, may_copy: bool) -> Call:
    moves: list[Move] = []
    if state.slot is not None:
        moves.append(leave(state, state.slot))
    begins = bool(moves)
    copies = rules.contiguous and may_copy and (begins or not state.is_contiguous)
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
