"""When the stacks of a batch are made anew, and when there are none for a while."""

from collections.abc import Mapping, Sequence

from .stacking import Run, Stack, runs_apart, stacks_of

_WORTH = 16_384
"""Tokens that are copied in about the time that one more product of all layers takes a step: on an
H200, of an 8B model, both are a millisecond."""

_STEPS_WITHOUT_MEMORY = 64


class RestackTimer:
    """Counts the steps until stacks are made anew, and those until there may be any again."""

    def __init__(self) -> None:
        self._after: int | None = None
        self._paused = 0

    @property
    def is_due(self) -> bool:
        """Whether what is read apart has cost as much as making stacks of it."""
        return self._after == 0

    @property
    def is_paused(self) -> bool:
        """Whether there has been no memory for stacks of late."""
        return self._paused > 0

    def pause(self) -> None:
        """Have none made for some steps: what takes the memory would be refused in turn."""
        self._paused = _STEPS_WITHOUT_MEMORY

    def step(self, planned: int | None) -> None:
        """Count a step.

        Args:
            planned: what `restacked_after` said of it; None where it reads what the one before did.
        """
        self._paused -= 1
        if planned is not None:  # who comes or goes does not begin the time anew
            self._after = min(planned, self._after or planned) or None
        elif self.is_due:  # there was no memory for it
            self._after = _STEPS_WITHOUT_MEMORY
        elif self._after:
            self._after -= 1


def restacked_after(
    private: Mapping[int, Sequence[Run]], stacks: Sequence[Stack], *, most: int
) -> int:
    """Say after how many steps what is read apart has cost as much as making stacks of it.

    Whoever waits until then, and does not know who comes and goes, pays at most twice what one
    would who knows: the ski rental problem (Karlin et al., Competitive snoopy caching, 1988).

    Args:
        private: as for `stacks_of`.
        stacks: what it said.
        most: as above.

    Returns:
        How many steps; 0 where nothing is gained.
    """
    best = stacks_of(private, stacks, most=most, fewest=True)
    saved = _parts(private, stacks) - _parts(private, best)
    copied = sum(stack.capacity for stack in best if stack.made)
    return max(1, copied // (_WORTH * saved)) if saved > 0 else 0


def _parts(private: Mapping[int, Sequence[Run]], stacks: Sequence[Stack]) -> int:
    """How many products a layer has of what rows alone read."""
    wanted = {slot: tuple(runs) for slot, runs in private.items()}
    return sum(bool(stack.slots) for stack in stacks) + sum(runs_apart(wanted, stacks).values())
