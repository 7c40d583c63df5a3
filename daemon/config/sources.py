"""Where values come from: `umbel.toml`, then `UMBEL_…`, then flags, each stronger than before."""

import ipaddress
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import platformdirs
from yarl import URL

from ...ownership import ADVICE, file_fault, readable_by_all
from ..errors import ConfigError, FlagError
from ..quoting import quote
from .setting import ENV_PREFIX, Setting
from .settings import KEYS_FILE, SETTINGS, Settings
from .tables import (
    check_aliases,
    check_default,
    check_names,
    read_aliases,
    read_models,
    read_tenants,
)

_FILE = f"{ENV_PREFIX}CONFIG"
_LEAST_BODIES = 1 << 20
_KEY = SETTINGS["api_key"].key

# Settings that a flag, given several times, and a variable, with commas, have as words.
_LISTED: dict[str, Callable[[list[str]], Any]] = {"aliases": read_aliases, "cors_origins": list}


class _Given(NamedTuple):
    """A value, and where it was given: a flag, a variable, or a file and its key."""

    value: Any
    place: str


def load(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    serves: bool = True,
) -> Settings:
    """Merge the three sources and check the result.

    Args:
        flags: of the command line, by the settings' names; None means not given. One that may
            be given several times is a list of words.
        file: the file to read; by default `UMBEL_CONFIG`, else `umbel.toml` in the user's
            configuration folder if it exists.
        environment: has the `UMBEL_…` variables.
        serves: True if a daemon listens by them; else they need not be enough to listen.

    Raises:
        ConfigError: a file cannot be read, a name is unknown, or a value is of no use.
        FlagError: a flag gave that value.
    """
    variable = environment.get(_FILE)
    named = file or (Path(variable) if variable else None)
    path, values = _read_file(named)
    public = serves and _KEY in values and _is_public(path)
    models = read_models(_take_models(values), path)
    tenants = read_tenants(values.pop("tenants", {}), path)
    given = {**_in_file(values, path), **_in_environment(environment), **_in_flags(flags)}
    if named:
        place = f"{path}: keys_file"
        given.setdefault("keys_file", _Given(str(path.with_name(KEYS_FILE)), place))
    settings = Settings(
        models=models,
        tenants=tenants,
        public_file=str(path) if public else None,
        **{name: value for name, (value, _) in given.items()},
    )
    _check(settings, given)
    if serves:
        with _given_by_flags(given, "host"):
            check_key(settings, given["host"].place if "host" in given else "host")
    return settings


