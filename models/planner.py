"""Plans steps: a pure function of who runs, where their state lies, and a model's rules."""

from collections.abc import Sequence

from .batch_planner import BatchPlanner, leave
from .memory_profile import PlannedChunk
from .moves import MakeContiguous, Move
from .planned_for import Batch, Rules, State
from .step_plan import EXACT_ROWS, Call, DecodePlan, Kind, PrefillPlan, StepPlan

PlannedPrompt = tuple[State, int]
"""A sequence whose prompt advances, and by how many tokens."""


def plan_step(
    decode: Sequence[State],
    prefill: PlannedPrompt | None,
    batch: Batch,
    rules: Rules,
    *,
    logits: int = 0,
    coming: int = 0,
    may_copy: bool = True,
) -> StepPlan:
    """Plan a step.

    Args:
        decode: sequences that get a token each, in the order of these tokens.
        prefill: the prompt that advances, if one does.
        batch: who is in it, and how large it is.
        rules: of the model.
        logits: tokens of that prompt whose logits are computed.
        coming: how many more will soon get a token each, with those that do now: a batch that is
            made or grows has rows for them, and one that stays keeps them.
        may_copy: state may be copied to be faster, or to be smaller later: a single sequence's
            out of the batch or into one piece, and that of all rows into fewer.
    """
    return StepPlan(
        plan_decode(decode, batch, rules, coming=coming, may_copy=may_copy) if decode else None,
        None if prefill is None else _plan_prompt(prefill, logits),
    )


def _plan_prompt(prompt: PlannedPrompt, logits: int) -> PrefillPlan:
    state, tokens = prompt
    chunk = PlannedChunk(tokens, state.offset, state.suffix_length)
    return PrefillPlan(state.number, chunk, logits)


def plan_decode(
    decode: Sequence[State],
    batch: Batch,
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


def _stays(state: State, coming: int, *, may_copy: bool) -> bool:
    """Whether one that decodes alone keeps its row: others come, or its state may not move.

    One that has none gets none until another one decodes: what both lease is told then.
    """
    return state.slot is not None and (coming > 0 or not may_copy)


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
