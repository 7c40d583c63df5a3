"""The environment that MLX reads when it starts: bounds, and the folder of compiled code.

MLX's CPU backend writes compiled functions to `mlx/VERSION/cpu` in the system's temporary folder,
and loads any file there that has the name of a function, whichever user wrote it. Its CUDA backend
does so in `mlx/VERSION/ptx`, unless `MLX_PTX_CACHE_DIR` is set. The temporary folder is `TMPDIR`,
which MLX reads each time.

MLX compiles to a file under its final name. A process that is killed while it compiles, or a
machine that loses power, leaves a part of one. MLX would load that at each later start, which is an
error or the end of the process (SIGBUS), and a look at the file cannot tell a part from the whole.
So each process has a mark in the folder while it runs. The next start removes code that is younger
than a mark left behind, and MLX compiles it again.
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
        path: where.
        fault: why the folder that was to have it is not used; empty if it is.
    """

    path: Path
    fault: str = ""


def set_bounds() -> None:
    """Raise the bounds of MLX's CUDA caches, and let them miss any number of times.

    Its caches of graphs and of attention plans count the misses of the whole life of a process, and
    raise "Cache thrashing is happening" after twice as many as they hold (`lru_cache.h` of MLX
    0.32): 800 kinds of graphs, or 512 shapes. A daemon reaches any such number. A step of a model
    of 32 layers is fourteen graphs; on an H200 one takes 1.8 ms to make and 2.1 ms to destroy.
    Prompts of up to 32,768 tokens meet 330 plans for each kind of attention. A value that the user
    has set stays.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def keep_kernels() -> KernelFolder:
    """Make MLX compile to umbel's cache folder, or to a new folder if other users can change that.

    Python's own temporary files stay where they were. Programs that this process starts get the
    folder as their temporary one.
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
    """Make the folder, remove what a killed process may have left incomplete, and mark it."""
    folder = private_folder(folder)
    for mark in folder.glob(f"{_MARK}*"):
        _clear_after(mark)
    fd, name = tempfile.mkstemp(prefix=_MARK, dir=folder)
    fcntl.flock(fd, fcntl.LOCK_SH)  # until the process ends, however it ends
    atexit.register(Path(name).unlink, missing_ok=True)
    return folder


def _clear_after(mark: Path) -> None:
    """Remove code that is younger than a mark, unless the process of that mark still runs."""
    with suppress(OSError), mark.open() as file:  # another start has removed it, or it is locked
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begun = os.fstat(file.fileno()).st_mtime_ns
        for path in mark.parent.rglob("*"):
            if path.suffix in _COMPILED and path.lstat().st_mtime_ns >= begun:
                path.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)


def _passing() -> Path:
    """A folder for as long as the process lives."""
    try:
        made = Path(tempfile.mkdtemp(prefix="umbel-kernels-"))
    except OSError:
        return Path("/")  # only root can write there: MLX's own error says that it cannot compile
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
