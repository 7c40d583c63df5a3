"""The environment that MLX starts with: bounds, and a folder for compiled code of this user's own.

Each run is a process.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

OWN = Path("umbel", "kernels", platform.machine())

on_linux = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="MLX's CPU backend compiles with g++, and /proc/self/maps has what is loaded",
)

_COMPILED = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
gated = mx.compile(lambda x, y: mx.exp(x) * y + x)
mx.eval(gated(mx.ones(5), mx.ones(5)))
loaded = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}
print(*sorted(path for path in loaded if "/cpu/lib" in path))
"""
_UMBEL = """
import tempfile
from umbel import models
print(models.KERNELS.path)
print(models.KERNELS.fault)
print(tempfile.gettempdir())
"""


class Run(NamedTuple):
    """A process that imported umbel's models and compiled something.

    Attributes:
        kernels: the folder that MLX was given.
        fault: why it is not the one in the cache folder.
        temporary: Python's folder for temporary files.
        loaded: compiled code that is in the process.
    """

    kernels: Path
    fault: str
    temporary: Path
    loaded: list[Path]


def python(script: str, environment: dict[str, Path]) -> list[str]:
    """Run a script in a fresh process and give the lines it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **{name: str(path) for name, path in environment.items()}},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A temporary folder that all users can write to, as the system's is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The user's cache folder."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def run(shared: Path, cache: Path, **named: Path) -> Run:
    """Import umbel's models, and compile."""
    environment = {"TMPDIR": shared, "XDG_CACHE_HOME": cache, **named}
    kernels, fault, temporary, loaded = python(_UMBEL + _COMPILED, environment)
    return Run(Path(kernels), fault, Path(temporary), [Path(each) for each in loaded.split()])


