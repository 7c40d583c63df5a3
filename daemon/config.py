"""Settings: `umbel.toml`, then `UMBEL_…`, then flags, each stronger than the one before."""

import ipaddress
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import platformdirs
from msgspec import Meta

from .aliases import check_aliases, read_aliases
from .errors import ConfigError
from .origins import check_origins

ENV_PREFIX = "UMBEL_"
SIZE_PATTERN = r"^\d+ ?([KMGT]i?B)?$"
_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
LogFormat = Literal["text", "json"]
_LEAST_BODIES = 1 << 20

TABLES = {"aliases": "models"}
"""The settings that stand in a table of the file, and in which."""

# Settings that a flag, given several times, and a variable, with commas, have as words.
_LISTED: dict[str, Callable[[list[str]], Any]] = {"aliases": read_aliases, "cors_origins": list}


def default_socket() -> Path:
    """Where the daemon listens, and clients look, unless told otherwise.

    A Linux session without XDG_RUNTIME_DIR gets a folder in its home: the usual fallback
    lies in the shared temporary folder, where any user could have made it first.
    """
    if sys.platform == "linux" and not os.environ.get("XDG_RUNTIME_DIR"):
        return platformdirs.user_state_path("umbel") / "umbel.sock"
    return platformdirs.user_runtime_path("umbel") / "umbel.sock"


def default_file() -> Path:
    """The configuration file that is read, if it is there, when none is named."""
    return Path(platformdirs.user_config_dir("umbel")) / "umbel.toml"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a daemon. Durations are in seconds."""

    model: Annotated[str, Meta(description="Model: smollm2, a directory, or org/name.")] = "smollm2"
    aliases: Annotated[
        dict[str, str], Meta(description="Other names of the model, for tools that have their own.")
    ] = {}
    socket: Annotated[str | None, Meta(description="Unix socket to listen on.")] = None
    host: Annotated[str | None, Meta(description="TCP address; loopback unless a key is set.")] = (
        None
    )
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="TCP port; no TCP unless given; 0 takes a free one."),
    ] = None
    api_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Key that TCP clients must send (never a flag: ps would show it)."),
    ] = None
    cors_origins: Annotated[
        list[str],
        Meta(description="Origins of web pages that may use the daemon; no page if none."),
    ] = []
    prefill_chunk: Annotated[
        int, Meta(ge=1, le=65536, description="Most prompt tokens one step computes.")
    ] = 512
    cache_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=SIZE_PATTERN)] | None,
        Meta(description="Bytes that model state may take (4GiB); what the device has if unset."),
    ] = None
    no_cache: Annotated[bool, Meta(description="Keep no state between requests.")] = False
    disk_dir: Annotated[
        str | None, Meta(description="Folder for state on disk; no other daemon may use it.")
    ] = None
    disk_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=SIZE_PATTERN)] | None,
        Meta(description="Bytes that state on disk may take; a quarter of what is free if unset."),
    ] = None
    no_disk: Annotated[bool, Meta(description="Keep no state on disk.")] = False
    checkpoint_interval: Annotated[
        int, Meta(ge=1, description="Distance of checkpoints in long prompts, in tokens.")
    ] = 8192
    checkpoints_kept: Annotated[
        int, Meta(ge=0, description="Checkpoints that one request may leave behind.")
    ] = 4
    max_batch: Annotated[int, Meta(ge=1, le=512, description="Most requests that run at once.")] = (
        32
    )
    max_stall_ms: Annotated[
        float, Meta(gt=0, description="Longest wait of a stream for another's prefill chunk.")
    ] = 200.0
    exact: Annotated[
        bool,
        Meta(
            description="The same request gives the same tokens, whatever else runs or is cached."
        ),
    ] = False
    max_waiting: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Most requests that may wait; then 429.")
    ] = 1024
    request_timeout: Annotated[
        float, Meta(gt=0, description="Time a request may take, waiting included.")
    ] = 3600.0
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="Most open connections; 4096 if unset; less where few files may be open."),
    ] = None
    body_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=SIZE_PATTERN)],
        Meta(description="Bytes that request bodies and waiting prompts may take; then 503."),
    ] = "256MiB"
    responses_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=SIZE_PATTERN)],
        Meta(description="Bytes that stored responses may take, on disk or else in memory."),
    ] = "128MiB"
    header_timeout: Annotated[
        float, Meta(gt=0, description="Time a client may take to send its request's headers.")
    ] = 30.0
    idle_timeout: Annotated[
        float, Meta(gt=0, description="Time a connection stays open without a request.")
    ] = 120.0
    read_timeout: Annotated[
        float, Meta(gt=0, description="Time a client may take to send its request body.")
    ] = 30.0
    write_timeout: Annotated[
        float, Meta(gt=0, description="Time a client may leave a piece of its answer unread.")
    ] = 60.0
    keepalive: Annotated[
        float,
        Meta(
            gt=0, description="Silence of a stream after which its client hears that work goes on."
        ),
    ] = 10.0
    stop_grace: Annotated[
        float, Meta(ge=0, description="Time running requests get to finish on SIGTERM.")
    ] = 30.0
    log_format: Annotated[LogFormat, Meta(description="Log lines: text (key=value) or json.")] = (
        "text"
    )

    @property
    def socket_path(self) -> Path:
        """Where the Unix socket is."""
        return Path(self.socket).expanduser() if self.socket else default_socket()

    @property
    def cache_budget(self) -> int | None:
        """Bytes that model state may take; None for what the device has."""
        return None if self.cache_bytes is None else parse_size(self.cache_bytes)

    @property
    def disk_folder(self) -> Path | None:
        """Where state is kept on disk; None where it is not."""
        if self.no_disk or self.no_cache or self.disk_budget == 0:
            return None
        if self.disk_dir:
            return Path(self.disk_dir).expanduser()
        return platformdirs.user_cache_path("umbel") / "state"

    @property
    def disk_budget(self) -> int | None:
        """Bytes that state on disk may take; None for a part of what is free."""
        return None if self.disk_bytes is None else parse_size(self.disk_bytes)

    @property
    def measured_folder(self) -> Path:
        """Where what is measured of models is kept: memory for computing, in bytes."""
        return platformdirs.user_cache_path("umbel") / "measured"

    @property
    def body_budget(self) -> int:
        """Bytes that request bodies in flight may take, and the prompts made of them."""
        return parse_size(self.body_bytes)

    @property
    def responses_budget(self) -> int:
        """Bytes that stored responses may take."""
        return parse_size(self.responses_bytes)

    @property
    def tcp(self) -> tuple[str, int] | None:
        """Address and port to listen on, or None."""
        return None if self.port is None else (self.host or "127.0.0.1", self.port)


def parse_size(size: int | str) -> int:
    """Read a number of bytes: `4096`, `4KiB`, `4 KB`; powers of 1024 with an i, else of 1000."""
    if isinstance(size, int):
        return size
    digits = size.rstrip("KMGTiB ")
    unit = size[len(digits) :].strip()
    base = 1024 if "i" in unit else 1000
    return int(digits) * int(base ** _UNITS[unit[:1]]) if unit else int(digits)


def load(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Merge the three sources and check the result.

    Args:
        flags: what was given on the command line; None means not given. One that may be given
            several times is a list of words.
        file: the file to read; by default `UMBEL_CONFIG`, else `default_file()` if it exists.
        environment: where `UMBEL_…` variables are looked up.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is of no use.
    """
    given = {
        key: _LISTED[key](value) if key in _LISTED else value
        for key, value in flags.items()
        if value is not None
    }
    values = {**_read_file(file, environment), **_read_environment(environment), **given}
    return _check(_convert(values, "setting"))


