"""A process that dies while the disk tier works: nothing that was acknowledged is lost."""

import random
import signal
import time
from pathlib import Path

import pytest

from umbel.cachestore.disk.files import INDEX_FILES

from .disk_tools import PLANS, TIMEOUT, child, damaged, job, opened, write

ROUNDS = 6


def check(folder: Path, lines: list[str]) -> int:
    """Compare a folder with what its dead owner had said; return how many records there are.

    A line that the kill cut in two says nothing.
    """
    whole = [line for line in lines if line.endswith("\n")]
    acknowledged = {int(line[1:]) for line in whole if line.startswith("+")}
    deleted = {int(line[1:]) for line in whole if line.startswith("-")}
    with opened(folder) as tier:
        found = {record.id for record in tier.records}
        assert acknowledged - deleted <= found
        assert damaged(tier, *tier.records) == []
        names = {path.name for path in folder.iterdir()} - {"lock", *INDEX_FILES}
        assert names == {record.name for record in tier.records}
        collected = tier.collected
        assert collected["temporaries"] <= 1
        assert collected["orphans"] <= 1
        assert collected["rows"] == 0
        write(tier, job())
    return len(found)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "busy"])
def test_dying_at_each_step(tmp_path: Path, plan: str) -> None:
    process = child(tmp_path, plan)
    try:
        said, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGKILL
    lines = said.splitlines(keepends=True)
    assert "+3\n" in lines  # it had come to work
    assert check(tmp_path, lines) >= 3


def test_dying_at_any_moment(tmp_path: Path) -> None:
    random_ = random.Random(1)  # noqa: S311
    lines: list[str] = []
    for seed in range(ROUNDS):
        with child(tmp_path, "busy", seed) as process:
            try:
                assert process.stdout is not None
                while (line := process.stdout.readline()).startswith("open"):
                    pass
                time.sleep(random_.uniform(0, 0.2))
            finally:
                process.kill()
            lines += [line, *process.stdout.readlines()]
        check(tmp_path, lines)
    assert len(lines) > ROUNDS
