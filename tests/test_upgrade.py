"""An upgrade to another version: what the daemon had computed and fetched is still there."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from umbel.models.load.embedded_file import FILE

from .installing import QUESTION, Place, copy_checkout, empty_place, serving

NEXT = "99.0.1"
"""The version of what comes next."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed"),
]


def release_next(checkout: Path) -> None:
    """Make a clone what it is after `git pull`: of another version."""
    path = checkout / "setup.py"
    named = 'RELEASE = "'
    text, count = re.subn(f'(?<={named})[^"]+', NEXT, path.read_text())
    assert count == 1
    path.write_text(text)


def ask(place: Place, program: Path, state: Path) -> tuple[Any, Any]:
    """Ask a daemon of one's own that has a disk tier; its status, and what it answers."""
    with serving(place, program, "--disk-dir", str(state)) as daemon:
        return daemon.status(), daemon.post(QUESTION).json()


def test_an_upgrade_to_another_version(
    short_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The next one goes on from the state and the model of this one, and neither goes with it."""
    data, checkout = tmp_path_factory.mktemp("data"), short_path / "checkout"
    copy_checkout(checkout)
    place = empty_place(short_path, checkout, data)
    umbel, state = short_path / "bin" / "umbel", short_path / "state"
    limits = ("--constraints", short_path / "limits.txt", "--python", sys.executable)
    place.run("uv", "tool", "install", *limits, checkout)
    before, cold = ask(place, umbel, state)
    assert before["version"] == place.run(umbel, "--version").strip() != NEXT
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    model = data / "umbel" / "models" / FILE.name
    fetched = model.stat()
    release_next(checkout)
    place.run("uv", "tool", "upgrade", "umbel")
    assert place.run(umbel, "--version").strip() == NEXT
    after, warm = ask(place, umbel, state)
    assert after["version"] == NEXT
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert warm["choices"] == cold["choices"]
    assert (model.stat().st_ino, model.stat().st_mtime) == (fetched.st_ino, fetched.st_mtime)
    place.run("uv", "tool", "uninstall", "umbel")
    assert not umbel.exists()
    assert FILE.is_at(model)
    assert list(state.glob("*/*.safetensors"))
