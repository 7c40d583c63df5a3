"""A reload: settings are read again, and those that need no restart come into force."""

import asyncio
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from ..config import DEFAULT_MODEL, SETTINGS, LogFormat, LogLevel, Setting, Settings, check_key
from ..errors import StartError
from ..http.connections import Connections
from ..http.handlers.entry import Entry
from ..http.sockets import BACKLOG
from ..identity.keys import read_keys
from ..models.pool import ModelPool
from ..observability import logs
from ..quoting import shorten
from .service_manager import ServiceManager

MOST_CONNECTIONS = 4096
"""Open connections, if descriptors do not bound them further."""

_FILES = 256  # descriptors of the disk tier, of models, of templates, of the logs
_MACOS_MOST = 10240  # OPEN_MAX: there the kernel refuses more, also under a hard limit of infinity

log = structlog.get_logger()


class Change(NamedTuple):
    """A setting whose new value differs from the one in force."""

    setting: Setting
    before: Any
    after: Any


def changes(before: Settings, after: Settings) -> list[Change]:
    """List the settings that differ."""
    found = (
        Change(setting, getattr(before, name), getattr(after, name))
        for name, setting in SETTINGS.items()
    )
    return [change for change in found if change.before != change.after]


def in_force(before: Settings, after: Settings) -> Settings:
    """Take the new values of settings that need no restart, and the old values of the others.

    Raises:
        ConfigError: the mixture would leave a port open without a key.
    """
    found = {c.setting.name: c.after for c in changes(before, after) if c.setting.about.reload}
    settings = msgspec.structs.replace(before, tenants=after.tenants, **found)
    check_key(settings, f"{SETTINGS['host'].key}, which needs a restart")
    return settings


def most_connections(descriptors: int, wanted: int | None = None) -> int:
    """Bound the open connections so that files have descriptors too.

    The kernel hands over a whole backlog of connections at once, before the first one of them
    can be counted and closed: as many descriptors are kept free, or half of them if they are few.

    Args:
        descriptors: that this process may have.
        wanted: the bound in the settings; None for `MOST_CONNECTIONS`.
    """
    room = max(descriptors - BACKLOG - _FILES, descriptors // 2)
    return min(wanted or MOST_CONNECTIONS, room)


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard one, and return the result."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard
    if sys.platform == "darwin" and (hard == resource.RLIM_INFINITY or hard > _MACOS_MOST):
        wanted = max(soft, _MACOS_MOST)
    if wanted != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
    return sys.maxsize if wanted == resource.RLIM_INFINITY else wanted


def put_in_force(settings: Settings, entry: Entry, connections: Connections) -> None:
    """Update every copy of a setting, once requests are served."""
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
    """Reloads on demand. If the new settings have a fault, nothing changes.

    A reload that is asked for before requests are served waits until they are.

    Args:
        read: reads the settings again.
        entry: has the settings in force.
        connections: have bounds that may change.
        manager: is notified of each reload.
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
        """Ask for a reload; several demands before it begins are one."""
        self._asked.set()

    async def run(self) -> None:
        """Reload on demand until cancelled. For a daemon that serves."""
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
            _log_change(change)
        if names := _changed(before.tenants, read.tenants):
            log.info("tenants changed", tenants=", ".join(names))
        if names := _changed(before.models, read.models):
            log.warning("models need a restart", models=", ".join(names))
        warn_of_unknown_models(settings, self._entry.pool())
        log.info("settings reloaded")


def warn_of_unknown_models(settings: Settings, models: ModelPool) -> None:
    """Log the tenants whose list of models names unknown ones."""
    known = {DEFAULT_MODEL, *models.names()}
    for name, tenant in settings.tenants.items():
        if unknown := [each for each in tenant.models or () if each not in known]:
            shown = ", ".join(map(shorten, unknown))
            log.warning("a tenant's models are unknown", tenant=name, models=shown)


def _log_settings(settings: Settings) -> tuple[LogFormat, LogLevel, Path | None]:
    return settings.log_format, settings.log_level, settings.log_path


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Name the tables that differ."""
    return [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]


def _log_change(change: Change) -> None:
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
