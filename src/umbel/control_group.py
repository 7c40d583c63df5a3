"""The Linux control group of this process: where it is, and how much memory it may take."""

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


def unified_group(proc: Path = PROC) -> str | None:
    """The path of this process's group of cgroup v2, relative to where these are mounted.

    Args:
        proc: where procfs is mounted.
    """
    return _own_groups(proc).get("")


def memory_limit(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """The least limit of this process's group and of those above it, in bytes; None without one.

    Args:
        proc: root of the proc file system.
        groups: where cgroup v2 is mounted, or the controllers of v1.
    """
    own = _own_groups(proc)
    limits = _limits(groups, own.get("", ""), "memory.max")
    limits += _limits(groups / "memory", own.get("memory", ""), "memory.limit_in_bytes")
    return min(limits, default=None)


def _own_groups(proc: Path) -> dict[str, str]:
    """This process's groups by their controllers in v1, and by an empty name in v2."""
    try:
        lines = os.fsdecode((proc / "self/cgroup").read_bytes()).splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers or number == "0":
            found |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    return found


def _limits(mount: Path, group: str, name: str) -> list[int]:
    """The limits of a group and of those above it. In a container the mount is its own group."""
    limits = []
    own = PurePosixPath(group)
    for above in dict.fromkeys((own, *own.parents, PurePosixPath())):
        with suppress(OSError, ValueError):  # there is no such file, or it says `max`
            limits.append(int((mount / above / name).read_text()))
    return limits
