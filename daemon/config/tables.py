"""The tables `[models.NAME]` and `[tenants.NAME]`, and aliases: their values, and their faults."""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..quoting import quote
from .setting import SIZE_RULE, Size, size_of

DEFAULT_MODEL = "default"
"""The name of whatever model is the default."""

LONGEST_ALIAS = 255
"""Characters of an alias."""

DEFAULT_TENANT = "default"
"""Sends no key over TCP; its table holds for every tenant that has none of its own."""

LONGEST_TENANT = 64
"""Characters of a tenant's name."""

TENANT_RULE = f"1 to {LONGEST_TENANT} printable characters, no spaces and no '(' in front"
"""The rule for tenants' names, for messages."""

PriorityName = Literal["interactive", "batch"]

_Table = TypeVar("_Table", bound=msgspec.Struct)
_Count = Annotated[int, Meta(ge=1)]
_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_KINDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
}


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model.

    Attributes:
        model: where it is: `smollm2`, a directory, or a repo org/name. Unset: the table's name.
        aliases: other names that it answers to.
        pinned: True if it is loaded at start, and stays.
        unload_after: seconds without a request after which it is unloaded; None keeps it until
            another model needs the memory.
        context: bound of prompt and answer together, in tokens; None for what fits.
    """

    model: str | None = None
    aliases: list[str] = []
    pinned: bool = False
    unload_after: Annotated[float, Meta(gt=0)] | None = None
    context: Annotated[int, Meta(ge=32)] | None = None


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant.

    Attributes:
        weight: its share of the machine, beside those of others.
        running: most requests that run at once; None for what has room.
        waiting: most requests that wait; None for what the daemon takes.
        tokens_per_minute: most tokens that it is charged in a minute; None for no bound.
        cache_floor: bytes of memory that its state keeps, whatever others send.
        cache_ceiling: most bytes of memory that its state takes.
        disk_bytes: most bytes on disk that its state takes.
        priority: the highest that it may ask for.
        models: those that it may use, by their names or aliases; None for all.
        uids: users of this machine who are this tenant on the Unix socket.
        monitor: True if it sees figures and requests of all tenants, as the operator does.
    """

    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    running: _Count | None = None
    waiting: _Count | None = None
    tokens_per_minute: _Count | None = None
    cache_floor: Size | None = None
    cache_ceiling: Size | None = None
    disk_bytes: Size | None = None
    priority: PriorityName = "interactive"
    models: list[str] | None = None
    uids: list[Annotated[int, Meta(ge=0)]] = []
    monitor: bool = False

    @property
    def floor(self) -> int:
        """Bytes of `cache_floor`; 0 if there is none."""
        return size_of(self.cache_floor) or 0

    @property
    def ceiling(self) -> int | None:
        """Bytes of `cache_ceiling`; None for no bound."""
        return size_of(self.cache_ceiling)

    @property
    def disk_budget(self) -> int | None:
        """Bytes of `disk_bytes`; None for no bound."""
        return size_of(self.disk_bytes)


def tenant_settings(tenants: Mapping[str, TenantSettings], name: str) -> TenantSettings:
    """Return the table of a tenant, or else that of `default`, or else the defaults."""
    return tenants.get(name) or tenants.get(DEFAULT_TENANT) or TenantSettings()


def is_tenant_name(name: str) -> bool:
    """Return True for a name that a tenant may have; parentheses mark what is shared."""
    if name.startswith("("):
        return False
    return 0 < len(name) <= LONGEST_TENANT and name.isprintable() and " " not in name


def check_tenant_name(name: str, place: str) -> None:
    """Raise a ConfigError for a name that no tenant may have; `place` is where it stands."""
    if not is_tenant_name(name):
        raise ConfigError(f"{place}: {quote(name)} is no name of a tenant; it has {TENANT_RULE}")


def read_tenants(tables: object, path: object) -> dict[str, TenantSettings]:
    """Read the tenants' tables, by name, of the file at `path`.

    Raises:
        ConfigError: a name, a key or a value is wrong, or two tenants have one uid.
    """
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: tenants must be tables [tenants.NAME]")
    tenants: dict[str, TenantSettings] = {}
    owners: dict[int, str] = {}
    for name, table in tables.items():
        place = f"{path}: tenants.{name}"
        check_tenant_name(name, f"{path}: tenants")
        tenant = tenants[name] = _read(table, TenantSettings, place)
        if tenant.ceiling is not None and tenant.floor > tenant.ceiling:
            raise ConfigError(f"{place}: cache_floor is more than cache_ceiling")
        for uid in tenant.uids:
            if owners.setdefault(uid, name) != name:
                raise ConfigError(f"{place}: uid {uid} is the tenant {owners[uid]} already")
    return tenants


