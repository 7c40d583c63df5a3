"""The installer of this umbel, and its commands to upgrade it and to change MLX's backend."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = __package__.partition(".")[0]
_WHEEL = "NEW_WHEEL"  # the next one has another name
_CUDA = "13"
_BACKENDS = f"mlx-cpu mlx-cuda-{_CUDA}"


class InstallMethod(NamedTuple):
    """An installer.

    Attributes:
        name: for people.
        upgrade: the command that upgrades umbel.
        cuda: the command that replaces MLX's CPU backend by its CUDA backend.
        lasts: an upgrade keeps the CUDA backend.
    """

    name: str
    upgrade: str
    cuda: str
    lasts: bool


class Source(NamedTuple):
    """The source of the installed umbel.

    Attributes:
        words: arguments of an installer for this source.
        folder: the checkout, if it is one.
        editable: the checkout itself runs.
    """

    words: str
    folder: Path | None = None
    editable: bool = False

    def pull(self) -> str:
        """Write the command that updates a clone, which goes before an upgrade."""
        is_clone = self.folder is not None and (self.folder / ".git").exists()
        return f"git -C {self.words} pull && " if is_clone else ""


def install_method() -> InstallMethod:
    """Find the installer of the umbel that runs now."""
    try:
        record = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        record = None
    return method_of(Path(sys.prefix), source_of(record))


def source_of(direct_url: str | None) -> Source:
    """Read an installer's record of a source that is not an index (PEP 610)."""
    if direct_url is None:
        return Source(_NAME)
    record = json.loads(direct_url)
    address = urlsplit(record["url"])
    if "vcs_info" in record:
        return Source(shlex.quote(f"{record['vcs_info']['vcs']}+{record['url']}"))
    if "dir_info" not in record:
        return Source(_WHEEL)
    folder = Path(url2pathname(address.path))
    editable = record["dir_info"].get("editable", False)
    return Source(shlex.quote(str(folder)), folder, editable)


def method_of(prefix: Path, source: Source) -> InstallMethod:
    """Find the installer of an environment, given its folder and umbel's source."""
    if (prefix / "uv-receipt.toml").exists():
        return _uv_tool(source)
    if (prefix / "pipx_metadata.json").exists():
        return _pipx(source)
    if _NAME in prefix.parts and "Cellar" in prefix.parts:
        return _homebrew(prefix)
    if source.editable and source.folder and source.folder.resolve() == prefix.parent.resolve():
        return _checkout(source)
    return _pip(prefix, source)


def _uv_tool(source: Source) -> InstallMethod:
    upgrade = f"{source.pull()}uv tool upgrade {_NAME}"
    override = "cuda.txt"
    write = f"echo {_mlx()} > {override} && "
    if source.folder and (source.folder / override).exists():
        write, override = "", shlex.quote(str(source.folder / override))
    return InstallMethod(
        "uv tool",
        f"uv tool install {_WHEEL}" if source.words == _WHEEL else upgrade,
        f"{write}uv tool install --reinstall --overrides {override} {source.words}",
        lasts=True,
    )


def _pipx(source: Source) -> InstallMethod:
    upgrade = f"{source.pull()}pipx upgrade {_NAME}"
    return InstallMethod(
        "pipx",
        f"pipx install --force {_WHEEL}" if source.words == _WHEEL else upgrade,
        _replace(f"pipx runpip {_NAME}"),
        lasts=False,
    )


def _homebrew(prefix: Path) -> InstallMethod:
    python = shlex.quote(str(prefix / "bin" / "python"))
    return InstallMethod(
        "Homebrew", f"brew upgrade {_NAME}", _replace(f"{python} -m pip"), lasts=False
    )


def _checkout(source: Source) -> InstallMethod:
    enter = f"cd {source.words}"
    return InstallMethod(
        "uv run",
        f"{source.pull()}uv sync --project {source.words}",
        f"{enter} && uv pip uninstall {_BACKENDS} && uv pip install {_mlx()}, "
        "and from then on `uv run --no-sync`",
        lasts=False,
    )


def _pip(prefix: Path, source: Source) -> InstallMethod:
    pip = f"{shlex.quote(str(prefix / 'bin' / 'python'))} -m pip"
    editable = "--editable " if source.editable else ""
    return InstallMethod(
        "pip",
        f"{source.pull()}{pip} install --upgrade {editable}{source.words}",
        _replace(pip),
        lasts=False,
    )


def _replace(pip: str) -> str:
    """Remove both backends first: they ship a file of the same name."""
    return f"{pip} uninstall -y {_BACKENDS} && {pip} install {_mlx()}"


def _mlx() -> str:
    """Name the CUDA backend of the MLX that is here."""
    return f"'mlx[cuda{_CUDA}]=={version('mlx')}'"
