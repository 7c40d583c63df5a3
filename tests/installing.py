"""umbel installed as a user does: a home with nothing in it, and a daemon from there."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .daemon.running import START, RunningDaemon, eventually, is_ready

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
LONG = 300.0
# Tests have a cache folder of their own (tests/conftest.py), and uv's is full already.
UV_CACHE = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache" / "uv")
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 8,
}


@dataclass(frozen=True)
class Place:
    """An empty home, and the wheel.

    Attributes:
        folder: everything is in it, but what uv caches.
        wheel: umbel's, or a clone of its repository.
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


def empty_place(folder: Path, wheel: Path, data: Path) -> Place:
    """Make a home. The user's index is this machine's.

    Args:
        folder: an empty one.
        wheel: umbel's, or a clone of its repository.
        data: the user's folder for data.
    """
    unwanted = ("UMBEL_", "VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT", "PIPX_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    environment |= {
        "XDG_DATA_HOME": str(data),
        "UV_CACHE_DIR": UV_CACHE,
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "PIPX_HOME": str(folder / "pipx"),
        "PIPX_BIN_DIR": str(folder / "bin"),
        "PIPX_DEFAULT_BACKEND": "uv",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    limits = folder / "limits.txt"
    limits.write_text("\n".join(_pins()))
    return Place(folder, wheel, environment)


def _pins() -> Iterator[str]:
    """Read the lock's versions; a constraint has no hash."""
    for line in LOCK.read_text().splitlines():
        if line.endswith(" \\") and not line.startswith(" "):
            yield line.removesuffix(" \\")


def copy_checkout(to: Path) -> None:
    """Copy what git has, or would have, of this repository."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in [*names.split("\0"), "uv.lock"]:
        if name and os.path.lexists(ROOT / name):
            copy = to / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy, follow_symlinks=False)


def build_wheel(source: Path, into: Path) -> Path:
    """Build the wheel from the sdist."""
    subprocess.run(["uv", "build", "--quiet", "--out-dir", into, source], check=True, timeout=LONG)
    (wheel,) = into.glob("*.whl")
    return wheel


@contextmanager
def serving(place: Place, program: Path, *flags: str) -> Iterator[RunningDaemon]:
    """Run `umbel serve` with the embedded model, as a user does."""
    socket, log = place.folder / "run" / "u.sock", place.folder / "log"
    environment = dict(place.environment)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program, "serve", "--socket", socket, *flags],
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
