"""The rules by which steps are planned: of the model and its device, then of the budget."""

from dataclasses import replace

from .backends import Limits
from .load.probe import Probed
from .memory_profile import StateSizes
from .planned_for import Rules

_LEAST_CLASS = 64  # tokens; below these, overhead is all there is
_ROWS_SHARE = 4  # the rows' own tokens take at most one part in this many


def rules_of(limits: Limits, probed: Probed, *, exact: bool) -> Rules:
    """Rules that the model and the device determine, before the budget is known.

    Args:
        limits: of the device.
        probed: how its sequences decode together. One that decodes them one by one reads keys in
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


def rules_within(rules: Rules, budget: int, sizes: StateSizes, *, max_batch: int) -> Rules:
    """Limit the rows of short sequences to a budget.

    Args:
        rules: without a budget.
        budget: bytes of all state.
        sizes: of state.
        max_batch: the most sequences that run at once.
    """
    limit = rules.least_class
    while limit > _LEAST_CLASS and limit * sizes.token * max_batch * _ROWS_SHARE > budget:
        limit //= 2
    return replace(rules, least_class=limit)