def check_key(settings: Settings, place: str) -> None:
    """Raise a ConfigError if others can reach the daemon and need no key.

    Args:
        settings: to look at.
        place: of `host`, for the message.
    """
    if settings.tcp is None or is_loopback(settings.tcp[0]) or settings.api_key is not None:
        return
    if not os.path.exists(settings.keys_path):  # noqa: PTH110  (no error where it cannot look)
        raise ConfigError(
            f"{place}: {settings.tcp[0]} can be reached from outside; make a key with umbel keys "
            f"add, or set {SETTINGS['api_key'].variable}, or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Return True for a name or an address that can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_file(named: Path | None) -> tuple[Path, dict[str, Any]]:
    path = named or Path(platformdirs.user_config_dir("umbel"), "umbel.toml")
    try:
        return path, msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        if named is None:
            return path, {}
        raise ConfigError(f"there is no configuration file {path}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        text = str(error)
        hint = "; text stands between quotes" if text.startswith("Invalid value") else ""
        raise ConfigError(f"cannot read {path}: {text}{hint}") from error


def _is_public(path: Path) -> bool:
    """Return True if all users can read a file with a key; refuse one that others can change."""
    info = path.stat()
    if (fault := file_fault(path, info)) is not None:
        raise ConfigError(f"{fault}, and it has {_KEY}; {ADVICE}")
    return readable_by_all(info)


def _take_models(values: dict[str, Any]) -> dict[str, Any]:
    """Take the tables `[models.NAME]` out of a file's values; settings stay."""
    models = values.get("models")
    if not isinstance(models, dict):
        return {}
    own = {s.name for s in SETTINGS.values() if s.about.table == "models"}
    tables = [name for name, table in models.items() if name not in own and table]
    return {name: models.pop(name) for name in tables}


def _in_file(values: dict[str, Any], path: Path) -> dict[str, _Given]:
    settings = {setting.key: setting for setting in SETTINGS.values()}
    tables = {setting.about.table for setting in SETTINGS.values()}
    given = {}
    for name, found in values.items():
        inside = name in tables and isinstance(found, dict)
        keys = {f"{name}.{key}": value for key, value in found.items()} if inside else {name: found}
        for key, value in keys.items():
            if key not in settings:
                raise _unknown(f"{path}: unknown key", key, settings)
            setting = settings[key]
            given[setting.name] = _convert(setting, value, f"{path}: {key}", strict=True)
    return given


def _in_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    settings = {setting.variable: setting for setting in SETTINGS.values()}
    given = {}
    for variable, text in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable == _FILE:
            continue
        setting = settings.get(variable.upper())
        if setting is None:
            raise _unknown("unknown environment variable", variable, [*settings, _FILE])
        words = [word.strip() for word in text.split(",") if word.strip()]
        given[setting.name] = _convert(
            setting, words if setting.name in _LISTED else text, variable
        )
    return given


def _in_flags(flags: Mapping[str, Any]) -> dict[str, _Given]:
    given = {}
    for name, value in flags.items():
        if value is not None:
            place = SETTINGS[name].flag or name
            with _given_by_flags({name: _Given(value, place)}, name):
                given[name] = _convert(SETTINGS[name], value, place)
    return given


def _convert(setting: Setting, value: Any, place: str, *, strict: bool = False) -> _Given:
    """Convert a value to its setting's type: a file's is strict, others are made of text."""
    if setting.name in _LISTED and not strict:
        value = _LISTED[setting.name](value)
    try:
        return _Given(msgspec.convert(value, setting.kind, strict=strict), place)
    except msgspec.ValidationError as error:
        if strict and isinstance(value, dict) and setting.name == "model":
            tables = ", ".join(f"[models.{name}]" for name in value)
            raise ConfigError(f"{place}: tables of models are named {tables}") from error
        found = "" if setting.about.secret else f" is {quote(value)}; it"
        raise ConfigError(f"{place}{found} must be {setting.values}") from error


def _unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    names = {_bare(key): key for key in known}
    near = get_close_matches(_bare(name), names, 1)
    meant = f"did you mean {names[near[0]]}? " if near else ""
    return ConfigError(
        f"{kind} {quote(name)}; {meant}umbel serve --help and docs/settings.md have them all"
    )


def _bare(name: str) -> str:
    return name.removeprefix(ENV_PREFIX).casefold()


def _check(settings: Settings, given: Mapping[str, _Given]) -> None:
    if settings.body_budget < _LEAST_BODIES:
        place = given["body_bytes"].place
        raise ConfigError(f"{place}: it must be at least {_LEAST_BODIES} bytes (1MiB)")
    with _given_by_flags(given, "model"):
        place = given["model"].place if "model" in given else ""
        check_default(settings.model, settings.models, place)
    with _given_by_flags(given, "aliases", "model"):
        check_aliases(settings.aliases, settings.model, settings.models)
        check_names(settings.models, [settings.model, *settings.aliases])
    with _given_by_flags(given, "cors_origins"):
        _check_origins(settings.cors_origins)
    if settings.host is not None and settings.port is None:
        with _given_by_flags(given, "host"):
            raise ConfigError(f"{given['host'].place}: it needs a port too")


@contextmanager
def _given_by_flags(given: Mapping[str, _Given], *names: str) -> Iterator[None]:
    """Raise a ConfigError as a FlagError if a flag gave one of these settings."""
    try:
        yield
    except ConfigError as error:
        if any(name in given and given[name].place.startswith("--") for name in names):
            raise FlagError(str(error)) from error
        raise


def _check_origins(origins: Iterable[str]) -> None:
    """Refuse origins of web pages that no browser sends.

    `*` is refused too: any page that the user opens could then ask the model, and read answers.
    """
    example = "https://app.example or http://localhost:3000"
    for origin in origins:
        if origin == "*":
            raise ConfigError(
                "cors_origins: '*' would let every web page use this daemon; name the pages' "
                f"origins, such as {example}"
            )
        if _as_browsers_write(origin) != origin:
            raise ConfigError(
                f"cors_origins: {quote(origin)} is no origin; write scheme, host, and port if it "
                "is not the scheme's own, in lower case and with nothing behind, such as "
                f"{example}"
            )


def _as_browsers_write(origin: str) -> str | None:
    try:
        url = URL(origin)
        whole = url.scheme and url.host and not any(map(str.isspace, origin))
        return str(url.origin()) if whole else None
    except ValueError:
        return None
