"""The settings of what a daemon serves, where it listens, and what memory and disk it may take."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs
from msgspec import Meta

from .models import ModelSettings
from .setting import About
from .sizes import Size, parse_size
from .tenants import TenantSettings

KEYS_FILE = "keys.json"
WarmUp = Literal["none", "quick"]
Backend = Literal["cpu", "metal", "cuda"]


def default_socket() -> Path:
    """Where the daemon listens, and clients look, unless told otherwise.

    A Linux session without XDG_RUNTIME_DIR gets a folder in its home: the usual fallback
    lies in the shared temporary folder, where any user could have made it first.
    """
    if sys.platform == "linux" and not os.environ.get("XDG_RUNTIME_DIR"):
        return platformdirs.user_state_path("umbel") / "umbel.sock"
    return platformdirs.user_runtime_path("umbel") / "umbel.sock"


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is served to whom, where, and from how much memory. `Settings` goes on with the rest."""

    model: Annotated[
        str, About("The model: smollm2, a directory, or a repo org/name.", unit="model")
    ] = "smollm2"
    aliases: Annotated[
        dict[str, str],
        About(
            "Other names of the model, for tools that have their own.",
            unit="name[=model]",
            unset="none",
            flag="--alias",
            table="models",
            reload=True,
        ),
    ] = {}
    models: dict[str, ModelSettings] = {}
    """Further models, by their names: the file's tables `[models.NAME]`."""
    tenants: dict[str, TenantSettings] = {}
    """What is set for tenants, by their names: the file's tables `[tenants.NAME]`."""
    socket: Annotated[
        str | None,
        About(
            "Unix socket of the daemon.",
            unit="path",
            unset="umbel.sock in the user's runtime folder",
        ),
    ] = None
    host: Annotated[
        str | None,
        About(
            "TCP address, with a port; loopback unless a key is set.",
            unit="address",
            unset="127.0.0.1",
        ),
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
            unit="path",
            unset="keys.json beside the configuration file",
            reload=True,
        ),
    ] = None
    cors_origins: Annotated[
        list[str],
        About(
            "Origins of web pages that may use the daemon.",
            unit="origin",
            unset="no page",
            flag="--cors-origin",
            reload=True,
        ),
    ] = []
    shared_prompts: Annotated[
        list[str],
        About(
            "Files with system prompts that all tenants share.",
            unit="path",
            unset="none",
            flag="--shared-prompt",
        ),
    ] = []
    prefill_chunk: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        About(
            "Most prompt tokens one step computes.",
            unit="tokens",
            unset="2048 on a GPU, else 512; with exact or little memory 512",
        ),
    ] = None
    cache_bytes: Annotated[
        Size | None,
        About(
            "Bytes that model state may take, such as 4GiB.",
            unit="bytes",
            unset="what the device has left",
        ),
    ] = None
    memory_bytes: Annotated[
        Size | None,
        About(
            "Bytes that weights and state of all models may take.",
            unit="bytes",
            unset="what the device has",
            flag=None,
        ),
    ] = None
    no_cache: Annotated[bool, About("Keep no state between requests.")] = False
    disk_dir: Annotated[
        str | None,
        About(
            "Folder for state on disk; no other daemon may use it.",
            unit="path",
            unset="state in the user's cache folder",
        ),
    ] = None
    disk_bytes: Annotated[
        Size | None,
        About(
            "Bytes that state on disk may take, such as 50GiB.",
            unit="bytes",
            unset="a quarter of what is free",
        ),
    ] = None
    no_disk: Annotated[bool, About("Keep no state on disk.")] = False
    checkpoint_interval: Annotated[
        Annotated[int, Meta(ge=1)],
        About("Distance of checkpoints in long prompts.", unit="tokens"),
    ] = 8192
    checkpoints_kept: Annotated[
        Annotated[int, Meta(ge=0)],
        About("Checkpoints that one request may leave behind.", unit="checkpoints"),
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
        Annotated[int, Meta(ge=1, le=512)],
        About("Most requests that run at once.", unit="requests"),
    ] = 32
    max_stall_ms: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        About(
            "Longest wait of a stream for another's prefill chunk.",
            unit="milliseconds",
            unset="200 on a GPU, else 400",
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
        About(
            "How models are computed, for tests and benchmarks of another device's way.",
            unset="the device's own",
            flag=None,
        ),
    ] = None

    def source_of(self, name: str) -> str:
        """Where a model is: what its table says; else its name is the place."""
        table = self.models.get(name)
        return name if table is None else table.model or name

    @property
    def socket_path(self) -> Path:
        """Where the Unix socket is."""
        return Path(self.socket).expanduser() if self.socket else default_socket()

    @property
    def keys_path(self) -> Path:
        """Where the keys are that `umbel keys` makes."""
        if self.keys_file:
            return Path(self.keys_file).expanduser()
        return platformdirs.user_config_path("umbel") / KEYS_FILE

    @property
    def cache_budget(self) -> int | None:
        """Bytes that model state may take; None for what the device has."""
        return None if self.cache_bytes is None else parse_size(self.cache_bytes)

    @property
    def memory_budget(self) -> int | None:
        """Bytes that weights and state of all models may take; None for what the device has."""
        return None if self.memory_bytes is None else parse_size(self.memory_bytes)

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
    def tcp(self) -> tuple[str, int] | None:
        """Address and port to listen on, or None."""
        return None if self.port is None else (self.host or "127.0.0.1", self.port)
