"""umbel from a wheel, in an environment of each kind: it answers, is upgraded, answers, and goes.

One wheel is built for all. uv makes the environments from its cache, at the versions of
requirements.lock, but where that is what is tested.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from umbel.models.load.embedded_file import FILE

from .installing import (
    QUESTION,
    ROOT,
    Place,
    build_wheel,
    copy_checkout,
    empty_place,
    serving,
)

PIPX = "pipx==1.18.4"
METHOD = """
from umbel.daemon.cli.install_method import install_method
method = install_method()
print(method.name, method.upgrade, sep="\\n")
"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed"),
]


@dataclass(frozen=True)
class Way:
    """A way to install.

    Attributes:
        name: as umbel calls it.
        install: does so.
        upgrades: take the umbel that is there to the next one, each in its own way.
        uninstall: removes it.
        program: umbel's, in the place's folder.
        python: the environment's.
    """

    name: str
    install: Callable[[Place], object]
    upgrades: tuple[Callable[[Place], object], ...]
    uninstall: Callable[[Place], object]
    program: str
    python: str


def _uv_tool(place: Place, *flags: str) -> None:
    limits = ("--constraints", place.folder / "limits.txt", "--python", sys.executable)
    place.run("uv", "tool", "install", *flags, *limits, place.wheel)


def _pipx(place: Place, *words: str | Path) -> str:
    return place.run("uvx", "--from", PIPX, "pipx", *words)


def _install_with_pipx(place: Place) -> None:
    limits = f"--pip-args=--constraint {place.folder / 'limits.txt'}"
    _pipx(place, "install", "--python", sys.executable, limits, place.wheel)


def _make_venv(place: Place) -> None:
    """Install umbel's requirements with uv, and umbel with pip."""
    place.run("uv", "venv", "--quiet", "--python", sys.executable, "venv")
    into = ("--python", "venv", "--constraints", place.folder / "limits.txt")
    place.run("uv", "pip", "install", "--quiet", *into, place.wheel)
    place.run("venv/bin/python", "-m", "pip", "uninstall", "--yes", "umbel")
    place.run("venv/bin/python", "-m", "pip", "install", place.wheel)


def _make_checkout(place: Place) -> None:
    copy_checkout(_checkout(place))
    _sync(place)


def _checkout(place: Place) -> Path:
    folder = place.folder / "checkout"
    folder.mkdir(exist_ok=True)
    return folder


def _sync(place: Place, *flags: str) -> None:
    words = ("--no-default-groups", "--python", sys.executable, *flags)
    place.run("uv", "sync", "--quiet", *words, folder=_checkout(place))


WAYS = (
    Way(
        "uv tool",
        _uv_tool,
        (
            lambda place: place.run("uv", "tool", "upgrade", "umbel"),
            lambda place: _uv_tool(place, "--reinstall-package", "umbel"),
        ),
        lambda place: place.run("uv", "tool", "uninstall", "umbel"),
        "bin/umbel",
        "tools/umbel/bin/python",
    ),
    Way(
        "pipx",
        _install_with_pipx,
        (lambda place: _pipx(place, "upgrade", "umbel"),),
        lambda place: _pipx(place, "uninstall", "umbel"),
        "bin/umbel",
        "pipx/venvs/umbel/bin/python",
    ),
    Way(
        "pip",
        _make_venv,
        (
            lambda place: place.run(
                *("venv/bin/python", "-m", "pip", "install", "--no-deps"),
                *("--force-reinstall", place.wheel),
            ),
        ),
        lambda place: place.run("venv/bin/python", "-m", "pip", "uninstall", "--yes", "umbel"),
        "venv/bin/umbel",
        "venv/bin/python",
    ),
    Way(
        "uv run",
        _make_checkout,
        (lambda place: _sync(place, "--reinstall-package", "umbel"),),
        lambda place: shutil.rmtree(_checkout(place)),
        "checkout/.venv/bin/umbel",
        "checkout/.venv/bin/python",
    ),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, once."""
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a user's folder for data, which all ways share: the model is fetched once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def place(short_path: Path, wheel: Path, data: Path) -> Place:
    """Make a home."""
    return empty_place(short_path, wheel, data)


def answer(place: Place, program: Path) -> str:
    """Ask a daemon of one's own."""
    with serving(place, program, "--no-disk") as daemon:
        body = daemon.post(QUESTION).json()
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_way_to_install(way: Way, place: Place, data: Path) -> None:
    """It answers before and after an upgrade, from the same fetched model, and knows itself."""
    program, python = place.folder / way.program, place.folder / way.python
    way.install(place)
    assert "Paris" in answer(place, program)
    model = data / "umbel" / "models" / FILE.name
    fetched = model.stat()
    for upgrade in way.upgrades:
        upgrade(place)
    name, command = place.run(python, "-c", METHOD).splitlines()
    assert name == way.name
    assert command
    assert "Paris" in answer(place, program)
    assert (model.stat().st_ino, model.stat().st_mtime) == (fetched.st_ino, fetched.st_mtime)
    way.uninstall(place)
    assert not program.exists()
    assert FILE.is_at(model)
