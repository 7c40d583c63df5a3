"""SIGHUP reloads what needs no restart and says what does; a fault changes nothing."""

import signal
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog
from structlog.testing import capture_logs

from umbel.daemon.config import SETTINGS, Settings, TenantSettings
from umbel.daemon.errors import ConfigError
from umbel.daemon.http.connections import Connections
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.lifecycle import reload
from umbel.daemon.lifecycle.reload import Reloader, in_force, put_in_force
from umbel.daemon.lifecycle.service_manager import ServiceManager
from umbel.daemon.models.pool import ModelPool
from umbel.daemon.requests.service import Service
from umbel.daemon.responses.desk import ResponseDesk
from umbel.daemon.responses.store import ResponseStore
from umbel.scheduler.queue import ConversationQueue

from .running import RunningDaemon, eventually, running
from .serving import serving

OTHER: dict[str, Any] = {
    "model": "another",
    "aliases": {"gpt": "default"},
    "socket": "/elsewhere",
    "host": "localhost",
    "port": 1,
    "api_key": "secret",
    "keys_file": "/elsewhere",
    "cors_origins": ["https://app.example"],
    "shared_prompts": ["reviewer.txt"],
    "prefill_chunk": 7,
    "cache_bytes": 8,
    "memory_bytes": 9,
    "download_timeout": 10.0,
    "no_cache": True,
    "disk_dir": "/elsewhere",
    "disk_bytes": 9,
    "no_disk": True,
    "checkpoint_interval": 10,
    "checkpoints_kept": 11,
    "kv_bits": 4,
    "kv_group_size": 32,
    "max_batch": 12,
    "max_stall_ms": 13.0,
    "warmup": "none",
    "exact": True,
    "backend": "metal",
    "max_waiting": 14,
    "request_timeout": 15.0,
    "max_connections": 16,
    "body_bytes": "17MiB",
    "responses_bytes": 18,
    "header_timeout": 19.0,
    "idle_timeout": 20.0,
    "read_timeout": 21.0,
    "write_timeout": 22.0,
    "keepalive": 23.0,
    "stop_grace": 24.0,
    "vllm_metrics": True,
    "log_format": "json",
    "log_level": "debug",
    "log_file": "/elsewhere/log",
}
"""A value of each setting that is not its default."""


def test_what_needs_no_restart_changes_and_nothing_else() -> None:
    """And there is a value above for each setting."""
    after = in_force(Settings(), Settings(**OTHER))
    expected = {name: OTHER[name] for name in OTHER if SETTINGS[name].about.reload}
    assert OTHER.keys() == SETTINGS.keys()
    assert after == Settings(**expected)


class Parts(NamedTuple):
    """A keeper of settings."""

    entry: Entry
    connections: Connections
    models: ModelPool
    store: ResponseStore


@pytest.fixture
def parts() -> Iterator[Parts]:
    """All of them, with the defaults; the service has no model."""
    service = Service.__new__(Service)
    service.queue = ConversationQueue(1)
    models = serving(service)
    store = ResponseStore(None, 1)
    entry = Entry(Settings())
    entry.models, entry.responses = models, ResponseDesk(store)
    connections = Connections(1, header_timeout=1, idle_timeout=1, write_timeout=1)
    before = structlog.get_config()
    yield Parts(entry, connections, models, store)
    structlog.configure(**before)
    models.workers.close()
    store.close()


# Where handlers read a setting from those in force, no copy can be forgotten.
READ_WHEN_USED = frozenset(
    {"api_key", "cors_origins", "keepalive", "read_timeout", "stop_grace", "vllm_metrics"}
)
# The log is set up again before anything else is: its file may be one that cannot be written.
OF_THE_LOG = ("log_format", "log_level", "log_file")
COPIES: dict[str, Callable[[Parts], list[Any]]] = {
    "aliases": lambda p: [p.models.aliases],
    "keys_file": lambda p: [p.entry.keys.path],
    "max_waiting": lambda p: [
        p.models.residents[0].service.queue.limit,
        p.models.workers.most_waiting,
        p.models.most_waiting,
    ],
    "request_timeout": lambda p: [
        p.models.residents[0].service._request_timeout,
        p.models.workers.timeout,
        p.models.timeout,
    ],
    "max_connections": lambda p: [p.connections.limit],
    "responses_bytes": lambda p: [p.store.budget],
    "header_timeout": lambda p: [p.connections.header_timeout],
    "idle_timeout": lambda p: [p.connections.idle_timeout],
    "write_timeout": lambda p: [p.connections.write_timeout, p.entry.settings.write_timeout],
}


def test_every_copy_is_replaced(parts: Parts) -> None:
    """Each setting that a reload changes has its new value wherever it is used."""
    put_in_force(Settings(**OTHER), parts.entry, parts.connections)
    reloads = {name for name, setting in SETTINGS.items() if setting.about.reload}
    assert {*READ_WHEN_USED, *OF_THE_LOG, *COPIES} == reloads
    assert parts.entry.settings == Settings(**OTHER)
    for name, copies in COPIES.items():
        assert set(map(str, copies(parts))) == {str(OTHER[name])}, name


def reloader(parts: Parts, read: Callable[[], Settings]) -> Reloader:
    """One without listeners."""
    return Reloader(read, parts.entry, parts.connections, ServiceManager(None))


