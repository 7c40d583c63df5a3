"""The settings of a daemon: the names, types, defaults and words of all of them stand here."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs
from msgspec import Meta

from .setting import About, Size, parse_size, settings_of, size_of
from .tables import ModelSettings, TenantSettings

KEYS_FILE = "keys.json"
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
WarmUp = Literal["none", "quick"]
Backend = Literal["cpu", "metal", "cuda"]
_Seconds = Annotated[float, Meta(gt=0)]
_patience = partial(About, unit="seconds", flag=None, reload=True)


def default_socket() -> Path:
    """Return the socket of a daemon that sets none.

    A Linux session without XDG_RUNTIME_DIR gets a folder in its home: the usual fallback
    lies in the shared temporary folder, where any user could have made it first.
    """
    if sys.platform == "linux" and not os.environ.get("XDG_RUNTIME_DIR"):
        return platformdirs.user_state_path("umbel") / "umbel.sock"
    return platformdirs.user_runtime_path("umbel") / "umbel.sock"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a daemon. Durations are in seconds unless the name has a unit.

    Attributes:
        models: further models, by name: the tables `[models.NAME]`.
        tenants: the tables `[tenants.NAME]`, by name.
        public_file: the configuration file, if it has a key and all users can read it.
    """

    models: dict[str, ModelSettings] = {}
    tenants: dict[str, TenantSettings] = {}
    public_file: str | None = None

    model: Annotated[
        str, About("The model: smollm2, a directory, or a repo org/name.", "model")
    ] = "smollm2"
    aliases: Annotated[
        dict[str, str],
        About(
            "Other names of the model, for tools that have their own.",
            "name[=model]",
            "none",
            flag="--alias",
            table="models",
            reload=True,
        ),
    ] = {}
    socket: Annotated[
        str | None,
        About("Unix socket of the daemon.", "path", "umbel.sock in the user's runtime folder"),
    ] = None
    host: Annotated[
        str | None,
        About("TCP address, with a port; loopback unless a key is set.", "address", "127.0.0.1"),
    ] = None
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        About("TCP port; 0 takes a free one.", unset="no TCP"),
    ] = None
    api_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        About(
            "Key that TCP clients must send (never a flag: ps would show it).",
            unset="none",
            flag=None,
            secret=True,
            reload=True,
        ),
    ] = None
    keys_file: Annotated[
        str | None,
        About(
            "File of the keys that umbel keys makes.",
            "path",
            "keys.json beside the configuration file",
            reload=True,
        ),
    ] = None
    cors_origins: Annotated[
        list[str],
        About(
            "Origins of web pages that may use the daemon.",
            "origin",
            "no page",
            flag="--cors-origin",
            reload=True,
        ),
    ] = []
    shared_prompts: Annotated[
        list[str],
        About(
            "System prompts (files) that all tenants share.", "path", "none", flag="--shared-prompt"
        ),
    ] = []
    prefill_chunk: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        About(
            "Most prompt tokens one step computes.",
            "tokens",
            "2048 on a GPU, else 512; with exact or little memory 512",
        ),
    ] = None
    cache_bytes: Annotated[
        Size | None,
        About("Most bytes of model state, such as 4GiB.", "bytes", "what the device has left"),
    ] = None
    memory_bytes: Annotated[
        Size | None,
        About(
            "Most bytes of weights and state of all models.",
            "bytes",
            "what the device has",
            flag=None,
        ),
    ] = None
    no_cache: Annotated[bool, About("Keep no state between requests.")] = False
    disk_dir: Annotated[
        str | None,
        About(
            "Folder for state on disk; no other daemon may use it.",
            "path",
            "state in the user's cache folder",
        ),
    ] = None
    disk_bytes: Annotated[
        Size | None,
        About("Most bytes of state on disk, such as 50GiB.", "bytes", "a quarter of what is free"),
    ] = None
    no_disk: Annotated[bool, About("Keep no state on disk.")] = False
    checkpoint_interval: Annotated[
        Annotated[int, Meta(ge=1)], About("Distance of checkpoints in long prompts.", "tokens")
    ] = 8192
    checkpoints_kept: Annotated[
        Annotated[int, Meta(ge=0)],
        About("Checkpoints that one request may leave behind.", "checkpoints"),
    ] = 4
    kv_bits: Annotated[
        Literal[4, 8] | None,
        About("Bits of a number in keys and values, which are quantised.", unset="as computed"),
    ] = None
    kv_group_size: Annotated[
        Literal[32, 64, 128],
        About("Numbers of quantised keys and values that share a scale."),
    ] = 64
    max_batch: Annotated[
        Annotated[int, Meta(ge=1, le=512)], About("Most requests that run at once.", "requests")
    ] = 32
    max_stall_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        About(
            "Longest wait of a stream for another's prefill chunk.",
            "milliseconds",
            "200 on a GPU, else 400",
        ),
    ] = None
    warmup: Annotated[
        WarmUp,
        About("Kernels compiled before the first request: none, or those of common batches (GPU)."),
    ] = "quick"
    exact: Annotated[
        bool, About("The same request gives the same tokens, whatever else runs or is cached.")
    ] = False
    backend: Annotated[
        Backend | None,
        About("Backend of models, for tests and benchmarks.", unset="the device's own", flag=None),
    ] = None

    max_waiting: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        About("Most requests that may wait, for all models; then 429.", "requests", reload=True),
    ] = 1024
    request_timeout: Annotated[
        _Seconds, About("Time a request may take, waiting included.", "seconds", reload=True)
    ] = 3600.0
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        About(
            "Most open connections.",
            "connections",
            "4096, less where few files may be open",
            flag=None,
            reload=True,
        ),
    ] = None
    body_bytes: Annotated[
        Size,
        About("Most bytes of request bodies and waiting prompts; then 503.", "bytes", flag=None),
    ] = "256MiB"
    responses_bytes: Annotated[
        Size,
        About(
            "Most bytes of stored responses, on disk or else in memory.",
            "bytes",
            flag=None,
            reload=True,
        ),
    ] = "128MiB"
    header_timeout: Annotated[
        _Seconds, _patience("Time a client may take to send its request's headers.")
    ] = 30.0
    idle_timeout: Annotated[
        _Seconds, _patience("Time a connection stays open without a request.")
    ] = 120.0
    read_timeout: Annotated[
        _Seconds, _patience("Time a client may take to send its request body.")
    ] = 30.0
    write_timeout: Annotated[
        _Seconds, _patience("Time a client may leave a piece of its answer unread.")
    ] = 60.0
    keepalive: Annotated[
        _Seconds, _patience("Silence of a stream after which the client gets a sign of life.")
    ] = 10.0
    download_timeout: Annotated[
        _Seconds,
        About(
            "Time without a byte after which a model's download is given up.", "seconds", flag=None
        ),
    ] = 60.0
    stop_grace: Annotated[
        Annotated[float, Meta(ge=0)],
        About("Time running requests get to finish on SIGTERM.", "seconds", reload=True),
    ] = 30.0
    vllm_metrics: Annotated[
        bool,
        About("Repeat metrics under vLLM's names, for its dashboards.", flag=None, reload=True),
    ] = False
    log_format: Annotated[LogFormat, About("Log lines: text (key=value) or json.", reload=True)] = (
        "text"
    )
    log_level: Annotated[
        LogLevel, About("Lowest level of log lines that are written.", reload=True)
    ] = "info"
    log_file: Annotated[
        str | None,
        About(
            "File for log lines; after a rename, a new one.", "path", "standard error", reload=True
        ),
    ] = None

    def source_of(self, name: str) -> str:
        """Return where a model is: its table says so, or its name is the place."""
        table = self.models.get(name)
        return name if table is None else table.model or name

    @property
    def socket_path(self) -> Path:
        """The Unix socket."""
        return Path(self.socket).expanduser() if self.socket else default_socket()

    @property
    def tcp(self) -> tuple[str, int] | None:
        """Address and port to listen on; None without TCP."""
        return None if self.port is None else (self.host or "127.0.0.1", self.port)

    @property
    def keys_path(self) -> Path:
        """The file of the keys that `umbel keys` makes."""
        if self.keys_file:
            return Path(self.keys_file).expanduser()
        return platformdirs.user_config_path("umbel") / KEYS_FILE

    @property
    def cache_budget(self) -> int | None:
        """Bytes that model state may take; None for what the device has."""
        return size_of(self.cache_bytes)

    @property
    def memory_budget(self) -> int | None:
        """Bytes that weights and state of all models may take; None for what the device has."""
        return size_of(self.memory_bytes)

    @property
    def disk_folder(self) -> Path | None:
        """The folder of state on disk; None if there is none."""
        if self.no_disk or self.no_cache or self.disk_budget == 0:
            return None
        if self.disk_dir:
            return Path(self.disk_dir).expanduser()
        return platformdirs.user_cache_path("umbel") / "state"

    @property
    def disk_budget(self) -> int | None:
        """Bytes that state on disk may take; None for a part of what is free."""
        return size_of(self.disk_bytes)

    @property
    def measured_folder(self) -> Path:
        """The folder of measurements: memory in bytes that models need for computing."""
        return platformdirs.user_cache_path("umbel") / "measured"

    @property
    def log_path(self) -> Path | None:
        """The log file; None for standard error."""
        return Path(self.log_file).expanduser() if self.log_file else None

    @property
    def body_budget(self) -> int:
        """Bytes that request bodies in flight, and the prompts made of them, may take."""
        return parse_size(self.body_bytes)

    @property
    def responses_budget(self) -> int:
        """Bytes that stored responses may take."""
        return parse_size(self.responses_bytes)


SETTINGS = settings_of(Settings)
"""All settings, by the names of their attributes."""
