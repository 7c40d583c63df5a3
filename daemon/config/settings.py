"""The settings themselves: what there is beside `ServingSettings`, and all of them together.

A setting's name, type, default and words stand here or there, and nowhere else.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from .serving import ServingSettings
from .setting import About, settings_of
from .sizes import Size, parse_size

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
_Seconds = Annotated[float, Meta(gt=0)]


class Settings(ServingSettings, frozen=True, kw_only=True):
    """All settings of a daemon: what it serves, and what bounds its clients.

    Durations are in seconds, but where the name has a unit.

    Attributes:
        public_file: the configuration file if it has a key and all users can read it.
    """

    public_file: str | None = None

    max_waiting: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        About(
            "Most requests that may wait, for all models; then 429.", unit="requests", reload=True
        ),
    ] = 1024
    request_timeout: Annotated[
        _Seconds, About("Time a request may take, waiting included.", unit="seconds", reload=True)
    ] = 3600.0
    max_connections: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        About(
            "Most open connections.",
            unit="connections",
            unset="4096, less where few files may be open",
            flag=None,
            reload=True,
        ),
    ] = None
    body_bytes: Annotated[
        Size,
        About(
            "Bytes that request bodies and waiting prompts may take; then 503.",
            unit="bytes",
            flag=None,
        ),
    ] = "256MiB"
    responses_bytes: Annotated[
        Size,
        About(
            "Bytes that stored responses may take, on disk or else in memory.",
            unit="bytes",
            flag=None,
            reload=True,
        ),
    ] = "128MiB"
    header_timeout: Annotated[
        _Seconds,
        About(
            "Time a client may take to send its request's headers.",
            unit="seconds",
            flag=None,
            reload=True,
        ),
    ] = 30.0
    idle_timeout: Annotated[
        _Seconds,
        About(
            "Time a connection stays open without a request.",
            unit="seconds",
            flag=None,
            reload=True,
        ),
    ] = 120.0
    read_timeout: Annotated[
        _Seconds,
        About(
            "Time a client may take to send its request body.",
            unit="seconds",
            flag=None,
            reload=True,
        ),
    ] = 30.0
    write_timeout: Annotated[
        _Seconds,
        About(
            "Time a client may leave a piece of its answer unread.",
            unit="seconds",
            flag=None,
            reload=True,
        ),
    ] = 60.0
    keepalive: Annotated[
        _Seconds,
        About(
            "Silence of a stream after which its client hears that work goes on.",
            unit="seconds",
            flag=None,
            reload=True,
        ),
    ] = 10.0
    download_timeout: Annotated[
        _Seconds,
        About(
            "Time without a byte after which a model's download is given up.",
            unit="seconds",
            flag=None,
        ),
    ] = 60.0
    stop_grace: Annotated[
        Annotated[float, Meta(ge=0)],
        About("Time running requests get to finish on SIGTERM.", unit="seconds", reload=True),
    ] = 30.0
    vllm_metrics: Annotated[
        bool,
        About("Repeat metrics under vLLM's names, for its dashboards.", flag=None, reload=True),
    ] = False
    log_format: Annotated[LogFormat, About("Log lines: text (key=value) or json.", reload=True)] = (
        "text"
    )
    log_level: Annotated[
        LogLevel, About("The least level of log lines that are written.", reload=True)
    ] = "info"
    log_file: Annotated[
        str | None,
        About(
            "File for log lines; a renamed one is left for a new one.",
            unit="path",
            unset="standard error",
            reload=True,
        ),
    ] = None

    @property
    def log_path(self) -> Path | None:
        """Where log lines go; None for standard error."""
        return Path(self.log_file).expanduser() if self.log_file else None

    @property
    def body_budget(self) -> int:
        """Bytes that request bodies in flight may take, and the prompts made of them."""
        return parse_size(self.body_bytes)

    @property
    def responses_budget(self) -> int:
        """Bytes that stored responses may take."""
        return parse_size(self.responses_bytes)


SETTINGS = settings_of(Settings)
"""What is known of each, by the name of its attribute."""
