"""The rules by which steps are planned: of the model and its device, then of the budget."""

from dataclasses import replace

from .backends import Limits
from .load.probe import Batching
from .memory_profile import StateSizes
from .planned_for import Rules

_LEAST_COPY = 64  # tokens of a copy
_LEAST_ROW = 64  # tokens; below these, overhead is all there is
_ROWS_SHARE = 4  # the rows' own tokens take at most one part in this many


def rules_of(limits: Limits, way: Batching, *, exact: bool, reads_parts: bool) -> Rules:
    """Rules that the model and the device determine, before the budget is known.

    Args:
        limits: of the device.
        way: how its sequences decode together, if they do.
        exact: see `ModelRunner`.
        reads_parts: its attention reads a prefix span by span.
    """
    return Rules(
        exact=exact,
        batches=way.one_by_one is None,
        contiguous=not reads_parts,
        gathers=way.mask_axes > 0,
        row_limit=limits.row_limit,
        row_multiple=limits.row_multiple,
        own=limits.row_limit // 2,
        overlaps=limits.overlaps,
    )


def rules_within(
    rules: Rules, budget: int, sizes: StateSizes, *, max_copy_bytes: int, max_batch: int
) -> Rules:
    """Limit rows and copies to a budget.

    Args:
        rules: without a budget.
        budget: bytes of all state.
        sizes: of state.
        max_copy_bytes: the largest copy of state, in bytes.
        max_batch: the most sequences that run at once.
    """
    token = max(1, sizes.token)
    limit = rules.row_limit
    while limit > _LEAST_ROW and limit * token * max_batch * _ROWS_SHARE > budget:
        limit //= 2
    longest = max(_LEAST_COPY, max_copy_bytes // token)
    return replace(rules, row_limit=limit, longest=longest)
