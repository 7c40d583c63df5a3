"""OpenBLAS in front of MLX's reference BLAS; each test is a process of its own."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from umbel.models.backends import blas


def cpu_wheel() -> bool:
    """Whether this environment has MLX's Linux CPU backend."""
    try:
        distribution("mlx-cpu")
    except PackageNotFoundError:
        return False
    return sys.platform == "linux"


on_cpu_wheel = pytest.mark.skipif(not cpu_wheel(), reason="only MLX's CPU wheel needs OpenBLAS")


def python(script: str) -> list[str]:
    """Run a script in a fresh process and give the lines it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_PRODUCT = """
import time
import mlx.core as mx
from umbel.models import runtime

def seconds():
    start = time.process_time()
    mx.eval(mx.ones((512, 512)) @ mx.ones((512, 512)))
    return time.process_time() - start

print(runtime.BLAS.fast, runtime.BLAS.advice)
print("umbel/blas/openblas-" in open("/proc/self/maps").read())
print(min(seconds() for _ in range(5)))
"""


@on_cpu_wheel
def test_openblas_is_loaded_and_used() -> None:
    """Importing umbel's modules in any order makes matrix products fast.

    What counts is the processor's time: on a busy machine the clock's says little.
    """
    *printed, fast = python("from umbel.models import runtime" + _PRODUCT)
    assert printed == ["True ", "True"]
    *_, slow = python("import mlx.core" + _PRODUCT)
    assert float(fast) < float(slow) / 3


@on_cpu_wheel
def test_mlx_multiplies_with_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who imports umbel has it in front of MLX's, and it multiplies."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = python(
        "import ctypes, pathlib, umbel.models\n"
        "import mlx.core as mx\n"
        "mx.set_default_device(mx.cpu)\n"
        f"(kept,) = pathlib.Path({str(tmp_path)!r}, 'umbel', 'blas').iterdir()\n"
        "found = [ctypes.CDLL(path).cblas_sgemm for path in (None, str(kept))]\n"
        "print(len({ctypes.cast(each, ctypes.c_void_p).value for each in found}))\n"
        "product = mx.arange(12.0).reshape(3, 4) @ mx.arange(20.0).reshape(4, 5)\n"
        "print(product[2].tolist() == [310, 348, 386, 424, 462])"
    )
    assert printed == ["1", "True"]


@on_cpu_wheel
def test_without_openblas_the_advice_is_to_install_it() -> None:
    """The slow path says what is wrong and which package mends it."""
    printed = python(
        "from umbel.models.backends import blas\n"
        "def missing(folder): raise OSError\n"
        "blas.load_wheel = missing\n"
        "blas.LIBRARIES = ('libnothing-of-this-name.so.0',)\n"
        "found = blas.preload()\n"
        "print(found.name, found.fast)\n"
        "print(found.advice)\n"
    )
    assert printed == ["reference BLAS False", blas.ADVICE]
    assert "libopenblas0-pthread" in blas.ADVICE


@on_cpu_wheel
def test_the_systems_openblas_is_taken_where_there_is_no_wheel(tmp_path: Path) -> None:
    """It says which; here a library of another name stands for it."""
    printed = python(
        "from pathlib import Path\n"
        "from umbel.models.backends import blas\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "blas.load_wheel(folder)\n"
        "def missing(folder): raise OSError\n"
        "blas.load_wheel = missing\n"
        "blas.LIBRARIES = ('libnothing-of-this-name.so.0', str(next(folder.iterdir())))\n"
        "found = blas.preload()\n"
        "print(found.name.startswith(f'OpenBLAS ({folder}/openblas-'), found.fast)\n"
    )
    assert printed == ["True True"]


@on_cpu_wheel
def test_mlx_imported_first_is_noticed() -> None:
    """Loading OpenBLAS behind mlx.core has no effect, and is not claimed to have one."""
    printed = python(
        "import mlx.core\nfrom umbel.models import BLAS\nprint(BLAS.fast)\nprint(BLAS.advice)\n"
    )
    assert printed == ["False", "import umbel.models before mlx.core"]


@on_cpu_wheel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the name is of x86-64")
def test_the_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that OpenBLAS has taken for the processor, or that the user wants."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    (name,) = python("from umbel.models import BLAS\nprint(BLAS.name)")
    assert name.endswith(", Nehalem")


_IN_WHEEL = {"Zen": "Haswell"}
"""Kernels that the wheel does not have, and what it takes in their place."""

_FLAGS = {
    "avx512": "avx2 fma avx512f avx512bw avx512cd avx512dq avx512vl",
    "avx2": "sse2 avx avx2 fma",
    "old": "sse2 sse4_2 avx",
}


@pytest.mark.parametrize(
    ("vendor", "flags", "machine", "chosen"),
    [
        ("GenuineIntel", "avx512", "x86_64", "SkylakeX"),
        ("AuthenticAMD", "avx512", "x86_64", "SkylakeX"),
        ("AuthenticAMD", "avx2", "x86_64", "Zen"),
        ("GenuineIntel", "avx2", "x86_64", "Haswell"),
        ("GenuineIntel", "old", "x86_64", None),
        ("", "old", "aarch64", None),
    ],
)
def test_kernels_are_those_of_the_instructions(
    vendor: str,
    flags: str,
    machine: str,
    chosen: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever OpenBLAS knows of the processor's model; and what the user wants stays."""
    told = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {_FLAGS[flags]}\n"
    (tmp_path / "cpuinfo").write_text(f"{told}\nprocessor\t: 1\n")
    monkeypatch.setattr(blas, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    assert blas.kernels() is None
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    assert blas.kernels() == chosen
    (tmp_path / "cpuinfo").unlink()
    assert blas.kernels() is None


@on_cpu_wheel
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are of x86-64")
def test_no_processor_computes_as_in_2004(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the instructions for it, which OpenBLAS need not know; nobody else is told."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    chosen = blas.kernels()
    if chosen is None:
        pytest.skip("this processor has old instructions only")
    script = "import os\nfrom umbel.models import BLAS\nprint(BLAS.name, list(os.environ))"
    (printed,) = python(script)
    assert f", {_IN_WHEEL.get(chosen, chosen)} " in printed
    assert "OPENBLAS_CORETYPE" not in printed


def test_importing_the_package_does_not_import_mlx() -> None:
    """The package chooses the BLAS, so nothing it imports may reach mlx."""
    printed = python("import sys, umbel.models\nprint('mlx.core' in sys.modules)")
    assert printed == ["False"]


def test_other_platforms_have_nothing_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS has Accelerate and CUDA its own library: no advice there."""
    monkeypatch.setattr(blas, "_has_cpu_backend", lambda: False)
    assert (blas.preload().fast, blas.preload().advice) == (True, "")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.preload() == blas.Blas("Accelerate", fast=True)
