"""Lengths that products are fast for.

cuBLAS multiplies matrices whose rows are no multiple of 16 bytes with kernels for any GPU since
2018, of which one takes as long as ten of the others: a step of 32 rows over 7,999 shared tokens
took 15 ms for one of its products, and 0.7 over 8,000 (one H200, 8B shapes). A prefix may
have any length, so its last few tokens are a product of their own.
"""

from collections.abc import Sequence
from typing import Protocol, Self, TypeVar


class Run(Protocol):
    """Consecutive tokens that are read as one.

    Attributes:
        length: how many.
    """

    @property
    def length(self) -> int: ...  # noqa: D102  (described above)

    def between(self, start: int, stop: int) -> Self:
        """Some of them."""
        ...


R = TypeVar("R", bound=Run)


def aligned(runs: Sequence[R], multiple: int) -> tuple[list[R], list[R]]:
    """Cut the last tokens off runs, so that the length of each that stays is a multiple.

    Args:
        runs: of spans.
        multiple: of tokens; 1 where products are fast for all lengths.

    Returns:
        What stays, and what was cut off.
    """
    if multiple == 1:
        return list(runs), []
    whole, rests = [], []
    for run in runs:
        length = run.length // multiple * multiple
        if length:
            whole.append(run.between(0, length))
        if length < run.length:
            rests.append(run.between(length, run.length))
    return whole, rests
