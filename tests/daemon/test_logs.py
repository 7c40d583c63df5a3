"""Where log lines go, which of them are written, and what the first one is."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from umbel import __version__
from umbel.daemon.errors import ConfigError
from umbel.daemon.observability import logs
from umbel.daemon.observability.logs import LogFile

from .command import TIMEOUT, environment


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave structlog as it was."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_lines_of_lower_levels_are_left_out(tmp_path: Path) -> None:
    """The level is the least one that is written."""
    log = structlog.get_logger()
    for level in ("debug", "info", "warning", "error"):
        path = tmp_path / level
        logs.configure("text", level, path)
        for name in ("debug", "info", "warning", "error"):
            getattr(log, name)("said")
    counts = [len((tmp_path / name).read_text().splitlines()) for name in ("debug", "info")]
    assert counts == [4, 3]
    assert (tmp_path / "error").read_text().split()[1:] == ["level=error", "event=said"]


def test_a_renamed_file_is_left(tmp_path: Path) -> None:
    """The next line begins a new file, only its owner's; where that fails the old one has it."""
    path = tmp_path / "logs" / "log"
    path.parent.mkdir()
    file = LogFile(path)
    file.msg("one")
    path.rename(tmp_path / "old")
    file.msg("two")
    assert (tmp_path / "old").read_text() == "one\n"
    assert path.read_text() == "two\n"
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.parent.rmdir()
    file.msg("three")
    path.parent.mkdir()
    file.msg("four \udcff")
    assert path.read_text() == "four \\udcff\n"


def test_a_full_disk_ends_nothing() -> None:
    """The line is lost."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    LogFile(full).msg("lost")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It is named, with the setting; what was set up before stays."""
    before = structlog.get_config()
    with pytest.raises(ConfigError, match=f"log_file: cannot write {tmp_path}: Is a directory"):
        logs.configure("text", "info", tmp_path)
    assert structlog.get_config() == before


_SERVE = """
import sys
from umbel.daemon import cli
from umbel.daemon.cli import commands
announce = commands._announce
def look():
    announce()
    heavy = {"mlx", "mlx_lm", "aiohttp", "numpy", "transformers"} & set(sys.modules)
    sys.exit(f"imported: {sorted(heavy)}")
commands._announce = look
sys.argv = ["umbel", "serve"]
cli.app()
"""


def test_the_first_line_comes_before_the_imports(short_path: Path) -> None:
    """It has the version, and what takes seconds to import is not there yet."""
    done = subprocess.run(
        [sys.executable, "-c", _SERVE],
        capture_output=True,
        text=True,
        env=environment(short_path),
        check=False,
        timeout=TIMEOUT,
    )
    first, imported = done.stderr.splitlines()
    assert f"event=starting version={__version__} pid=" in first
    assert imported == "imported: []"
