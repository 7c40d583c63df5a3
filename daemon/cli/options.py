"""Options of commands, made from the settings."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.inspect import BoolType, DictType, ListType, LiteralType
from rich.markup import escape

from ..config import SETTINGS, Setting, load
from ..errors import FlagError, StartError
from .group import fail, refuse

_TEXT: Any = str | None
_TEXTS: Any = list[str] | None
_SWITCH: Any = bool | None
_OURS = ("read_again", "settings")
_TAKEN = {BoolType: _SWITCH, DictType: _TEXTS, ListType: _TEXTS}
"""Types of options that are not one text."""

_GROUPS = {
    "Model": ("model", "aliases", "kv_bits", "kv_group_size", "warmup", "exact"),
    "Network": ("socket", "host", "port", "keys_file", "cors_origins"),
    "Cache": (
        *("cache_bytes", "no_cache", "disk_dir", "disk_bytes", "no_disk"),
        *("checkpoint_interval", "checkpoints_kept", "shared_prompts"),
    ),
    "Limits": (
        *("prefill_chunk", "max_batch", "max_stall_ms", "max_waiting", "request_timeout"),
        "stop_grace",
    ),
    "Log": ("log_format", "log_level", "log_file"),
}
"""The panels of a command that has all options."""


def takes_settings(
    *names: str, serves: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `settings` by options, and add `--config`.

    The command gets the settings of these options, the variables and the file. If they have a
    fault, the process ends with a sentence, and with status 2 for a flag's, else 1. A parameter
    `read_again` gets a function that reads all three again.

    Args:
        names: the settings with an option; none for all that have a flag.
        serves: see `load`.
    """
    chosen = [SETTINGS[name] for name in names or SETTINGS if SETTINGS[name].flag]
    groups = {} if names else {name: group for group, of in _GROUPS.items() for name in of}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*, config: Path | None, **given: Any) -> None:
            flags = {setting.name: given.pop(setting.name) for setting in chosen}
            read = functools.partial(load, flags, file=config, serves=serves)
            if "read_again" in parameters:
                given["read_again"] = read
            try:
                settings = read()
            except FlagError as error:
                refuse(error)
            except StartError as error:
                fail(error)
            command(**given, settings=settings)

        parameters = inspect.signature(command).parameters
        own = [each for name, each in parameters.items() if name not in _OURS]
        options = [*own, *(_of_setting(each, groups.get(each.name)) for each in chosen), _of_file()]
        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        return run

    return decorate


def _of_setting(setting: Setting, group: str | None) -> inspect.Parameter:
    """Make the option of a setting: a switch, or text, which `load` reads like a variable's."""
    taken = _TAKEN.get(type(setting.type), _TEXT)
    repeated = " May be given several times." if taken is _TEXTS else ""
    text = _help(f"{setting.about.does}{repeated}", _default(setting))
    option = typer.Option(setting.flag, help=text, metavar=_metavar(setting), rich_help_panel=group)
    return _parameter(setting.name, Annotated[taken, option])


def _of_file() -> inspect.Parameter:
    default = "umbel.toml in the user's configuration folder"
    option = typer.Option(help=_help("Configuration file (TOML).", default), metavar="<path>")
    return _parameter("config", Annotated[Path | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=None
    )


def _help(text: str, default: str) -> str:
    return f"{escape(text)} [dim]{escape(f'[default: {default}]')}[/dim]"


def _default(setting: Setting) -> str:
    match setting.default:
        case _ if setting.about.unset:
            return setting.about.unset
        case bool(on):
            return "on" if on else "off"
        case float(number):
            return f"{number:g}"
        case other:
            return str(other)


def _metavar(setting: Setting) -> str | None:
    match setting.type:
        case BoolType():
            return None
        case LiteralType(values=values):
            return f"<{'|'.join(map(str, values))}>"
        case _:
            return f"<{setting.about.unit or 'number'}>"
