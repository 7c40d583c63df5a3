"""Another model is tried on the same disk: the first one's state and pins come back."""

from pathlib import Path

from umbel.daemon.cli import doctor
from umbel.daemon.config import Settings
from umbel.daemon.quoting import amount

from ..tiny import tiny_model_dir
from .running import RunningDaemon, eventually, running
from .test_restart_warm import ask, on_disk
from .test_several_models import umbel

USER = "What is the capital of France?"


def pins(daemon: RunningDaemon) -> dict[str, int]:
    """How many tokens each pin holds in memory."""
    return {
        pin["name"]: pin["held"]
        for pin in daemon.request("GET", "/cache/pins").json()["pins"]
        if not pin["shared"]
    }


def bytes_below(folder: Path) -> int:
    """Bytes of all files of state."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_trying_another_model_loses_nothing(
    short_path: Path, tiny_dir: Path, long_tiny_dir: Path
) -> None:
    """State and pin of the first model are there when it is served again."""
    with running(short_path, long_tiny_dir) as first:
        answer, _ = ask(first, USER)
        pinned = {"name": "reviewer", "system": "You review changes. " * 20}
        assert first.post(pinned, "/cache/pins").status == 200
        held = pins(first)
        assert held["reviewer"] > 50
    left = bytes_below(short_path / "disk")
    with running(short_path, tiny_dir) as second:
        assert pins(second) == {}
        (other,) = second.status()["stored"]
        assert (other["model"], other["bytes"]) == (long_tiny_dir.name, left)
        assert other["idle_seconds"] < 3600
        status, listed = umbel(second, "cache", "ls")
        assert status == 0
        assert f"  {long_tiny_dir.name}: {amount(left)}, used " in listed
        (finding,) = doctor._stored(Settings(disk_dir=str(short_path / "disk")))
        assert f"{long_tiny_dir.name} {amount(left)} (used " in finding.text
        assert second.post({"prompt": "Once", "max_tokens": 2}, "/v1/completions").status == 200
        eventually(lambda: on_disk(second))
    assert bytes_below(short_path / "disk") > left
    with running(short_path, long_tiny_dir) as again:
        eventually(lambda: pins(again) == held)
        told, cached = ask(again, USER)
        assert told == answer
        assert cached > 300
        assert [each["model"] for each in again.status()["stored"]] == [tiny_dir.name]
        assert "not restored" not in again.log()


def test_one_budget_takes_the_resting_model_first(
    short_path: Path, tmp_path: Path, long_tiny_dir: Path
) -> None:
    other = tiny_model_dir(tmp_path / "other", max_position_embeddings=4096)
    with running(short_path, long_tiny_dir) as first:
        ask(first, USER)
    left = bytes_below(short_path / "disk")
    budget = left * 3 // 2
    with running(short_path, other, "--disk-bytes", str(budget)) as second:
        for number in range(3):
            ask(second, f"agent {number} asks {USER}")
        eventually(lambda: on_disk(second))
        eventually(lambda: bytes_below(short_path / "disk") <= budget)
        own = second.status()["disk"]["nbytes"]
        assert own > budget // 2
        assert "state of another model removed" in second.log()
        assert ask(second, f"agent 0 asks {USER}")[1] > 300