def _read_file(file: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    named = file or (Path(p) if (p := environment.get(f"{ENV_PREFIX}CONFIG")) else None)
    path = named or default_file()
    try:
        values: dict[str, Any] = msgspec.toml.decode(path.read_bytes())
    except FileNotFoundError as error:
        if named is None:
            return {}
        raise ConfigError(f"there is no configuration file {path}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    values = _settings_in(values, f"key of {path.name}")
    _convert(values, f"key of {path.name}")
    return values


def _settings_in(file: dict[str, Any], what: str) -> dict[str, Any]:
    """Find the settings of a file, those in its tables too."""
    found: dict[str, Any] = {}
    for key, value in file.items():
        if key in TABLES.values() and isinstance(value, dict):
            found |= {f"{key}.{name}": part for name, part in value.items()}
        else:
            found[key] = value
    settings = {file_key(name): name for name in Settings.__struct_fields__}
    for key in found:
        if key not in settings:
            raise ConfigError(f"unknown {what} {key!r}; there are: {', '.join(settings)}")
    return {settings[key]: value for key, value in found.items()}


def file_key(setting: str) -> str:
    """Say how a setting is written in the file: with its table, if it is in one."""
    return f"{TABLES[setting]}.{setting}" if setting in TABLES else setting


def _read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    hints = get_type_hints(Settings, include_extras=True)
    for name, text in environment.items():
        key = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX) or name == f"{ENV_PREFIX}CONFIG":
            continue
        if key not in hints:
            raise ConfigError(f"unknown environment variable {name}; {_known()}")
        if key in _LISTED:
            values[key] = _LISTED[key]([part.strip() for part in text.split(",") if part.strip()])
            continue
        try:
            values[key] = msgspec.convert(text, hints[key], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name}={text!r}: {error}") from error
    return values


def _convert(values: Mapping[str, Any], what: str) -> Settings:
    unknown = [key for key in values if key not in Settings.__struct_fields__]
    if unknown:
        raise ConfigError(f"unknown {what} {unknown[0]!r}; {_known()}")
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        detail, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{what} {path.rstrip('`')}: {detail}") from error


def _known() -> str:
    return f"there are: {', '.join(Settings.__struct_fields__)}"


def _check(settings: Settings) -> Settings:
    if settings.body_budget < _LEAST_BODIES:
        raise ConfigError(f"setting body_bytes: it must be at least {_LEAST_BODIES} bytes (1MiB)")
    check_aliases(settings.aliases, settings.model)
    check_origins(settings.cors_origins)
    if settings.host is not None and settings.port is None:
        raise ConfigError("setting host: it needs a port too")
    if settings.tcp and not is_loopback(settings.tcp[0]) and settings.api_key is None:
        raise ConfigError(
            f"setting host: {settings.tcp[0]} can be reached from outside; "
            f"set {ENV_PREFIX}API_KEY, or listen on 127.0.0.1"
        )
    return settings


def is_loopback(host: str) -> bool:
    """Whether a name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
