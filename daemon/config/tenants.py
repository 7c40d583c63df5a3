"""The tables `[tenants.NAME]`: what is set for each tenant, and who it is on the Unix socket."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..quoting import quote
from .sizes import Size, parse_size
from .tables import in_words

DEFAULT_TENANT = "default"
"""Who sends no key over TCP; its table holds for every tenant that has none of its own."""

LONGEST_TENANT = 64
"""Characters of a tenant's name."""

TENANT_RULE = f"1 to {LONGEST_TENANT} printable characters, no spaces and no '(' in front"
"""What a tenant's name has, for whoever gives another one."""

PriorityName = Literal["interactive", "batch"]

_Count = Annotated[int, Meta(ge=1)]


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is set for one tenant.

    Attributes:
        weight: its share of the machine, beside those of others.
        running: the most requests of it that run at once; None for what has room.
        waiting: the most requests of it that wait; None for what the daemon takes.
        tokens_per_minute: the most tokens that it is charged in a minute; None for no bound.
        cache_floor: bytes of memory that its state keeps, whatever others send.
        cache_ceiling: the most bytes of memory that its state takes.
        disk_bytes: the most bytes on disk that its state takes.
        priority: the highest that it may ask for.
        models: those that it may use, by their names or aliases; None for all.
        uids: users of this machine who are this tenant on the Unix socket.
        monitor: whether it sees figures and requests of all tenants, as the operator does.
    """

    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    running: _Count | None = None
    waiting: _Count | None = None
    tokens_per_minute: _Count | None = None
    cache_floor: Size | None = None
    cache_ceiling: Size | None = None
    disk_bytes: Size | None = None
    priority: PriorityName = "interactive"
    models: list[str] | None = None
    uids: list[Annotated[int, Meta(ge=0)]] = []
    monitor: bool = False

    @property
    def floor(self) -> int:
        """Bytes of `cache_floor`; 0 if there is none."""
        return 0 if self.cache_floor is None else parse_size(self.cache_floor)

    @property
    def ceiling(self) -> int | None:
        """Bytes of `cache_ceiling`; None for no bound."""
        return None if self.cache_ceiling is None else parse_size(self.cache_ceiling)

    @property
    def disk_budget(self) -> int | None:
        """Bytes of `disk_bytes`; None for no bound."""
        return None if self.disk_bytes is None else parse_size(self.disk_bytes)


def is_tenant_name(name: str) -> bool:
    """Whether a tenant may have this name: one printable word, of bounded length.

    One in parentheses is nobody's: what is shared has such a name.
    """
    if name.startswith("("):
        return False
    return 0 < len(name) <= LONGEST_TENANT and name.isprintable() and " " not in name


def check_tenant_name(name: str, place: str) -> None:
    """Refuse a name that no tenant may have.

    Raises:
        ConfigError: saying where it stands, and what a name is.
    """
    if not is_tenant_name(name):
        raise ConfigError(f"{place}: {quote(name)} is no name of a tenant; it has {TENANT_RULE}")


def read_tenants(tables: object, path: object) -> dict[str, TenantSettings]:
    """Read the tables of a file.

    Args:
        tables: by the names of the tenants.
        path: of the file, for messages.

    Raises:
        ConfigError: a name is none, a key is unknown, a value is of no use, or two tenants have
            one uid.
    """
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: tenants must be tables [tenants.NAME]")
    tenants = {}
    for name, table in tables.items():
        place = f"{path}: tenants.{name}"
        check_tenant_name(name, f"{path}: tenants")
        try:
            tenants[name] = msgspec.convert(table, TenantSettings)
        except msgspec.ValidationError as error:
            said = in_words(error, TenantSettings)
            raise ConfigError(f"{place}: {said}") from error
        _check_cache(tenants[name], place)
    _check_uids(tenants, path)
    return tenants


def tenant_settings(tenants: Mapping[str, TenantSettings], name: str) -> TenantSettings:
    """Say what is set for a tenant.

    Args:
        tenants: the tables, by their names: `Settings.tenants`.
        name: of the tenant. One without a table has that of `default`, if there is one.
    """
    found = tenants.get(name) or tenants.get(DEFAULT_TENANT)
    return found or TenantSettings()


def _check_cache(tenant: TenantSettings, place: str) -> None:
    if tenant.ceiling is not None and tenant.floor > tenant.ceiling:
        raise ConfigError(f"{place}: cache_floor is more than cache_ceiling")


def _check_uids(tenants: Mapping[str, TenantSettings], path: object) -> None:
    taken: dict[int, str] = {}
    for name, tenant in tenants.items():
        for uid in dict.fromkeys(tenant.uids):
            if uid in taken:
                raise ConfigError(
                    f"{path}: tenants.{name}: uid {uid} is the tenant {taken[uid]} already"
                )
            taken[uid] = name
