"""Where whole states are saved, and which of them are worth keeping. Pure.

The decode schedule follows Ollama's PR #15914: dense at first, since what diverges inside an
answer (thinking that is dropped, a tool call written differently) does so early.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .state import Checkpoint

_DENSE, _MEDIUM = 512, 2048  # generated tokens up to which a step of the schedule holds
_HINT_AFTER = 64  # tokens that a hinted checkpoint spares a request, at least
_OWN = 2  # checkpoints that a conversation needs for its next turn: FINAL and MESSAGE


class Reason(enum.IntEnum):
    """Why a checkpoint was taken; of two at one offset, the smaller reason is the better."""

    JUNCTION = 0  # a second request was seen to diverge there
    FINAL = 1  # the end of what was computed: a follow-up with the exact history resumes there
    MESSAGE = 2  # a message boundary that a next turn keeps
    SYSTEM = 3  # the end of system prompt and tools, which other conversations share
    HINT = 4  # the end of a shared part, by the client's hint
    DECODE = 5  # inside an answer
    PROMPT = 6  # one before the end of a prompt without messages: an exact repeat resumes there
    GRID = 7  # a multiple of the interval, for prompts that change somewhere in the middle


class Captured(NamedTuple):
    """A checkpoint that was taken, and why."""

    checkpoint: Checkpoint
    reason: Reason


def prompt_offsets(
    length: int,
    *,
    cached: int,
    matched: int,
    boundaries: Iterable[tuple[int, Reason]],
    interval: int,
    kept: int,
) -> dict[int, Reason]:
    """Offsets in `(cached, length - 1]` where a prefill stops to save its state, ascending.

    Args:
        length: tokens of the prompt. The last one is always computed, for the logits that follow.
        cached: tokens that were restored.
        matched: tokens that were recognised. Beyond `cached`, their end is a junction: a third
            request that comes there shall not compute what this second one did.
        boundaries: offsets that a next turn, or another request, will keep.
        interval: distance of the grid.
        kept: limit of checkpoints that the request may leave behind. Hints get what is left of it.
    """
    last = length - 1
    wanted = [(offset, Reason.GRID) for offset in range(interval, length, interval)]
    wanted += [(min(offset, last), reason) for offset, reason in boundaries]
    wanted.append((min(matched, last), Reason.JUNCTION))
    if all(reason is not Reason.MESSAGE for _, reason in wanted):
        wanted.append((last, Reason.PROMPT))
    best: dict[int, Reason] = {}
    hints = set()
    for offset, reason in sorted(wanted):
        if cached < offset and reason is Reason.HINT:
            hints.add(offset)
        elif cached < offset:
            best.setdefault(offset, reason)
    best |= dict.fromkeys(_useful(hints, best, cached, kept), Reason.HINT)
    return dict(sorted(best.items()))


def _useful(hints: set[int], best: Mapping[int, Reason], cached: int, kept: int) -> list[int]:
    """Hints that save the most tokens, except at the deepest message: that is the next turn's."""
    messages = {offset for offset, reason in best.items() if reason is Reason.MESSAGE}
    shared = {offset for offset, reason in best.items() if reason < Reason.HINT} - messages
    hints = hints - shared - {max(messages, default=0)}
    resumable = {cached} | shared | hints
    spared = {hint: hint - max(at for at in resumable if at < hint) for hint in hints}
    useful = [hint for hint in sorted(hints) if spared[hint] >= _HINT_AFTER]
    useful.sort(key=lambda hint: -spared[hint])
    return useful[: max(0, kept - _OWN - len(shared))]


def decode_due(generated: int) -> bool:
    """True if a checkpoint is due this many generated tokens after the last prompt checkpoint."""
    if generated <= 0:
        return False
    if generated <= _DENSE:
        return generated % 64 == 0
    return generated % (256 if generated <= _MEDIUM else 1024) == 0


FINAL_AFTER = 64
"""Generated tokens from which on the end of an answer is worth a checkpoint."""


def keep(captured: Sequence[Captured], limit: int) -> tuple[list[Captured], list[Captured]]:
    """Divide captured checkpoints into at most `limit` that stay, and those that are dropped.

    One of each reason stays, the best reasons first, then a second of each, and so on: many message
    boundaries must not displace the one that other conversations share. `prompt_offsets` has
    limited hints, so each counts as a reason. The first decode checkpoint is preferred, because
    answers diverge early, and the deepest of others; at one offset, the better reason.
    """
    best: dict[int, Captured] = {}
    for item in sorted(captured, key=lambda item: item.reason):
        best.setdefault(item.checkpoint.offset, item)
    taken: Counter[Reason] = Counter()
    ranked: list[tuple[int, Reason, Captured]] = []
    for item in sorted(best.values(), key=_worth):
        ranked.append((taken[item.reason], item.reason, item))
        taken[item.reason] += item.reason is not Reason.HINT
    ranked.sort(key=lambda entry: entry[:2])
    kept = [item for _, _, item in ranked[:limit]]
    return kept, [item for item in captured if not any(item is other for other in kept)]


def _worth(item: Captured) -> tuple[int, int]:
    offset = item.checkpoint.offset
    return item.reason, offset if item.reason is Reason.DECODE else -offset