def plant(shared: Path) -> Path:
    """Put a library that marks that it was loaded where MLX would look for its own."""
    (loaded,) = python(_COMPILED, {"TMPDIR": shared})
    planted, marker = Path(loaded), shared / "loaded"
    planted.unlink()
    source = shared / "planted.c"
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) void mark(void) {{ fclose(fopen("{marker}", "w")); }}\n'
    )
    command = ["g++", "-x", "c", "-shared", "-fPIC", "-o", str(planted), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return marker


@on_linux
def test_planted_library_is_not_loaded(shared: Path, cache: Path) -> None:
    """Another user's library in the common temporary folder stays there."""
    marker = plant(shared)
    assert subprocess.run(
        [sys.executable, "-c", _COMPILED],
        env={**os.environ, "TMPDIR": str(shared)},
        capture_output=True,
        check=False,
    ).returncode  # the planted one lacks the function
    assert marker.exists()  # MLX alone loads it
    marker.unlink()
    done = run(shared, cache)
    assert not marker.exists()
    assert done.kernels == cache / OWN
    assert done.kernels.stat().st_mode & 0o777 == 0o700
    assert [path.is_relative_to(done.kernels) for path in done.loaded] == [True]
    assert (done.fault, done.temporary) == ("", shared)


@pytest.fixture
def make_foreign() -> Callable[[Path], None]:
    """Make a folder another user's."""
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    return lambda path: os.chown(path, 4321, -1)


def check_refused(done: Run, shared: Path, fault: str) -> None:
    """The process compiled to a folder that was its own for as long as it lived."""
    assert fault in done.fault
    assert done.kernels.parent == shared
    assert [path.is_relative_to(done.kernels) for path in done.loaded] == [True]
    assert not done.kernels.exists()


@on_linux
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_folder_that_others_can_write_to_is_refused(shared: Path, cache: Path, mode: int) -> None:
    """It may hold what others put there; that it is sticky is no help."""
    kernels = cache / OWN
    kernels.mkdir(parents=True)
    kernels.chmod(mode)
    fault = f"other users can write to {kernels} (mode {mode:04o}); delete it"
    check_refused(run(shared, cache), shared, fault)


@on_linux
def test_folder_of_another_user_is_refused(
    shared: Path, cache: Path, make_foreign: Callable[[Path], None]
) -> None:
    """So is one in a folder whose owner could put another in its place."""
    for each in (cache, cache / OWN):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_foreign(each)
        check_refused(run(shared, cache), shared, f"{each} belongs to another user (uid 4321)")
        os.chown(each, 0, -1)


@on_linux
def test_folder_for_cuda_kernels_is_checked(shared: Path, cache: Path, tmp_path: Path) -> None:
    """A folder that the environment names is used if it is this user's own."""
    script = _UMBEL + "import os; print(os.environ.get('MLX_PTX_CACHE_DIR'))"
    environment = {"TMPDIR": shared, "XDG_CACHE_HOME": cache}
    own = tmp_path / "own"
    *_, named = python(script, {**environment, "MLX_PTX_CACHE_DIR": own})
    assert Path(named) == own
    assert own.stat().st_mode & 0o777 == 0o700
    _, fault, _, named = python(script, {**environment, "MLX_PTX_CACHE_DIR": shared})
    assert named == "None"
    assert fault.startswith(f"other users can write to {shared}")


_KILLED = """
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""
_RUNS_ON = """
import sys
print("compiled", flush=True)
sys.stdin.readline()
"""


def kernels_of(cache: Path) -> list[Path]:
    """The compiled code in a cache folder."""
    return sorted((cache / OWN).rglob("*.so"))


@on_linux
def test_code_that_a_killed_process_left_is_compiled_again(shared: Path, cache: Path) -> None:
    """It may be a part of a file; code from before that process stays."""
    environment = {**os.environ, "TMPDIR": str(shared), "XDG_CACHE_HOME": str(cache)}
    run(shared, cache)
    (older,) = kernels_of(cache)
    killed = [sys.executable, "-c", "from umbel import models\n" + _KILLED]
    assert subprocess.run(killed, env=environment, timeout=120, check=False).returncode == -9
    part = older.with_name("libpart.so")
    part.write_bytes(older.read_bytes()[:1000])
    before = older.stat().st_mtime_ns
    run(shared, cache)
    assert kernels_of(cache) == [older]
    assert older.stat().st_mtime_ns == before
    assert subprocess.run(killed, env=environment, timeout=120, check=False).returncode == -9
    older.write_bytes(older.read_bytes()[:1000])  # MLX alone ends with SIGBUS here
    done = run(shared, cache)
    assert done.loaded == [older]
    assert older.stat().st_size > 1000
    assert [path.name for path in done.kernels.iterdir()] == ["mlx"], "no mark is left"


@on_linux
def test_code_of_a_process_that_runs_stays(shared: Path, cache: Path) -> None:
    """Another start beside it removes nothing."""
    environment = {**os.environ, "TMPDIR": str(shared), "XDG_CACHE_HOME": str(cache)}
    script = _UMBEL + _COMPILED + _RUNS_ON
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as beside:
        assert beside.stdout is not None
        while beside.stdout.readline() != "compiled\n":
            pass
        (compiled,) = kernels_of(cache)
        before = compiled.stat().st_mtime_ns
        assert run(shared, cache).loaded == [compiled]
        assert compiled.stat().st_mtime_ns == before
        beside.communicate("\n", timeout=60)


# -- bounds ------------------------------------------------------------------------------

_PRINT = "import umbel.models, os, sys; print(os.environ[sys.argv[1]])"
_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
_GRAPHS = "MLX_CUDA_GRAPH_CACHE_SIZE"
_PLANS = "MLX_CUDA_SDPA_CACHE_SIZE"


@pytest.mark.parametrize(
    ("name", "chosen", "found"),
    [
        *((_CHECK, None, "0"), (_CHECK, "1", "1")),
        *((_GRAPHS, None, "2000"), (_GRAPHS, "400", "400")),
        *((_PLANS, None, "1000"), (_PLANS, "256", "256")),
    ],
)
def test_what_mlx_reads(name: str, chosen: str | None, found: str) -> None:
    """A process is not ended by a count of misses, and has few; unless its user wants that."""
    environment = {key: value for key, value in os.environ.items() if key != name}
    if chosen is not None:
        environment[name] = chosen
    command = [sys.executable, "-c", _PRINT, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
