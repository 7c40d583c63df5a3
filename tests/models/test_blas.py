"""OpenBLAS in front of MLX's reference BLAS, from a wheel whose names are others.

Each load is in a process of its own.
"""

import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from umbel.models.backends import blas


def cpu_wheel() -> bool:
    """True if this environment has MLX's Linux CPU backend."""
    try:
        distribution("mlx-cpu")
    except PackageNotFoundError:
        return False
    return sys.platform == "linux"


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs it")
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
    """An import of umbel loads it in front of MLX's, and it multiplies."""
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
    """Kernels follow the instructions, and child processes keep their environment."""
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


# -- the wheel's copy --------------------------------------------------------------------

_LOAD = """
import sys
from pathlib import Path
from umbel.models.backends import blas
library, version = blas.load_wheel(Path(sys.argv[1]))
"""


def load(script: str, *arguments: object, begin: str = "") -> subprocess.CompletedProcess[str]:
    """Load it into a folder in a new process, and go on with a script."""
    return subprocess.run(
        [sys.executable, "-c", begin + _LOAD + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The words that a script printed."""
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where copies are kept."""
    return tmp_path / "umbel" / "blas"


@on_linux
def test_what_mlx_calls_has_its_plain_name_and_nothing_else(folder: Path) -> None:
    """A process's other libraries find no BLAS that they did not ask for."""
    names = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "cblas_sgemv", "sgemm_", "sgesdd_")
    done = load(f"print(version, *[int(hasattr(library, name)) for name in {names}])", folder)
    version = distribution("scipy-openblas32").version
    assert printed(done) == [version, "1", "1", "1", "0", "0", "0"]


@on_linux
def test_the_copy_is_made_once(folder: Path) -> None:
    """The next process takes it as it is, and needs no patchelf."""
    printed(load("", folder))
    (kept,) = folder.iterdir()
    written = kept.stat().st_mtime_ns
    begin = (
        "import umbel.models.backends.blas as kept\n"
        "def refuse(): raise AssertionError('not needed')\n"
        "kept._patchelf = refuse\n"
    )
    printed(load("", folder, begin=begin))
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [written]


@on_linux
def test_a_damaged_copy_is_made_anew(folder: Path) -> None:
    """So that one bad write does not make a machine slow for good."""
    printed(load("", folder))
    (kept,) = folder.iterdir()
    whole = kept.stat().st_size
    kept.write_bytes(b"")
    printed(load("", folder))
    assert [path.stat().st_size for path in folder.iterdir()] == [whole]


@on_linux
def test_other_versions_copies_go(folder: Path) -> None:
    """A copy has 25 MB, and each version would leave one."""
    folder.mkdir(parents=True)
    (folder / "openblas-0.3.1-x86_64.so").write_bytes(b"old")
    printed(load("", folder))
    (kept,) = folder.iterdir()
    assert kept.stat().st_size > 1 << 20


@on_linux
def test_where_nothing_can_be_kept_it_is_loaded_all_the_same(folder: Path, tmp_path: Path) -> None:
    """From a folder for the moment, which is gone afterwards."""
    folder.parent.mkdir()
    folder.write_text("in the way")
    passing = tmp_path / "passing"
    passing.mkdir()
    begin = f"import tempfile\ntempfile.tempdir = {str(passing)!r}\n"
    done = load("print(hasattr(library, 'cblas_sgemm'))", folder, begin=begin)
    assert printed(done) == ["True"]
    assert [*passing.iterdir()] == []


@on_linux
def test_processes_that_start_together_do_not_disturb_each_other(folder: Path) -> None:
    """As a machine's first daemon and a client do."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LOAD + "print(library.cblas_sgemm)", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@on_linux
def test_where_patchelf_fails_it_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left behind."""
    passing = tmp_path / "passing"
    passing.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passing))
    monkeypatch.setattr(blas, "_patchelf", lambda: "false")
    with pytest.raises(OSError, match="patchelf failed to rename scipy-openblas32"):
        blas.load_wheel(folder)
    assert [*folder.iterdir()] == []
    assert [*passing.iterdir()] == []


@on_linux
def test_without_the_wheel_it_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none for each platform."""

    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(blas, "distribution", none)
    with pytest.raises(FileNotFoundError, match="scipy-openblas32 is not installed"):
        blas.load_wheel(folder)


@on_linux
def test_the_systems_patchelf_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its wheel is missing, or its program lies elsewhere."""

    def nowhere(name: str) -> None:
        raise FileNotFoundError(name)

    monkeypatch.setattr(blas, "_distribution", nowhere)
    monkeypatch.setattr(shutil, "which", lambda _: "found")
    assert blas._patchelf() == "found"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FileNotFoundError):
        blas._patchelf()
