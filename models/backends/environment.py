"""The environment that MLX reads when it starts: bounds, and the folder of compiled code.

MLX's CPU backend writes compiled functions to `mlx/VERSION/cpu` in the system's temporary folder,
`TMPDIR`, and loads any file there that has the name of a function, whichever user wrote it. Its
CUDA backend does so in `mlx/VERSION/ptx`, unless `MLX_PTX_CACHE_DIR` is set.

MLX compiles to a file under its final name. A process that is killed while it compiles, or a
machine that loses power, leaves a partial file. Each later start would load it, and fail or end
(SIGBUS); no check tells a partial file from a whole one. So each process has a mark in the folder
while it runs. The next start removes code that is younger than a mark left behind, and MLX compiles
it again.
"""

import atexit
import fcntl
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ...ownership import private_folder

_DEFAULTS = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1000",
}
_TEMPORARY = "TMPDIR"
_CUDA = "MLX_PTX_CACHE_DIR"
_MARK = "running-"
_COMPILED = (".so", ".ptx")


@dataclass(frozen=True)
class KernelFolder:
    """The folder that MLX loads compiled code from.

    Attributes:
        path: of the folder.
        fault: why this is not the intended folder; empty if it is.
    """

    path: Path
    fault: str = ""


def set_bounds() -> None:
    """Raise the bounds of MLX's CUDA caches, and let them miss any number of times.

    MLX counts the misses of a process in its caches of graphs and attention plans, and raises
    "Cache thrashing is happening" after twice as many as they hold (`lru_cache.h` of MLX 0.32): 800
    kinds of graphs, or 512 shapes. A daemon reaches any such number. A step of a model of 32 layers
    is fourteen graphs; on an H200 one takes 1.8 ms to make and 2.1 ms to destroy. Prompts of up to
    32,768 tokens have 330 plans for each kind of attention. Values that the user has set stay.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def keep_kernels() -> KernelFolder:
    """Make MLX compile to umbel's cache folder, or to a new folder if other users can change that.

    Python's own temporary files stay where they were. Child processes inherit the folder as TMPDIR.
    """
    with suppress(OSError):
        tempfile.gettempdir()  # remembered by Python from now on
    machine = platform.machine()  # a home may be shared by machines of several kinds
    kernels = _choose(platformdirs.user_cache_path("umbel") / "kernels" / machine)
    os.environ[_TEMPORARY] = str(kernels.path)
    if not (named := os.environ.get(_CUDA)):
        return kernels
    try:
        os.environ[_CUDA] = str(_prepared(Path(named)))
    except OSError as error:
        del os.environ[_CUDA]  # it is in the folder above then
        return KernelFolder(kernels.path, kernels.fault or str(error))
    return kernels


def _choose(folder: Path) -> KernelFolder:
    try:
        return KernelFolder(_prepared(folder))
    except OSError as error:
        return KernelFolder(_passing(), str(error))


def _prepared(folder: Path) -> Path:
    """Make the folder, remove files that a killed process may have left partial, and mark it."""
    folder = private_folder(folder)
    for mark in folder.glob(f"{_MARK}*"):
        _clear_after(mark)
    fd, name = tempfile.mkstemp(prefix=_MARK, dir=folder)
    fcntl.flock(fd, fcntl.LOCK_SH)  # until the process ends, however it ends
    atexit.register(Path(name).unlink, missing_ok=True)
    return folder


def _clear_after(mark: Path) -> None:
    """Remove code that is younger than a mark, unless the process of that mark still runs."""
    with suppress(OSError), mark.open() as file:  # another start removed it, or it is locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begun = os.fstat(file.fileno()).st_mtime_ns
        for path in mark.parent.rglob("*"):
            if path.suffix in _COMPILED and path.lstat().st_mtime_ns >= begun:
                path.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)


def _passing() -> Path:
    try:
        made = Path(tempfile.mkdtemp(prefix="umbel-kernels-"))
    except OSError:
        return Path("/")  # only root can write there: MLX's own error says that it cannot compile
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
