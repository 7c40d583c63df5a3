"""Ctrl-C wherever a start can be: the terminal is as it was, and nothing is left running."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ..fake_hub import REPO, FakeHub
from ..fake_hub import serving as hub_of
from ..tiny import tiny_model_dir
from .running import STOP, eventually
from .terminal import CTRL_C, Terminal, in_terminal, terminal
from .test_serve_terminal import serve
from .test_temporary import children, left_over, runs

INTERRUPTED = 130


@pytest.fixture
def hub(tiny_dir: Path) -> Iterator[FakeHub]:
    """A hub that sends half of the tiny model, and then nothing."""
    with hub_of(tiny_dir) as hub:
        hub.go_on.clear()
        yield hub


def half_is_there(shown: Terminal, hub: FakeHub) -> bool:
    """True if the bar has moved as far as it can."""
    return hub.half.is_set() and " of " in shown.text()


def ended_in_order(shown: Terminal, folder: Path) -> bool:
    """True if an idle daemon has said its last word, and removed its socket."""
    last = shown.lines()[-1]
    return last.endswith("stopped") and "serves" not in shown.text() and not sockets(folder)


def sockets(folder: Path) -> list[Path]:
    """Files that daemons have left behind."""
    return list(folder.rglob("*.sock"))


def test_in_the_imports(short_path: Path, long_tiny_dir: Path) -> None:
    """From the first line on, the end has a word."""
    with serve(short_path, long_tiny_dir) as shown:
        shown.wait_for("starting")
        shown.type(CTRL_C)
        assert shown.wait() == 0
        assert ended_in_order(shown, short_path)


def test_in_a_download(hub: FakeHub, short_path: Path) -> None:
    """`umbel serve` ends without the rest of the model; what has come stays."""
    with serve(short_path, REPO, **hub.environment(short_path / "hf")) as shown:
        shown.wait_for("downloading the model")
        shown.wait_for(lambda: half_is_there(shown, hub))
        shown.type(CTRL_C)
        assert shown.wait() == 0
        assert ended_in_order(shown, short_path)
        assert "downloading" not in shown.text()
        amounts = re.findall(rb"of ([\d.]+ ?[KM]?i?B?) ", shown.output)
        assert {amount[-3:] for amount in amounts} == {b"KiB"}  # to the end
    (part,) = (short_path / "hf").rglob("*.partial")
    assert part.stat().st_size > 0


def test_in_a_pull(hub: FakeHub, short_path: Path) -> None:
    """`umbel models pull` ends as a command does, and says how to go on."""
    environment = in_terminal(short_path) | hub.environment(short_path / "hf")
    with terminal("models", "pull", REPO, env=environment, folder=short_path) as shown:
        shown.wait_for(lambda: hub.half.is_set() and "KiB" in shown.text())
        shown.type(CTRL_C)
        assert shown.wait() == INTERRUPTED
        assert f"stopped; `umbel models pull {REPO}` goes on where it ended" in shown.text()
    assert list((short_path / "hf").rglob("*.partial"))


@pytest.mark.slow
def test_while_it_measures_the_model(short_path: Path) -> None:
    """The call of the model under way ends, no further one begins, and the last line says so.

    A warm-up ends in the same way; see `test_warmup.py`.
    """
    model = tiny_model_dir(short_path / "tiny", num_hidden_layers=6)  # long enough to be seen
    with serve(short_path, model) as shown:
        shown.wait_for("measuring the model")
        shown.type(CTRL_C)
        assert shown.wait() == 0
        assert b"waiting for the load to end" in shown.output
        assert ended_in_order(shown, short_path)
        assert "disk tier" not in shown.text()
        assert b"recovering state" not in shown.output, "it ended before its next phase"


@pytest.mark.slow
def test_while_the_disk_is_recovered(short_path: Path, long_tiny_dir: Path) -> None:
    """It waits until the index can be read, and says so; the folder is then free again."""
    with serve(short_path, long_tiny_dir) as shown:
        shown.wait_for("Ctrl-C stops it")
    (index,) = (short_path / "disk").glob("*/index.sqlite")
    # As with sqlite3's shell, opened to look at it.
    with closing(sqlite3.connect(index, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with serve(short_path, long_tiny_dir) as shown:
            shown.wait_for("recovering state from disk")
            shown.type(CTRL_C)
            shown.wait_for("waiting for the load to end")
            other.execute("ROLLBACK")
            assert shown.wait() == 0
            assert ended_in_order(shown, short_path)
            assert "waiting" not in shown.text()
    with serve(short_path, long_tiny_dir) as shown:
        shown.wait_for("Ctrl-C stops it")


@pytest.mark.parametrize(
    "phase", ["starting", pytest.param("downloading the model", marks=pytest.mark.slow)]
)
def test_while_a_chat_starts_its_daemon(hub: FakeHub, short_path: Path, phase: str) -> None:
    """The chat ends as a command does, and its daemon and all its files go with it."""
    (short_path / "tmp").mkdir()
    environment = in_terminal(short_path) | hub.environment(short_path / "hf")
    environment["TMPDIR"] = str(short_path / "tmp")
    words = ("chat", "--private", "--model", REPO, "--socket", str(short_path / "none"))
    with terminal(*words, env=environment, folder=short_path) as shown:
        shown.wait_for(phase)
        daemon = eventually(lambda: children(shown.process.pid))[0]
        shown.type(CTRL_C)
        assert shown.wait(STOP) == INTERRUPTED
        assert not runs(daemon)
        said = [line for line in shown.lines() if line != "^C"]
        assert said == [f"Starting a private daemon with {REPO} …"]
    assert left_over(short_path) == []