async def test_a_fault_changes_nothing(parts: Parts) -> None:
    """The log has the sentence that would have kept a daemon from starting."""

    def read() -> Settings:
        raise ConfigError("umbel.toml: unknown key 'modle'")

    with capture_logs() as logs:
        await reloader(parts, read)._reload()
    assert logs == [
        {
            "event": "settings not reloaded",
            "reason": "umbel.toml: unknown key 'modle'",
            "log_level": "error",
        }
    ]
    assert parts.entry.settings == Settings()


async def test_a_fault_in_the_keys_changes_nothing(parts: Parts, tmp_path: Path) -> None:
    """A reload tells of a file of keys that cannot be read."""
    keys = tmp_path / "keys.json"
    keys.write_text("{")
    with capture_logs() as logs:
        await reloader(parts, lambda: Settings(keys_file=str(keys)))._reload()
    assert [line["event"] for line in logs] == ["settings not reloaded"]
    assert f"cannot read the keys in {keys}" in logs[0]["reason"]
    assert parts.entry.settings == Settings()


async def test_no_reload_takes_the_key_from_an_open_port(parts: Parts) -> None:
    """Each half of the change is all right, but the address waits for a restart."""
    parts.entry.reload(Settings(host="0.0.0.0", port=1, api_key="secret"))  # noqa: S104
    with capture_logs() as logs:
        await reloader(parts, Settings)._reload()
    assert "host, which needs a restart: 0.0.0.0 can be reached" in logs[0]["reason"]
    assert parts.entry.settings.api_key == "secret"


async def test_what_has_changed_is_told(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "put_in_force", lambda settings, *_: parts.entry.reload(settings))
    new = Settings(stop_grace=5, api_key="hunter2", max_batch=4)
    with capture_logs() as logs:
        await reloader(parts, lambda: new)._reload()
        await reloader(parts, lambda: new)._reload()
    lines = [tuple(line.values()) for line in logs]
    waits = ("max_batch", "32", "4", "setting needs a restart", "warning")
    assert lines == [
        ("api_key", "unset", "secret", "setting changed", "info"),
        waits,
        ("stop_grace", "30.0", "5", "setting changed", "info"),
        ("settings reloaded", "info"),
        waits,
        ("settings reloaded", "info"),
    ]


async def test_tenants_change(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of tenants need no restart, and those that differ are named."""
    new = Settings(tenants={"b": TenantSettings(weight=2), "a": TenantSettings()})
    monkeypatch.setattr(reload, "put_in_force", lambda settings, *_: parts.entry.reload(settings))
    parts.entry.reload(Settings(tenants={"a": TenantSettings()}))
    with capture_logs() as logs:
        await reloader(parts, lambda: new)._reload()
    assert parts.entry.settings.tenants == new.tenants
    assert logs[0] == {"event": "tenants changed", "tenants": "b", "log_level": "info"}


def hang_up(daemon: RunningDaemon, event: str) -> None:
    """Ask for a reload and wait for its outcome."""
    before = daemon.log().count(event)
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: daemon.log().count(event) > before)


def status_over_tcp(daemon: RunningDaemon) -> int:
    """Ask without a key."""
    connection = HTTPConnection("127.0.0.1", daemon.tcp_port(), timeout=60)
    try:
        connection.request("GET", "/status")
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_daemon_reloads(short_path: Path, long_tiny_dir: Path) -> None:
    """A key is asked for, then another log, then a fault; it serves all the time."""
    file = short_path / "umbel.toml"
    file.write_text("port = 0\n")
    with running(short_path, long_tiny_dir, "--config", str(file)) as daemon:
        assert status_over_tcp(daemon) == 200
        file.write_text('port = 0\napi_key = "secret"\nmax_batch = 4\n')
        hang_up(daemon, "settings reloaded")
        assert status_over_tcp(daemon) == 401
        assert 'event="setting needs a restart" setting=max_batch before=32 after=4' in daemon.log()
        file.write_text('port = 0\nlog_format = "json"\napi_key = 3\n')
        hang_up(daemon, "settings not reloaded")
        assert status_over_tcp(daemon) == 401
        file.write_text('port = 0\nlog_format = "json"\n')
        hang_up(daemon, '"event": "settings reloaded"')
        assert status_over_tcp(daemon) == 200
        file.write_text(f'port = 0\nlog_file = "{short_path}/none/log"\napi_key = "secret"\n')
        hang_up(daemon, f"cannot write {short_path}/none/log: No such file or directory")
        assert status_over_tcp(daemon) == 200
        log, old = short_path / "own.log", short_path / "own.log.1"
        tables = '[models.more]\nmodel = "org/name"\n[tenants.a]\nmodels = ["tiny", "nosuch"]\n'
        file.write_text(f'port = 0\nlog_file = "{log}"\n{tables}')
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: log.exists() and "settings reloaded" in log.read_text())
        assert 'event="models need a restart" models=more' in log.read_text()
        unknown = """event="a tenant's models are unknown" tenant=a models=nosuch"""
        assert unknown in log.read_text()
        log.rename(old)
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: log.exists() and "settings reloaded" in log.read_text())
        assert old.read_text().count("settings reloaded") == 1
