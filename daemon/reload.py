"""A reload: the settings are read again, and those that need no restart are put in force."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import structlog

from . import logs
from .config import SETTINGS, Setting, Settings, check_key
from .connections import Connections
from .descriptors import most_connections, raise_limit
from .errors import StartError
from .handlers.entry import Entry
from .key_file import read_keys
from .quoting import shorten
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
    logs.configure(settings.log_format)


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
            await asyncio.to_thread(read_keys, settings.keys_path)
        except StartError as error:
            log.error("settings not reloaded", reason=str(error))  # noqa: TRY400  (no fault of the code)
            return
        put_in_force(settings, self._entry, self._connections)
        for change in changes(before, read):
            _tell(change)
        if names := _changed_tenants(before, read):
            log.info("tenants changed", tenants=", ".join(names))
        log.info("settings reloaded")


def _changed_tenants(before: Settings, after: Settings) -> list[str]:
    names = sorted({*before.tenants, *after.tenants})
    return [name for name in names if before.tenants.get(name) != after.tenants.get(name)]


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
