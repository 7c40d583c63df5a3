"""The tables `[models.NAME]`: what each model is, and when it is in memory."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..models.aliases import DEFAULT_MODEL, LONGEST_ALIAS
from ..quoting import quote
from .tables import in_words


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model.

    Attributes:
        model: where it is: `smollm2`, a directory, or a repo org/name. Unset: the table's name.
        aliases: other names that it answers to.
        pinned: whether it is loaded at start, and stays.
        unload_after: seconds without a request after which it is unloaded; None keeps it until
            another model needs the memory.
        context: the most tokens of prompt and answer together, if that shall be fewer than fit.
    """

    model: str | None = None
    aliases: list[str] = []
    pinned: bool = False
    unload_after: Annotated[float, Meta(gt=0)] | None = None
    context: Annotated[int, Meta(ge=32)] | None = None


def read_models(tables: Mapping[str, Any], path: object) -> dict[str, ModelSettings]:
    """Read the tables of a file.

    Args:
        tables: by the names of the models.
        path: of the file, for messages.

    Raises:
        ConfigError: a name is none, or a key is unknown, or a value is of no use.
    """
    models = {}
    for name, table in tables.items():
        _check_name(name, f"{path}: models")
        try:
            models[name] = msgspec.convert(table, ModelSettings)
        except msgspec.ValidationError as error:
            said = in_words(error, ModelSettings)
            raise ConfigError(f"{path}: models.{name}: {said}") from error
        if models[name].model is None and "/" not in name:
            _check_embedded(name, f"{path}: models.{name}")
        for alias in models[name].aliases:
            _check_name(alias, f"{path}: models.{name}.aliases")
    return models


def check_names(models: Mapping[str, ModelSettings], others: Iterable[str]) -> None:
    """Refuse a name that two models have.

    Args:
        models: by their names.
        others: names of the default model, and aliases that stand elsewhere.

    Raises:
        ConfigError: saying which.
    """
    taken = set(others) - set(models)
    for name, model in models.items():
        for each in dict.fromkeys([name, *model.aliases]):
            if each in taken:
                raise ConfigError(f"models.{name}: {quote(each)} is another model's name already")
            taken.add(each)


def check_default(model: str, models: Mapping[str, ModelSettings], place: str) -> None:
    """Refuse a default model that looks like the name of a table that there is not.

    Raises:
        ConfigError: naming the tables.
    """
    if not models or model in models or "/" in model or Path(model).exists():
        return
    from ...models.load.embedded_file import NAME  # noqa: PLC0415  (few settings need it)

    if model == NAME:
        return
    tables = ", ".join(f"[models.{name}]" for name in models)
    raise ConfigError(
        f"{place}: there is no model {quote(model)}; it may be one of the tables {tables}, "
        f"{NAME!r}, a directory, or a repo 'org/name'"
    )


def _check_embedded(name: str, place: str) -> None:
    """Refuse a table without a model that is not the embedded model's."""
    from ...models.load.embedded_file import NAME  # noqa: PLC0415  (few settings need it)

    if name != NAME:
        raise ConfigError(
            f"{place}: it has no model; say where it is: "
            f"model = {NAME!r}, a directory, or a repo 'org/name'"
        )


def _check_name(name: str, place: str) -> None:
    if not name.strip() or not name.isprintable() or len(name) > LONGEST_ALIAS:
        raise ConfigError(
            f"{place}: {quote(name)} is no name; it has 1 to {LONGEST_ALIAS} printable characters"
        )
    if name == DEFAULT_MODEL:
        raise ConfigError(f"{place}: {quote(name)} is the name of whatever model is the default")
