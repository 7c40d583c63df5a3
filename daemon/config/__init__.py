"""Settings: what there are, what is known of each, and where their values come from."""

from .setting import ENV_PREFIX, Setting
from .settings import SETTINGS, LogFormat, LogLevel, Settings, default_socket
from .sources import check_key, is_loopback, load
from .tables import (
    DEFAULT_MODEL,
    DEFAULT_TENANT,
    TENANT_RULE,
    ModelSettings,
    PriorityName,
    TenantSettings,
    check_tenant_name,
    is_tenant_name,
    tenant_settings,
)

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_TENANT",
    "ENV_PREFIX",
    "SETTINGS",
    "TENANT_RULE",
    "LogFormat",
    "LogLevel",
    "ModelSettings",
    "PriorityName",
    "Setting",
    "Settings",
    "TenantSettings",
    "check_key",
    "check_tenant_name",
    "default_socket",
    "is_loopback",
    "is_tenant_name",
    "load",
    "tenant_settings",
]
