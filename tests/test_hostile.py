"""A short form of `benchmarks/hostile.py`: what attacks may not do to a daemon."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

from attacks import GARBAGE

from .tiny import tiny_model_dir

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "hostile.py"
CONNECTIONS = 10_000  # or what the limit leaves; mlx_lm leaves a daemon 2,048 descriptors
CACHE_MIB = 64
BODIES_MIB = 256  # what all bodies in flight may take, by default
# A body may be there twice, when its pieces are joined or it is decoded; what else serving
# takes (threads, connections, the allocator's leftovers) is less than this.
MEMORY_MIB = CACHE_MIB + 2 * BODIES_MIB + 128
FEW = 4  # descriptors: of SQLite, and of a connection that is just closing


@dataclass
class Attacked:
    """How the program ended, and what it found."""

    status: int
    shown: str
    found: dict[str, Any]

    def outcomes(self) -> dict[str, dict[str, int]]:
        """What came of each variant of all attacks."""
        kinds = self.found["attacks"].values()
        return {name: ends for kind in kinds for name, ends in kind["outcomes"].items()}


def attack(folder: Path, kinds: str, seconds: int) -> Iterator[Attacked]:
    """Attack a daemon in some ways; in the end its log must be without a traceback."""
    model = tiny_model_dir(folder / "tiny", max_position_embeddings=8192)
    command = [sys.executable, str(PROGRAM), "--model", str(model), "--out", str(folder / "out")]
    command += ["--seconds", str(seconds), "--quiet", "2", "--connections", str(CONNECTIONS)]
    command += ["--only", kinds, "--patience", "20", "--log", str(folder / "log")]
    command += ["--", "--cache-bytes", f"{CACHE_MIB}MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    shown = done.stdout + done.stderr
    assert (folder / "out").exists(), shown
    (found,) = json.loads((folder / "out").read_text())
    yield Attacked(done.returncode, shown, found)
    assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture(scope="module")
def crowds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Attack with many small things."""
    kinds = "floods,slow-readers,leavers,cancels,garbage"
    yield from attack(tmp_path_factory.mktemp("crowds"), kinds, 12)


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Attack with large bodies: apart from the others, which these would hide."""
    yield from attack(tmp_path_factory.mktemp("bombs"), "bombs", 8)


@pytest.fixture(params=["crowds", "bombs"])
def attacked(request: pytest.FixtureRequest) -> Attacked:
    """One of the two."""
    found: Attacked = request.getfixturevalue(request.param)
    return found


def test_the_daemon_lives_and_ends_in_order(attacked: Attacked) -> None:
    """It served to the end, and SIGTERM ended it with status 0."""
    assert not attacked.found["died"]
    assert attacked.found["exit_status"] == 0, attacked.shown
    assert attacked.status == 0, attacked.shown


def test_a_normal_client_is_served(attacked: Attacked) -> None:
    """Before, under and after the attacks each turn gets its whole answer, and the same one."""
    for phase in attacked.found["phases"].values():
        assert phase["waits"]
        assert (phase["errors"], phase["wrong"]) == ({}, 0), attacked.shown


def test_nothing_is_left(attacked: Attacked) -> None:
    """When the attackers have left nothing runs or waits for them, and no descriptor is open."""
    assert attacked.found["idle_after"] is not None, attacked.shown
    before, after = attacked.found["descriptors"]
    if before is not None:
        assert after <= before + FEW, attacked.shown


def test_memory_is_bounded(attacked: Attacked) -> None:
    """The peak under attack is within the budgets of state and of bodies."""
    phases = attacked.found["phases"]
    grown = phases["attacked"]["rss_mib"] - phases["quiet"]["rss_mib"]
    assert grown <= MEMORY_MIB, attacked.shown


def test_crowds_come_through(crowds: Attacked) -> None:
    """No flood keeps the others out: each kind of garbage was answered, some streams began."""
    unanswered = {"backlog full", "no answer", "open at the end"}
    outcomes = crowds.outcomes()
    assert all(set(outcomes[name]) - unanswered for name in GARBAGE), crowds.shown
    assert outcomes["streams"]["left"]


def test_bombs_are_refused(bombs: Attacked) -> None:
    """Each kind of bomb is refused while the others come in; nobody has a body unpacked."""
    outcomes = bombs.outcomes()
    statuses = {name: {end for end in outcomes[name] if end.isdigit()} for name in outcomes}
    assert statuses.pop("unfinished") <= {"408", "503"}, bombs.shown
    assert statuses.pop("gzip") == {"415"}, bombs.shown
    assert all(found and found <= {"400", "413", "503"} for found in statuses.values()), bombs.shown
