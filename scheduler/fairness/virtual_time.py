"""How much was computed of each tenant's prompts, for their weights, while others had some, too.

The virtual time of weighted fair queueing, as EEVDF has it (Stoica and Abdel-Wahab, 1995): a clock
advances by what was computed over the sum of the weights, a tenant's time by what was computed for
it over its own. What the clock is ahead of a tenant is its *lag*: what it would have had more, had
all who have prompts advanced together.

Who comes starts at the clock, and who goes is forgotten: time without prompts earns nothing, and
costs nothing. The lag of those who stay is kept, so that they are not passed over by tenants that
come and go any more than by one that stays; what is computed while nobody else has prompts makes
up for it.
"""

from collections.abc import Mapping


class VirtualTime:
    """The clock, and the times of the tenants that have prompts to compute."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._times: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def update(self, weights: Mapping[str, float]) -> None:
        """Say which tenants have prompts to compute.

        Args:
            weights: of these tenants, positive.
        """
        self._times = {tenant: self._times.get(tenant, self._clock) for tenant in weights}
        self._weights = dict(weights)

    def lag(self, tenant: str) -> float:
        """Tokens per weight by which a tenant with prompts is behind; less than 0 if ahead."""
        return self._clock - self._times[tenant]

    def charge(self, tokens: Mapping[str, int]) -> None:
        """Enter what was computed of the prompts of tenants that have some.

        Args:
            tokens: by tenant.
        """
        for tenant, computed in tokens.items():
            self._times[tenant] += computed / self._weights[tenant]
        if len(self._times) > 1:
            self._clock += sum(tokens.values()) / sum(self._weights.values())
        else:
            self._clock = max(self._clock, *self._times.values())
