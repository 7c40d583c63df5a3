"""Daemons shared by the tests of the front end and by those of its clients."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .running import RunningDaemon, running

TINY_CONTEXT = 8192


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name is short enough for a Unix socket, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="u") as folder:
        yield Path(folder)


@pytest.fixture
def heard(short_path: Path) -> Iterator[socket.socket]:
    """The socket that a service manager listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(short_path / "notify"))
        listening.setblocking(False)
        yield listening


@pytest.fixture(scope="session")
def long_tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model with a context long enough for answers that take a while."""
    from ..tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return tiny_model_dir(folder, max_position_embeddings=TINY_CONTEXT)


@pytest.fixture(scope="session")
def tiny_daemon(long_tiny_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon with the tiny model and short time limits, on socket and TCP.

    It runs one request at a time, so that tests can make others wait.
    """
    env = {"UMBEL_READ_TIMEOUT": "1", "UMBEL_KEEPALIVE": "0.2", "UMBEL_WRITE_TIMEOUT": "2"}
    env |= {"UMBEL_HEADER_TIMEOUT": "1", "UMBEL_IDLE_TIMEOUT": "20"}
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir, "--port", "0", "--max-batch", "1", env=env) as daemon,
    ):
        yield daemon


@pytest.fixture(scope="module")
def plain_daemon(long_tiny_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon with the tiny model and no other settings, for a file's tests that do not end it."""
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir) as daemon,
    ):
        yield daemon


@pytest.fixture(scope="session")
def smollm2_daemon() -> Iterator[RunningDaemon]:
    """A daemon with the embedded model."""
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), "smollm2", fresh=True) as daemon,
    ):
        yield daemon


@pytest.fixture(scope="session")
def locked_daemon(long_tiny_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon with the tiny model that needs a key on TCP: `secret`."""
    env = {"UMBEL_API_KEY": "secret"}
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir, "--port", "0", env=env) as daemon,
    ):
        yield daemon
