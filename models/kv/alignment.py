"""Lengths that products are fast for.

cuBLAS multiplies matrices whose rows are no multiple of 16 bytes with kernels for any GPU since
2018, of which one takes as long as ten of the others: a step of 32 rows over 7,999 shared tokens
took 15 ms for one of its products, and 0.7 over 8,000 (one H200, 8B shapes). How long a prefix is
nobody chooses. So its last few tokens are read apart.
"""

from collections.abc import Sequence

from .storage import SpanRun


def aligned(runs: Sequence[SpanRun], multiple: int) -> tuple[list[SpanRun], list[SpanRun]]:
    """Cut the last tokens off runs, so that the length of what stays is a multiple; and these."""
    whole, rests = [], []
    for run in runs:
        length = run.length // multiple * multiple
        if length:
            whole.append(run.between(0, length))
        if length < run.length:
            rests.append(run.between(length, run.length))
    return whole, rests
