"""A daemon that downloads its model: what it tells meanwhile, and how that goes on and ends."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from umbel.models.errors import DownloadError
from umbel.models.load import hub
from umbel.models.load.download import fetch
from umbel.models.load.watch import Watch

from ..fake_hub import COMMIT, REPO, FakeHub, serving
from .running import ANSWER, RunningDaemon, eventually, is_ready, spawn


@pytest.fixture
def fake(tiny_dir: Path) -> Iterator[FakeHub]:
    """A hub that has the tiny model."""
    with serving(tiny_dir) as fake:
        yield fake


def downloading(fake: FakeHub, folder: Path, **env: str) -> RunningDaemon:
    """Start a daemon whose model is on the hub, and that tells the manager in its folder."""
    environment = fake.environment(folder / "hf") | {"NOTIFY_SOCKET": str(folder / "notify")}
    return spawn(folder, REPO, env=environment | env, fresh=True)


def messages(heard: socket.socket) -> list[str]:
    """All lines that the service manager has heard since the last look."""
    lines = []
    while True:
        try:
            lines += heard.recv(4096).decode().split("\n")
        except BlockingIOError:
            return lines


def ready(daemon: RunningDaemon) -> Any:
    """Answer of `/ready`."""
    assert daemon.process.poll() is None, daemon.log()
    try:
        return daemon.request("GET", "/ready").json()
    except OSError:
        return {}


def test_how_far_it_is_can_be_seen(fake: FakeHub, short_path: Path, heard: socket.socket) -> None:
    """In `/ready`, in `/status`, in the manager's status and in the log, in bytes."""
    fake.go_on.clear()
    half, total = len(fake.files["model.safetensors"]) // 2, sum(map(len, fake.files.values()))
    daemon = downloading(fake, short_path)
    seen = eventually(
        lambda: (told := ready(daemon).get("download")) and told["done"] >= half and told, ANSWER
    )
    assert ready(daemon)["phase"] == "downloading"
    assert seen["total"] == total > seen["done"]
    assert daemon.status()["download"] == seen
    told = messages(heard)
    assert [line for line in told if line.startswith("STATUS=downloading: ")]
    assert [line for line in told if line.startswith("EXTEND_TIMEOUT_USEC=")]
    fake.go_on.set()
    eventually(lambda: is_ready(daemon), ANSWER)
    assert f"event=downloading bytes={total} total={total}" in daemon.log()
    assert daemon.status()["download"] is None
    assert ready(daemon) == {"status": "ready"}
    assert daemon.post({"messages": [{"role": "user", "content": "hi"}]}).status == 200
    assert daemon.terminate() == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stalls", "breaks"])
def test_one_that_ends_early_is_resumed(
    fake: FakeHub, short_path: Path, heard: socket.socket, how: str
) -> None:
    """It is an error after a bound, the manager is not put off for ever; the next start goes on."""
    if how == "stalls":
        fake.go_on.clear()
    else:
        fake.breaks = True
    half = len(fake.files["model.safetensors"]) // 2
    daemon = downloading(fake, short_path, UMBEL_DOWNLOAD_TIMEOUT="2")
    assert daemon.process.wait(ANSWER) == 1
    assert "the download of tests/tiny stalls: nothing has arrived for" in daemon.log()
    asked = [line for line in messages(heard) if line.startswith("EXTEND_TIMEOUT_USEC=")]
    assert 1 <= len(asked) <= 4
    assert "Traceback" not in daemon.log()
    fake.go_on.set()
    fake.breaks = False
    again = downloading(fake, short_path)
    eventually(lambda: is_ready(again), ANSWER)
    assert again.terminate() == 0
    assert fake.ranges[0] == 0
    assert fake.ranges[-1] == half


def test_a_stop_ends_a_download(fake: FakeHub, short_path: Path, heard: socket.socket) -> None:
    """SIGTERM does not wait for the rest of a model; what has come stays."""
    fake.go_on.clear()
    half = len(fake.files["model.safetensors"]) // 2
    daemon = downloading(fake, short_path)
    eventually(lambda: any(path.stat().st_size == half for path in parts(short_path)), ANSWER)
    assert daemon.terminate() == 0
    assert [path.stat().st_size for path in parts(short_path)] == [half]
    assert "STOPPING=1" in messages(heard)


def parts(folder: Path) -> list[Path]:
    """Files that have come in part."""
    return list((folder / "hf").rglob("*.partial"))


# -- in this process -----------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it takes, what there is, and what to do."""
    listing = hub.Listing(COMMIT, [hub.RemoteFile("model.safetensors", 1 << 60, "0" * 64)])
    monkeypatch.setattr(hub, "list_files", lambda _: listing)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=rf"no space for {REPO} in .*needs {1 << 60} bytes"):
        fetch(REPO, Watch())


def test_a_repo_that_changes_meanwhile_is_told(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [hub.RemoteFile(name, len(content), "") for name, content in fake.files.items()]
    listing = hub.Listing("b" * 40, small)
    monkeypatch.setattr(hub, "list_files", lambda _: listing)
    monkeypatch.setattr(hub, "link", lambda *_: tmp_path / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match=f"{REPO} changed while it was downloaded"):
        fetch(REPO, Watch())
