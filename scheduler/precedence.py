"""Whose prompts are computed first, where several tenants have some."""

from collections import Counter
from collections.abc import Iterable, Mapping

from .fairness.virtual_time import VirtualTime
from .sequence import Sequence

LAG = 512
"""Tokens per weight by which a tenant's prompts may be behind those of tenants with fewer slots."""


def precedence(slots: int, weight: float, lag: float) -> float:
    """Say when a tenant's prompts are computed among other tenants'; the lower, the earlier.

    Who has the fewest slots for its weight goes first: who comes beside a tenant that fills the
    batch does not wait for that one's prompts. Before all go those whose prompts are behind by
    `LAG`, the furthest behind first: what is computed for others meanwhile is no more than their
    part.

    Args:
        slots: that the tenant has, one at least.
        weight: its share, positive.
        lag: of its virtual time, in tokens per weight.
    """
    return -lag if lag >= LAG else slots / weight


class Precedence:
    """Notes with prompts when those of their tenants are computed, as time goes by."""

    def __init__(self) -> None:
        self._time = VirtualTime()

    def note(self, running: Iterable[Sequence], weights: Mapping[str, float]) -> None:
        """Note with prompts when their tenants' come.

        Args:
            running: all that run.
            weights: of the tenants that have prompts to compute.
        """
        self._time.update(weights)
        slots = Counter(sequence.request.tenant for sequence in running)
        by_tenant = {
            tenant: precedence(slots[tenant], weight, self._time.lag(tenant))
            for tenant, weight in weights.items()
        }
        for sequence in running:
            if (found := by_tenant.get(sequence.request.tenant)) is not None:
                sequence.precedence = found

    def charge(self, chosen: Mapping[Sequence, int]) -> None:
        """Enter what was computed of prompts that were there when it was noted.

        Args:
            chosen: those that advanced, and by how many tokens.
        """
        by_tenant = Counter[str]()
        for sequence, tokens in chosen.items():
            by_tenant[sequence.request.tenant] += tokens
        self._time.charge(by_tenant)
