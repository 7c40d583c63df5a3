"""Which tenant's prompts are computed first, where several have some."""

from collections import Counter
from collections.abc import Iterable, Mapping

from .sequence import Sequence

LAG = 512
"""Tokens per weight by which a tenant's prompts may be behind those of tenants with fewer slots."""


def precedence(slots: int, weight: float, lag: float) -> float:
    """Say when a tenant's prompts are computed among other tenants'; the lower, the earlier.

    The tenant with the fewest slots for its weight goes first: a newcomer beside a tenant that
    fills the batch does not wait for that one's prompts. Before all go tenants that are behind by
    `LAG`, the furthest behind first: others compute no more than their part meanwhile.

    Args:
        slots: that the tenant has, one at least.
        weight: its share, positive.
        lag: tokens per weight that it is owed.
    """
    return -lag if lag >= LAG else slots / weight


class Precedence:
    """Counts the tokens that tenants with prompts are owed, and notes whose prompts go first.

    Each computed token is owed to all tenants that have prompts, by their weights, and paid to the
    one that it was computed for. A tenant starts at nothing when its first prompt comes, and is
    forgotten with its last: time without prompts earns nothing. Tokens that are computed for a
    tenant while no other has prompts pay what it is owed.
    """

    def __init__(self) -> None:
        self._owed: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def note(self, running: Iterable[Sequence], weights: Mapping[str, float]) -> None:
        """Note with prompts when their tenants' come.

        Args:
            running: all that run.
            weights: of the tenants that have prompts to compute.
        """
        self._weights = dict(weights)
        self._owed = {tenant: self._owed.get(tenant, 0.0) for tenant in weights}
        slots = Counter(sequence.request.tenant for sequence in running)
        by_tenant = {
            tenant: precedence(slots[tenant], weight, self._owed[tenant] / weight)
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
        paid = Counter[str]()
        for sequence, tokens in chosen.items():
            paid[sequence.request.tenant] += tokens
        a_weight = paid.total() / sum(self._weights.values())
        for tenant, weight in self._weights.items():
            owed = self._owed[tenant] - paid[tenant]
            is_alone = len(self._weights) == 1
            self._owed[tenant] = max(0.0, owed) if is_alone else owed + a_weight * weight
