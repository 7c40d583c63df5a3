"""What the daemon measures of each tenant, with a bounded number of labels."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...scheduler.times import Times

MOST_TENANTS = 64
"""Tenants with labels of their own; those that come later are counted together."""

OTHERS = "(others)"
"""The label of those, in which no tenant's name has a part."""


class TenantMetrics:
    """Counters by tenant.

    Args:
        registry: has them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: dict[str, str] = {}
        self._requests = Counter(
            "umbel_tenant_requests",
            "Counts a tenant's requests that ended, by the way they ended.",
            ["tenant", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "umbel_tenant_tokens",
            "Counts the tokens of a tenant's requests that ended.",
            ["tenant", "kind"],
            registry=registry,
        )
        self._waits = Counter(
            "umbel_tenant_wait_seconds",
            "A tenant's requests waited for so many seconds, by what they waited for.",
            ["tenant", "reason"],
            registry=registry,
        )

    def count(self, tenant: str, outcome: str, tokens: dict[str, int]) -> None:
        """Count a request that ended.

        Args:
            tenant: whose it was.
            outcome: how it ended.
            tokens: of it, by their kind.
        """
        label = self._label(tenant)
        self._requests.labels(label, outcome).inc()
        for kind, count in tokens.items():
            self._tokens.labels(label, kind).inc(count)

    def add_waits(self, tenant: str, times: Times, ended_at: float) -> None:
        """Count what one of its requests waited for.

        Args:
            tenant: whose it was.
            times: what it did.
            ended_at: when, on the engine's clock, in seconds.
        """
        for activity, seconds in times.seconds(ended_at).items():
            if activity.is_wait:
                self._waits.labels(self._label(tenant), activity).inc(max(0.0, seconds))

    def _label(self, tenant: str) -> str:
        if tenant not in self._labels and len(self._labels) < MOST_TENANTS:
            self._labels[tenant] = tenant
        return self._labels.get(tenant, OTHERS)


class OfTenant(Collector):
    """What metrics say of one tenant; what is counted for all together is left out.

    Args:
        families: all of them.
        tenant: whose samples stay.
    """

    def __init__(self, families: Iterable[Metric], tenant: str) -> None:
        self._families = families
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        """Keep samples with its label, and families that have any."""
        for family in self._families:
            own = [s for s in family.samples if s.labels.get("tenant") == self._tenant]
            if not own:
                continue
            kept = Metric(family.name, family.documentation, family.type)
            kept.samples = own
            yield kept
