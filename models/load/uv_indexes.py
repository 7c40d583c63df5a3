"""Which package indexes uv is told of, as variables that tell pip the same."""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple


class _Indexes(NamedTuple):
    """What one source says.

    Attributes:
        default: the index that takes the place of the usual one, if any.
        others: further ones.
    """

    default: str | None
    others: list[str]


def pip_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Translate uv's indexes for pip: empty where uv is told of none.

    uv's default index takes the place of pip's; further ones of both count. They are variables and
    not options of a command, because `ps` shows those and an address may hold a password.

    Args:
        environment: where uv's variables are, and pip's.
    """
    sources = list(_sources(environment))
    variables = {}
    default = next((source.default for source in sources if source.default), None)
    if default is not None:
        variables["PIP_INDEX_URL"] = default
    others = list(dict.fromkeys(chain.from_iterable(source.others for source in sources)))
    if others:
        known = environment.get("PIP_EXTRA_INDEX_URL", "").split()
        variables["PIP_EXTRA_INDEX_URL"] = " ".join([*known, *others])
    return variables


def _sources(environment: Mapping[str, str]) -> Iterator[_Indexes]:
    """Read what uv reads outside projects, the strongest first."""

    def variable(name: str) -> list[str]:
        return [_address(word) for word in environment.get(name, "").split()]

    default = [*variable("UV_DEFAULT_INDEX"), *variable("UV_INDEX_URL"), None][0]
    yield _Indexes(default, [*variable("UV_INDEX"), *variable("UV_EXTRA_INDEX_URL")])
    for file in _files(environment):
        try:
            yield _of_file(tomllib.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # uv says what is wrong with its own file


def _address(word: str) -> str:
    """Take the address of `name=address`; an address alone has its first `=` behind a `:`."""
    name, equals, rest = word.partition("=")
    return rest if equals and ":" not in name and "/" not in name else word


def _files(environment: Mapping[str, str]) -> Iterable[Path]:
    if environment.get("UV_NO_CONFIG", "0") not in ("", "0", "false"):
        return []
    if named := environment.get("UV_CONFIG_FILE"):
        return [Path(named)]
    # On macOS too: uv keeps to these folders on every Unix.
    user = environment.get("XDG_CONFIG_HOME") or "~/.config"
    system = (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    folders = [Path(user).expanduser(), *map(Path, system)]
    return [*(folder / "uv" / "uv.toml" for folder in folders), Path("/etc/uv/uv.toml")]


def _of_file(table: dict[str, Any]) -> _Indexes:
    entries = [entry for entry in table.get("index", []) if not entry.get("explicit")]
    default = [entry["url"] for entry in entries if entry.get("default")]
    others = [entry["url"] for entry in entries if not entry.get("default")]
    old = table.get("index-url")
    return _Indexes(
        next(iter(default), old), [*others, *map(str, table.get("extra-index-url", []))]
    )
