"""Other names under which the model is served, for tools that ask for one of their own."""

from collections.abc import Collection, Iterable, Mapping

from ..errors import ConfigError
from ..quoting import quote

DEFAULT_MODEL = "default"
"""The name of whatever model is served."""

LONGEST_ALIAS = 255
"""Characters of an alias."""


def read_aliases(words: Iterable[str]) -> dict[str, str]:
    """Read aliases as a flag or a variable has them: `NAME`, or `NAME=MODEL`.

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
    """Refuse aliases that no request could use, or that lead nowhere.

    Args:
        aliases: each to the model that it stands for.
        model: the one that is served.
        others: further ones that are.

    Raises:
        ConfigError: a name is none, is the model's own, or is another model's.
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
