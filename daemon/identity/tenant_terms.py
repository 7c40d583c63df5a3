"""What the settings say of tenants, as the scheduler and the cache are told."""

from collections.abc import Callable

from ...cachestore.pool import TenantBounds
from ...cachestore.tries import SHARED
from ...scheduler.tenants import TenantUse, Terms
from ..config import DEFAULT_TENANT, Settings, TenantSettings, tenant_settings


class TenantTerms:
    """What holds for each tenant at present. Prompts that all share have no bounds.

    Attributes:
        use: what tenants use of it, with all models together.

    Args:
        settings: those in force.
    """

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings
        self.use = TenantUse(self.terms, self.names_tenants)

    @property
    def floors(self) -> int:
        """Bytes of state that tenants keep whatever others need, in sum."""
        return sum(tenant.floor for tenant in self._settings().tenants.values())

    def bounds(self, tenant: str) -> TenantBounds:
        """What bounds the state of a tenant."""
        if tenant == SHARED:
            return TenantBounds()
        found = self._found(tenant)
        return TenantBounds(found.floor, found.ceiling, found.disk_budget)

    def terms(self, tenant: str) -> Terms:
        """What is agreed with a tenant."""
        if tenant == SHARED:
            return Terms()
        found = self._found(tenant)
        return Terms(found.weight, found.running, found.waiting, found.tokens_per_minute)

    def names_tenants(self) -> bool:
        """Whether a tenant has a table of its own, so that others than `default` are expected."""
        return any(name != DEFAULT_TENANT for name in self._settings().tenants)

    def _found(self, tenant: str) -> TenantSettings:
        return tenant_settings(self._settings().tenants, tenant)
