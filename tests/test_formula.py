"""The Homebrew formula has the lock's wheels, and its service is the job that umbel ships."""

import hashlib
import importlib.util
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from umbel.daemon.config import SETTINGS
from umbel.daemon.models import assembly

from .test_packaging import locked

ROOT = Path(__file__).resolve().parent.parent
FORMULA = ROOT / "packaging" / "umbel.rb"
SCRIPT = ROOT / "packaging" / "formula.py"
LAUNCHD_KILLS = 20
"""Seconds after it told a job to stop, where the job's plist says nothing (launchd.plist(5))."""
_RESOURCE = re.compile(
    r'^  resource "(?P<name>[^"]+)" do\n'
    r'    url "@FILES@/packages/(?:[^/"]+/)*(?P<wheel>[^/"]+\.whl)", using: :nounzip\n'
    r'    sha256 "(?P<digest>[0-9a-f]{64})"\n'
    r"  end$",
    re.MULTILINE,
)


def resources() -> list[dict[str, str]]:
    """Read the formula's resources; there is nothing else between its marks."""
    part = FORMULA.read_text().partition("  # resources\n")[2].partition("  # end of resources")[0]
    assert _RESOURCE.sub("", part).strip() == ""
    return [found.groupdict() for found in _RESOURCE.finditer(part)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Import the script that writes them."""
    spec = importlib.util.spec_from_file_location("formula", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_resource_is_a_wheel_of_the_lock() -> None:
    """Name, version and digest are those of requirements.lock."""
    pins = {}
    for requirement, hashes in locked().items():
        name, _, version = requirement.partition(" ;")[0].partition("==")
        pins[name, version] = hashes
    found = resources()
    assert len(found) > 30
    for resource in found:
        project, release, *_ = parse_wheel_filename(resource["wheel"])
        assert project == resource["name"]
        assert f"sha256:{resource['digest']}" in pins[project, str(release)], project


def test_the_resources_are_what_umbel_needs_there(script: ModuleType) -> None:
    """All that its dependencies ask for on a Mac, and nothing else."""
    described = script.environment()
    needed: set[str] = set()
    to_visit = [("umbel", "")]
    while to_visit:
        name, extra = to_visit.pop()
        for line in _requires(name):
            wanted = Requirement(line)
            if wanted.marker and not wanted.marker.evaluate({**described, "extra": extra}):
                continue
            child = canonicalize_name(wanted.name)
            if child not in needed:
                to_visit.append((child, ""))
            to_visit += [(child, part) for part in wanted.extras if child not in needed]
            needed.add(child)
    assert "mlx-metal" in needed
    assert {resource["name"] for resource in resources()} == needed


def _requires(name: str) -> Iterator[str]:
    try:
        yield from requires(name) or []
    except PackageNotFoundError:
        assert name == "mlx-metal", f"{name} is not installed here"


def _service() -> dict[str, str]:
    """Read the service block's lines: the first word of each, and the rest."""
    block = re.search(r"^  service do\n(.*?)^  end$", FORMULA.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    lines = [line.strip() for line in block[1].splitlines()]
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#"))
    return {name: rest for name, _, rest in pairs}


def test_the_service_is_the_job_that_umbel_ships() -> None:
    """Homebrew's job says the same as the plist where it can; the rest is listed by name."""
    job: dict[str, Any] = plistlib.loads((ROOT / "launchd/org.umbel.daemon.plist").read_bytes())
    service = _service()
    assert job.pop("ProcessType") == "Interactive"
    assert service.pop("process_type") == ":interactive"
    assert job.pop("KeepAlive") == {"SuccessfulExit": False}
    assert service.pop("keep_alive") == "successful_exit: false"
    assert job.pop("RunAtLoad") is True
    assert service.pop("run_type") == ":immediate"
    assert str(job.pop("ThrottleInterval")) == service.pop("throttle_interval")
    program, *words = job.pop("ProgramArguments")
    shown = ", ".join(f'"{word}"' for word in [Path(program).name, *words])
    assert service.pop("run") == f"[opt_bin/{shown}]"
    assert Path(job.pop("StandardErrorPath")).name == "umbel.log"
    assert service.pop("error_log_path") == 'var/"log/umbel.log"'
    variables = service.pop("environment_variables")  # for want of ExitTimeOut
    assert not service
    grace = re.fullmatch(r'UMBEL_STOP_GRACE: "(\d+)"', variables)
    assert grace is not None
    assert "stop_grace" in SETTINGS
    assert int(grace[1]) + assembly._SAVE_GRACE < LAUNCHD_KILLS
    assert set(job) == {"Label", "Sockets", "ExitTimeOut", "SoftResourceLimits", "Umask"}


def release(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Print a release's formula with the script."""
    return subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=False
    )


def test_a_release_fills_in_all_places(tmp_path: Path) -> None:
    """No mark stays, and the sdist's digest is the release's."""
    sdist = tmp_path / "umbel-0.1.0.tar.gz"
    sdist.write_bytes(b"an sdist")
    files = ("--files", "https://b.example/")
    done = release("--sdist", sdist, "--url", "https://a.example/umbel-0.1.0.tar.gz", *files)
    printed = done.stdout
    assert done.returncode == 0, done.stderr
    assert printed.startswith("class Umbel < Formula\n")
    assert "@" not in printed.replace("python@", "").replace("@3.", "")
    assert 'url "https://a.example/umbel-0.1.0.tar.gz"' in printed
    assert f'sha256 "{hashlib.sha256(b"an sdist").hexdigest()}"' in printed
    assert printed.count("https://b.example/packages/") == len(resources())
    refused = release("--sdist", sdist, "--url", "https://a.example/latest.tar.gz", *files)
    assert refused.returncode == 2
    assert "end it with umbel-0.1.0.tar.gz" in refused.stderr
    if (ruby := shutil.which("ruby")) is not None:
        (tmp_path / "umbel.rb").write_text(printed)
        subprocess.run([ruby, "-c", tmp_path / "umbel.rb"], capture_output=True, check=True)


def test_ruby_can_read_it() -> None:
    """Its syntax is Ruby's."""
    ruby = shutil.which("ruby")
    if ruby is None:
        pytest.skip("ruby is not installed")
    done = subprocess.run([ruby, "-c", FORMULA], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