def read_models(tables: Mapping[str, Any], path: object) -> dict[str, ModelSettings]:
    """Read the models' tables, by name, of the file at `path`.

    Raises:
        ConfigError: a name, a key or a value is wrong, or a model has no place.
    """
    models = {}
    for name, table in tables.items():
        place = f"{path}: models.{name}"
        _check_name(name, f"{path}: models")
        model = models[name] = _read(table, ModelSettings, place)
        if model.model is None and "/" not in name and name != (embedded := _embedded()):
            raise ConfigError(
                f"{place}: it has no model; say where it is: "
                f"model = {embedded!r}, a directory, or a repo 'org/name'"
            )
        for alias in model.aliases:
            _check_name(alias, f"{place}.aliases")
    return models


def check_names(models: Mapping[str, ModelSettings], others: Iterable[str]) -> None:
    """Raise a ConfigError for a name that two models have.

    Args:
        models: by their names.
        others: names of the default model, and aliases that stand elsewhere.
    """
    taken = set(others) - set(models)
    for name, model in models.items():
        for each in dict.fromkeys([name, *model.aliases]):
            if each in taken:
                raise ConfigError(f"models.{name}: {quote(each)} is another model's name already")
            taken.add(each)


def check_default(model: str, models: Mapping[str, ModelSettings], place: str) -> None:
    """Raise a ConfigError for a default model that looks like the name of a missing table."""
    if not models or model in models or "/" in model or Path(model).exists():
        return
    if model != (embedded := _embedded()):
        tables = ", ".join(f"[models.{name}]" for name in models)
        raise ConfigError(
            f"{place}: there is no model {quote(model)}; it may be one of the tables {tables}, "
            f"{embedded!r}, a directory, or a repo 'org/name'"
        )


def read_aliases(words: Iterable[str]) -> dict[str, str]:
    """Read aliases of a flag or a variable: `NAME`, or `NAME=MODEL`.

    Raises:
        ConfigError: a name is given twice.
    """
    aliases: dict[str, str] = {}
    for word in words:
        name, _, model = (part.strip() for part in word.partition("="))
        if name in aliases:
            raise ConfigError(f"alias {quote(name)} is given twice")
        aliases[name] = model or DEFAULT_MODEL
    return aliases


def check_aliases(aliases: Mapping[str, str], model: str, others: Collection[str] = ()) -> None:
    """Raise a ConfigError for an alias that no request can use, or without a model.

    Args:
        aliases: each with its target.
        model: the default one.
        others: further models.
    """
    for name, target in aliases.items():
        if not name.strip():
            raise ConfigError("an alias has no name; write NAME, or NAME=MODEL")
        if len(name) > LONGEST_ALIAS:
            raise ConfigError(f"alias {quote(name)} has over {LONGEST_ALIAS} characters")
        if not name.isprintable():
            raise ConfigError(f"alias {quote(name)} has characters that cannot be printed")
        if name in (DEFAULT_MODEL, model):
            raise ConfigError(f"alias {quote(name)} is a name of the served model already")
        if target not in (DEFAULT_MODEL, model, *others):
            raise ConfigError(
                f"alias {quote(name)} stands for {quote(target)}, but {quote(model)} is served; "
                f"let it stand for that, or for {DEFAULT_MODEL!r}"
            )


def _embedded() -> str:
    from ...models.load.embedded_file import NAME  # noqa: PLC0415  (few settings need it)

    return NAME


def _check_name(name: str, place: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_ALIAS:
        raise ConfigError(
            f"{place}: {quote(name)} is no name; it has 1 to {LONGEST_ALIAS} printable characters"
        )
    if name == DEFAULT_MODEL:
        raise ConfigError(f"{place}: {quote(name)} is the name of whatever model is the default")


def _read(table: object, kind: type[_Table], place: str) -> _Table:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {_in_words(error, kind)}") from error


def _in_words(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """Name the key of a table that is wrong, and what it must be."""
    keys = kind.__struct_fields__
    found = _PLACE.fullmatch(str(error))
    text, place = (found[1], found[2] or "") if found else (str(error), "")
    if unknown := _UNKNOWN.fullmatch(text):
        near = get_close_matches(unknown[1], keys, 1)
        meant = f"did you mean {near[0]}? Its" if near else "its"
        return f"unknown key {quote(unknown[1])}; {meant} keys are: {', '.join(keys)}"
    if text.startswith("Invalid enum value"):
        text = " or ".join(get_args(get_type_hints(kind)[place]))
    elif "matching regex" in text:
        text = SIZE_RULE
    text = text.removeprefix("Expected ").replace(" | null", "").replace("> 0.0", "over 0")
    for name, words in _KINDS.items():
        text = text.replace(name, words)
    return f"{place or 'it'} must be {text.replace(', got', ', and is')}"
