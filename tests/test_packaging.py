"""The commit can be installed elsewhere, at the versions that were tested here."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Put together here, or this file would be the first to break the rule.
_HOSTS = "|".join(
    re.escape(".".join(parts)) for parts in (("pypi", "org"), ("pythonhosted", "org"))
)
_TOP = "root|work"
FORBIDDEN = re.compile(
    rf"(?P<host>{_HOSTS})|(?<![\w.~<>}}-])/(?P<folder>(?:{_TOP})|(?:home|Users)/[\w.-]+)/"
)


def committed_files() -> list[Path]:
    """List what git holds, and what it would take with the next `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so nothing tells which files are committed")
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def text_of(path: Path) -> str:
    """Read a file; a binary one has no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def pyproject() -> dict[str, list[str]]:
    """Read the project table."""
    table: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def locked() -> dict[str, list[str]]:
    """Read requirements.lock: each `name==version`, with its marker if any, and its hashes."""
    joined = (ROOT / "requirements.lock").read_text().replace("\\\n", "")
    lines = [line for line in joined.splitlines() if line and not line.lstrip().startswith("#")]
    parts = (re.split(r"\s+--hash=", line.strip()) for line in lines)
    return {requirement: hashes for requirement, *hashes in parts}


def test_no_committed_file_names_a_registry_or_a_developers_folder() -> None:
    """People install from mirrors, and have other folders."""
    files = committed_files()
    assert len(files) > 10
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in FORBIDDEN.finditer(text_of(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "parts",
    [
        ("https://", "pypi.", "org/simple"),
        ("files.", "pythonhosted.", "org"),
        ("cd /", "root/umbel"),
        ("'/", "work/main'"),
        ("/", "home/ada/umbel"),
        ("=/", "Users/ada/umbel"),
    ],
)
def test_planted_host_or_folder_is_found(parts: tuple[str, ...]) -> None:
    """The pattern finds what it is for."""
    assert FORBIDDEN.search("".join(parts))


@pytest.mark.parametrize(
    "text", ["~/work/umbel", "docs/work/", "/home/", "$HOME/root/", "/rooted/"]
)
def test_harmless_path_is_no_finding(text: str) -> None:
    """Relative paths and the user's own home are allowed."""
    assert not FORBIDDEN.search(text)


def test_every_locked_requirement_has_a_hash() -> None:
    """`--require-hashes` refuses a lock in which a single one lacks."""
    requirements = locked()
    assert len(requirements) > 30
    for requirement, hashes in requirements.items():
        assert re.fullmatch(r"[\w.-]+==[\w.+!]+( ; .+)?", requirement), requirement
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), requirement


def test_lock_has_no_urls() -> None:
    """The lock works with any mirror."""
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_mlx_lm_is_pinned_alike() -> None:
    """The one exact pin that matters is the same in the metadata and in the lock."""
    pins = [line for line in pyproject()["dependencies"] if re.match(r"mlx-lm\b", line)]
    assert len(pins) == 1
    assert re.fullmatch(r"mlx-lm==[\d.]+", pins[0])
    assert pins == [line for line in locked() if line.startswith("mlx-lm==")]


def test_cuda_override_is_the_same_mlx() -> None:
    """cuda.txt replaces the backend of mlx and nothing else, at the version we depend on."""
    lines = (ROOT / "cuda.txt").read_text().splitlines()
    override = [line for line in lines if line and not line.startswith("#")]
    versions = {
        found[1]
        for line in pyproject()["dependencies"]
        if (found := re.match(r"mlx(?:\[\w+\])?==([\d.]+)", line))
    }
    assert len(versions) == 1
    assert override == [f"mlx[cuda13]=={versions.pop()}"]


_STUB = "def setup(version): print(version)"


def built_version(folder: Path) -> str:
    """Run a folder's setup.py with a setuptools that prints the version."""
    (folder / "stub").mkdir(exist_ok=True)
    (folder / "stub" / "setuptools.py").write_text(_STUB)
    done = subprocess.run(
        [sys.executable, folder / "setup.py"],
        env={**os.environ, "PYTHONPATH": str(folder / "stub")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_each_commit_has_a_version(tmp_path: Path) -> None:
    """A clone's has the commit, a change another, a release none; an sdist keeps what it has."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "--quiet", ".")
    folder = tmp_path / "inside"
    folder.mkdir()
    for place in (tmp_path, folder):
        shutil.copy(ROOT / "setup.py", place)
    git("add", "setup.py")
    git("commit", "--quiet", "--message", "one")
    release = built_version(folder)
    assert re.fullmatch(r"\d+\.\d+\.\d+", release), "the repository around it is another's"
    commit = git("rev-parse", "--short=7", "HEAD")
    assert built_version(tmp_path) == f"{release}+g{commit}"
    git("tag", f"v{release}")
    assert built_version(tmp_path) == release
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    commit = git("rev-parse", "--short=7", "HEAD")
    assert built_version(tmp_path) == f"{release}+g{commit}"
    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text() + "# changed")
    changed = built_version(tmp_path)
    assert changed == f"{release}+g{commit}.dirty"
    (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: umbel\nVersion: {changed}\n")
    assert built_version(folder) == changed


@pytest.mark.nightly
def test_cuda_override_leaves_the_cpu_backend_out() -> None:
    """With cuda.txt uv picks CUDA's libmlx.so and not the CPU's beside it."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    platform = ["--python-platform", "x86_64-manylinux_2_35"]
    inputs = ["--overrides", "cuda.txt", "pyproject.toml"]
    compiled = subprocess.run(
        [*command, *platform, *inputs], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr
    names = {line.partition("==")[0] for line in compiled.stdout.splitlines()}
    assert "mlx-cuda-13" in names
    assert "mlx-cpu" not in names
