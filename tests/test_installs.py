"""umbel from a wheel, in an environment of each kind: it answers, is upgraded, answers, and goes.

One wheel is built for all. uv makes the environments from its cache, at the versions of
requirements.lock, but where that is what is tested.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from umbel.models.load.embedded_file import FILE

from .daemon.running import START, RunningDaemon, eventually, is_ready

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PIPX = "pipx==1.18.4"
LONG = 300.0
# Tests have a cache folder of their own (tests/conftest.py), and uv's is full already.
UV_CACHE = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 8,
}
METHOD = """
from umbel.daemon.install_method import install_method
method = install_method()
print(method.name, method.upgrade, sep="\\n")
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed"),
]


@dataclass(frozen=True)
class Place:
    """An empty home, and the wheel.

    Attributes:
        folder: everything is in it, but what uv caches.
        wheel: umbel's.
        environment: of every command.
    """

    folder: Path
    wheel: Path
    environment: Mapping[str, str]

    def run(self, *words: str | Path, folder: Path | None = None) -> str:
        """Run a command and return what it prints; it must succeed."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=folder or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


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
    """Have uv put there what umbel needs, and pip umbel."""
    place.run("uv", "venv", "--quiet", "--python", sys.executable, "venv")
    into = ("--python", "venv", "--constraints", place.folder / "limits.txt")
    place.run("uv", "pip", "install", "--quiet", *into, place.wheel)
    place.run("venv/bin/python", "-m", "pip", "uninstall", "--yes", "umbel")
    place.run("venv/bin/python", "-m", "pip", "install", place.wheel)


def _make_checkout(place: Place) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in [*names.split("\0"), "uv.lock"]:
        if name and os.path.lexists(ROOT / name):
            copy = _checkout(place) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy, follow_symlinks=False)
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
    """Build the wheel from the sdist, once."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["uv", "build", "--quiet", "--out-dir", folder, ROOT], check=True, timeout=LONG)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a user's folder for data, which all ways share: the model is fetched once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def place(short_path: Path, wheel: Path, data: Path) -> Place:
    """Make a home. The user's index is this machine's."""
    unwanted = ("UMBEL_", "VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT", "PIPX_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    environment |= {
        "XDG_DATA_HOME": str(data),
        "UV_CACHE_DIR": UV_CACHE,
        "UV_TOOL_DIR": str(short_path / "tools"),
        "UV_TOOL_BIN_DIR": str(short_path / "bin"),
        "PIPX_HOME": str(short_path / "pipx"),
        "PIPX_BIN_DIR": str(short_path / "bin"),
        "PIPX_DEFAULT_BACKEND": "uv",
        "PATH": f"{short_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    limits = short_path / "limits.txt"
    limits.write_text("\n".join(_pins()))
    return Place(short_path, wheel, environment)


def _pins() -> Iterator[str]:
    """Read the lock's versions; a constraint has no hash."""
    for line in LOCK.read_text().splitlines():
        if line.endswith(" \\") and not line.startswith(" "):
            yield line.removesuffix(" \\")


@contextmanager
def serving(place: Place, program: Path) -> Iterator[RunningDaemon]:
    """Run `umbel serve` with the embedded model, as a user does."""
    socket, log = place.folder / "run" / "u.sock", place.folder / "log"
    environment = dict(place.environment)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program, "serve", "--no-disk", "--socket", socket],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            cwd=place.folder,
        ) as process,
    ):
        daemon = RunningDaemon(process, socket, log, place.folder, environment)
        try:
            eventually(lambda: is_ready(daemon), START)
            yield daemon
            assert daemon.terminate() == 0, daemon.log()
        finally:
            process.kill()


def answer(place: Place, program: Path) -> str:
    """Ask a daemon of one's own."""
    with serving(place, program) as daemon:
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
