"""The memory limit of this process's control group, of both versions, wherever it is set."""

from pathlib import Path

import pytest

from umbel.control_group import memory_limit, unified_group
from umbel.models.backends import memory

UNLIMITED = 9223372036854771712  # as v1 writes it


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine without control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "groups").mkdir()
    return tmp_path


def limit_of(system: Path, cgroup: str, files: dict[str, object]) -> int | None:
    """Say what is read where /proc/self/cgroup and these files are so."""
    (system / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = system / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return memory_limit(system / "proc", system / "groups")


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": 600}, 600),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": 700}, 700),
        ("0::/a/b\n", {"a/b/memory.max": 800, "a/memory.max": 700, "c/memory.max": 1}, 700),
        ("0::/\n", {"memory.max": 500}, 500),
        ("0::/outside/of/the/mount\n", {"memory.max": 500}, 500),
        ("0::/a: b\n", {"a: b/memory.max": 300}, 300),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("0::/a\n", {}, None),
        ("", {}, None),
        (
            "5:cpu,memory:/a/b\n1:name=systemd:/x\n0::/x\n",
            {
                "memory/a/b/memory.limit_in_bytes": 900,
                "memory/a/memory.limit_in_bytes": 800,
                "memory/memory.limit_in_bytes": UNLIMITED,
                "memory/x/memory.limit_in_bytes": 1,
            },
            800,
        ),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": 400}, 400),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "no number"}, None),
    ],
)
def test_least_limit(
    system: Path, cgroup: str, files: dict[str, object], limit: int | None
) -> None:
    """Of the process's own group and those above it, up to where they are mounted."""
    assert limit_of(system, cgroup, files) == limit


def test_group_cannot_be_told(system: Path) -> None:
    """A system without procfs has no group, and what is mounted has a limit still."""
    (system / "groups/memory.max").write_text("500\n")
    assert memory_limit(system / "proc", system / "groups") == 500
    assert unified_group(system / "proc") is None


def test_memory_of_the_host_is_what_the_group_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget on a CPU follows from it."""
    monkeypatch.setattr(memory, "memory_limit", lambda: None)
    whole = memory._host_memory()
    monkeypatch.setattr(memory, "memory_limit", lambda: 600 << 20)
    assert memory._host_memory() == 600 << 20 < whole
    monkeypatch.setattr(memory, "memory_limit", lambda: UNLIMITED)
    assert memory._host_memory() == whole
