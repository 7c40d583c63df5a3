"""A reload: the settings are read again, and those that need no restart are put in force."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from ..config import SETTINGS, LogFormat, LogLevel, Setting, Settings, check_key
from ..errors import StartError
from ..http.connections import Connections
from ..http.handlers.entry import Entry
from ..identity.keys import read_keys
from ..models.aliases import DEFAULT_MODEL
from ..models.pool import ModelPool
from ..observability import logs
from ..quoting import shorten
from .descriptors import most_connections, raise_limit
from .service_manager import ServiceManager

log = structlog.get_logger()


class Change(NamedTuple):
    """A setting whose value is not the one in force."""

    setting: Setting
    before: Any
    after: Any


def changes(before: Settings, after: Settings) -> list[Change]:
    """List what differs."""
    found = (
        Change(setting, getattr(before, name), getattr(after, name))
        for name, setting in SETTINGS.items()
    )
    return [change for change in found if change.before != change.after]


def in_force(before: Settings, after: Settings) -> Settings:
    """Say what holds after a reload: the old settings, with what needs no restart of the new ones.

    Raises:
        ConfigError: the two together would leave a port open to everybody.
    """
    found = {c.setting.name: c.after for c in changes(before, after) if c.setting.about.reload}
    settings = msgspec.structs.replace(before, tenants=after.tenants, **found)
    check_key(settings, f"{SETTINGS['host'].key}, which needs a restart")
    return settings


def put_in_force(settings: Settings, entry: Entry, connections: Connections) -> None:
    """Hand settings to whoever keeps a copy of one, once requests are served."""
    entry.reload(settings)
    connections.limit = most_connections(raise_limit(), settings.max_connections)
    connections.header_timeout = settings.header_timeout
    connections.idle_timeout = settings.idle_timeout
    connections.write_timeout = settings.write_timeout
    models = entry.pool()
    models.aliases = settings.aliases
    models.set_bounds(max_waiting=settings.max_waiting, request_timeout=settings.request_timeout)
    entry.stored().store.budget = settings.responses_budget


class Reloader:
    """Reloads whenever it is asked to. Where the new settings have a fault, nothing changes.

    A reload that is asked for before requests are served waits until they are.

    Args:
        read: reads the settings again.
        entry: has those in force.
        connections: whose bounds may change.
        manager: hears of each reload.
    """

    def __init__(
        self,
        read: Callable[[], Settings],
        entry: Entry,
        connections: Connections,
        manager: ServiceManager,
    ) -> None:
        self._read = read
        self._entry = entry
        self._connections = connections
        self._manager = manager
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Ask for a reload. Who asks while one is waited for gets that one."""
        self._asked.set()

    async def run(self) -> None:
        """Reload when asked, one after the other, until cancelled. For a daemon that serves."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._manager.reloading()
            await self._reload()
            self._manager.reloaded()

    async def _reload(self) -> None:
        before = self._entry.settings
        try:
            read = await asyncio.to_thread(self._read)  # the disk may take its time
            settings = in_force(before, read)
            await asyncio.to_thread(read_keys, settings.keys_path, check_owner=True)
            if _log_settings(settings) != _log_settings(before):
                logs.configure(*_log_settings(settings))
        except StartError as error:
            log.error("settings not reloaded", reason=str(error))  # noqa: TRY400  (no fault of the code)
            return
        put_in_force(settings, self._entry, self._connections)
        for change in changes(before, read):
            _tell(change)
        if names := _changed(before.tenants, read.tenants):
            log.info("tenants changed", tenants=", ".join(names))
        if names := _changed(before.models, read.models):
            log.warning("models need a restart", models=", ".join(names))
        warn_of_unknown_models(settings, self._entry.pool())
        log.info("settings reloaded")


def warn_of_unknown_models(settings: Settings, models: ModelPool) -> None:
    """Say which tenants may use a model that there is not, and so less than it seems."""
    known = {DEFAULT_MODEL, *models.names()}
    for name, tenant in settings.tenants.items():
        if unknown := [each for each in tenant.models or () if each not in known]:
            shown = ", ".join(map(shorten, unknown))
            log.warning("a tenant's models are unknown", tenant=name, models=shown)


def _log_settings(settings: Settings) -> tuple[LogFormat, LogLevel, Path | None]:
    return settings.log_format, settings.log_level, settings.log_path


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The names of tables that differ."""
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


def _tell(change: Change) -> None:
    setting = change.setting
    values = {"before": _shown(setting, change.before), "after": _shown(setting, change.after)}
    if setting.about.reload:
        log.info("setting changed", setting=setting.key, **values)
    else:
        log.warning("setting needs a restart", setting=setting.key, **values)


def _shown(setting: Setting, value: Any) -> str:
    if value is None:
        return "unset"
    return "secret" if setting.about.secret else shorten(str(value))
